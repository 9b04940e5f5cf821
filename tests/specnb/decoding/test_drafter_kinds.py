"""What the loop does for drafters: trees, hidden states, what they are told, and drafters that are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drafter_kinds import (
    DEEP,
    DEPTH_2,
    TREES,
    TWO_DRAFTS,
    VOCAB,
    TableDrafter,
    TableTreeDrafter,
    chain,
    gamma_of,
    table,
)
from implementation_distribution import FALSE_ALARMS, PROMPTS, completions_p_value, eager, refilled
from tiny import gpt2, llama, near_copy, next_distributions
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.generate import Study, generate
from specnb.distributions import Sampling
from specnb.drafting.base import Context, Drafter, Proposal
from specnb.drafting.model import TreeDrafter
from specnb.models.cached_model import CachedModel
from specnb.rules import Outcome, TreeOutcome, TreeRule, exact_match, recursive_rejection
from specnb.trees import TokenTree

ROWS = 3_000


@pytest.mark.parametrize("name", TREES)
def test_the_record_says_which_nodes_were_emitted_and_which_distributions_they_had(name: str) -> None:
    target, drafter = llama(dtype=torch.float64), TREES[name]()
    made = generate(
        target, PROMPTS * 4, drafter, gamma=gamma_of(drafter), max_new_tokens=7, eos=1, batch_size=4, progress=False,
        study=Study(keep_probs=True),
    )  # fmt: skip
    record = made.record
    assert record.accepted.max() == TokenTree(drafter.parents or ()).depth
    for row, (prompt, tokens) in enumerate(zip(PROMPTS * 4, made.tokens, strict=True)):
        emitted = []
        for step in range(record.emitted.shape[1]):
            drafted = record.draft_tokens[row, step][record.accepted_nodes[row, step]].tolist()
            emitted += [*drafted, int(record.token[row, step])][: record.emitted[row, step]]
        assert emitted == tokens
        exact = torch.cat([next_distributions(target, [[*prompt, *tokens[:n]]]) for n in range(len(tokens))])
        assert torch.allclose((made.probs or [])[row], exact, rtol=0, atol=1e-9)


@pytest.mark.parametrize("parents", [TWO_DRAFTS, DEPTH_2, DEEP], ids=str)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_trees_give_the_greedy_sequence(make: Callable[..., PreTrainedModel], parents: tuple[int, ...]) -> None:
    target = make(dtype=torch.float64)
    asked: dict[str, Any] = {"max_new_tokens": 12, "sampling": Sampling(temperature=0), "progress": False}
    drafter = TreeDrafter(near_copy(target, 0.1), parents)
    tree = generate(target, PROMPTS, drafter, gamma=len(parents), **asked)
    assert tree.tokens == generate(target, PROMPTS, gamma=0, **asked).tokens


def test_a_tree_that_is_a_chain_is_algorithm_1() -> None:
    class AsTree(TableDrafter):
        parents = (-1, 0, 1)

    target = llama(dtype=torch.float64)
    asked: dict[str, Any] = {"gamma": 3, "max_new_tokens": 10, "seed": 5, "eos": 1, "progress": False}
    own = generate(target, PROMPTS * 10, chain(), **asked)
    tree = generate(target, PROMPTS * 10, AsTree(table()), **asked)
    assert tree.tokens == own.tokens
    for field in ("accepted", "token", "emitted", "draft_tokens", "tested"):
        assert np.array_equal(getattr(tree.record, field), getattr(own.record, field)), field
    assert np.allclose(tree.record.beta, own.record.beta)


class SeesStates(TreeDrafter):
    """Compares the target's hidden states with those of a forward pass without a cache."""

    hidden_layers = (-1, 0)
    target: PreTrainedModel
    checked = 0

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        for row, length in enumerate(context.lengths.tolist()):
            if length < 16:
                known = context.tokens[row, :length].tolist()
                states = self.target(torch.tensor([known]), output_hidden_states=True).hidden_states
                expected = torch.cat([states[layer] for layer in self.hidden_layers], dim=-1)[0, :-1]
                assert context.hidden_states is not None
                assert torch.allclose(context.hidden_states[row, : length - 1], expected, atol=1e-9)
                self.checked += 1
        return super().propose(context, uniforms)


@pytest.mark.parametrize("make", [llama, gpt2])
def test_hidden_states_follow_the_accepted_path(make: Callable[..., PreTrainedModel]) -> None:
    """In refilled rows too."""
    target = make(dtype=torch.float64)
    drafter = SeesStates(near_copy(target, 0.1), DEEP)
    drafter.target = target
    made = generate(
        target, PROMPTS * 5, drafter, gamma=len(DEEP), max_new_tokens=9, eos=1, batch_size=2, progress=False
    )
    assert made.record.accepted.max() == 3
    assert drafter.checked > 10


def test_update_is_told_what_was_accepted() -> None:
    class Listening(TableDrafter):
        def start(self, context: Context, rows: Tensor | None = None) -> None:
            self.heard: list[tuple[Tensor, Tensor]] = []

        def update(self, context: Context, outcome: Outcome | TreeOutcome) -> None:
            self.heard.append((outcome.accepted.clone(), context.newest.clone()))

    drafter = Listening(table())
    made = generate(llama(), PROMPTS, drafter, gamma=2, max_new_tokens=6, progress=False)
    for step, (accepted, newest) in enumerate(drafter.heard):
        for row in np.flatnonzero(made.record.whole[:, step]):
            assert accepted[row] == made.record.accepted[row, step]
            assert newest[row] == made.record.token[row, step]


class Silent(TableDrafter):
    """Never has anything to propose."""

    def distribution(self, context: Context, position: int) -> Tensor:
        return torch.zeros(len(context.lengths), VOCAB)


def test_without_a_proposal_a_step_is_a_step_of_the_target() -> None:
    asked: dict[str, Any] = {"max_new_tokens": 6, "seed": 4, "progress": False}
    alone = generate(llama(), PROMPTS, gamma=0, **asked)
    silent = generate(llama(), PROMPTS, Silent(table()), gamma=3, **asked)
    assert silent.tokens == alone.tokens
    assert (silent.record.draft_tokens == -1).all()
    assert not silent.record.tested.any()
    for rule in (None, recursive_rejection):
        assert generate(llama(), PROMPTS, TableTreeDrafter(DEEP), gamma=0, rule=rule, **asked).tokens == alone.tokens


# Planted bugs of trees


def without_residual(
    p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...], accept: Tensor, final: Tensor
) -> TreeOutcome:
    """Tests each child against p as if no other had been rejected, by a q that leaves nothing to subtract."""
    first, second = (
        recursive_rejection(p, q, draft_tokens.where(torch.arange(len(parents)) == child, -1), parents, accept, final)
        for child in (0, 1)
    )
    took_first = first.accepted > 0
    return TreeOutcome(
        *(a.where(took_first.view(-1, *[1] * (a.dim() - 1)), b) for a, b in zip(first, second, strict=True))
    )


def not_moved(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(CachedModel, "move", lambda *_: None)
    return {}


def siblings_visible(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    visible = TokenTree.visible

    def all_before(tree: TokenTree, first: Tensor, capacity: int) -> Tensor:
        entry = torch.arange(capacity) - first[:, None]
        return visible(tree, first, capacity) | ((entry >= 0)[:, None] & (entry[:, None] <= tree.depths[:, None]))

    monkeypatch.setattr(TokenTree, "visible", all_before)
    return {}


def no_residual(_: Any) -> dict[str, Any]:
    return {"rule": TreeRule(without_residual)}


@pytest.mark.parametrize("bug", [not_moved, siblings_visible, no_residual])
def test_bugs_of_trees_are_found(
    bug: Callable[[pytest.MonkeyPatch], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the test that `test_all_drafters` makes of the right loop."""
    parents = TWO_DRAFTS if bug is no_residual else DEPTH_2
    made = refilled(eager("llama"), TableTreeDrafter(parents), ROWS, gamma=len(parents), seed=6, **bug(monkeypatch))
    assert completions_p_value(made, "llama") < FALSE_ALARMS


# What is refused


class Deep(TableDrafter):
    hidden_layers = (7,)


class Careless(TableDrafter):
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return Proposal(uniforms, context.last_hidden_state)


class Unfinished(Drafter):
    vocab = VOCAB


class Bare:
    vocab = VOCAB
    start = None


class Broken(TableTreeDrafter):
    """One q of its tree is multiplied by `factor`."""

    def __init__(self, factor: float) -> None:
        super().__init__(TWO_DRAFTS)
        self.factor = factor

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        tokens, q = super().propose(context, uniforms)
        return Proposal(tokens, torch.cat([q[:, :1], q[:, 1:] * self.factor], dim=1))


@pytest.mark.parametrize(
    ("make", "asked", "error", "message"),
    [
        (lambda: TableTreeDrafter(TWO_DRAFTS), {"gamma": 2, "rule": exact_match}, TypeError, "proposes a tree"),
        (chain, {"rule": recursive_rejection}, TypeError, "TableDrafter proposes a chain"),
        (lambda: TableTreeDrafter(TWO_DRAFTS), {}, ValueError, "gamma is 4, and the tree .* has 2 nodes; give gamma=2"),
        (lambda: TableTreeDrafter((1, -1)), {"gamma": 2}, ValueError, "node 0 has the parent 1; it must be an earlier"),
        (Bare, {}, TypeError, r"draft is a Bare; .* It lacks parents, .*propose, update: inherit from"),
        (lambda: Deep(table()), {}, ValueError, r"hidden layers \(7,\) are asked for, and LlamaForCausalLM has"),
        (lambda: Careless(table()), {}, ValueError, "set the drafter's hidden_layers"),
        (Unfinished, {}, NotImplementedError, "Unfinished has no propose"),
        (lambda: Broken(float("nan")), {"gamma": 2}, FloatingPointError, "NaN"),
        (lambda: Broken(2.0), {"gamma": 2}, ValueError, "q"),
    ],
)
def test_drafters_are_refused(
    make: Callable[[], Any], asked: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        generate(llama(), PROMPTS, make(), max_new_tokens=2, progress=False, **asked)
