"""Every kind of drafter in the real loop: the target's joint distribution, refilled rows, hidden states, trees."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drafter_kinds import TableDrafter
from drafters_for_tests import DEEP, DEPTH_2, DRAFTERS, TWO_DRAFTS, VOCAB, ModelTreeDrafter, TableTreeDrafter, table
from implementation_distribution import (
    FALSE_ALARMS,
    PROMPTS,
    assert_rows_do_not_interact,
    completions_p_value,
    eager,
    refilled,
)
from tape import taped
from tiny import gpt2, llama, near_copy, next_distributions
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.generate import Generation, Study, generate
from specnb.decoding.step import NAN, TreeBatch
from specnb.distributions import Sampling, standardise, uniforms
from specnb.drafting.base import Context, Drafter, Proposal
from specnb.models.cached_model import CachedModel
from specnb.rules import Outcome, Rule, TreeOutcome, TreeRule, exact_match, recursive_rejection, token_verification
from specnb.trees import TokenTree

ROWS = 3_000
LEVEL = FALSE_ALARMS / len(DRAFTERS)


def emitted_by_the_record(made: Generation, row: int) -> list[int]:
    """What the record says was emitted."""
    record, tokens = made.record, []
    for step in range(record.emitted.shape[1]):
        drafted = record.draft_tokens[row, step][record.accepted_nodes[row, step]].tolist()
        tokens += [*drafted, int(record.token[row, step])][: record.emitted[row, step]]
    return tokens


@pytest.mark.parametrize("name", DRAFTERS)
def test_every_kind_of_drafter_leaves_the_distribution_exact(name: str) -> None:
    drafter, gamma = DRAFTERS[name]()
    architecture, eos = [("llama", None), ("gpt2", 1)][list(DRAFTERS).index(name) % 2]
    made = refilled(eager(architecture), drafter, ROWS, gamma=gamma, eos=eos, seed=6)
    assert completions_p_value(made, architecture, eos) > LEVEL
    assert made.record.accepted.max() == (TokenTree(drafter.parents).depth if drafter.parents else gamma)
    for row in range(0, ROWS, 50):
        assert emitted_by_the_record(made, row) == made.tokens[row]


@pytest.mark.parametrize("name", DRAFTERS)
def test_refilled_rows_get_the_tokens_they_would_get_together(name: str) -> None:
    _, gamma = DRAFTERS[name]()
    assert_rows_do_not_interact(llama(dtype=torch.float64), lambda: DRAFTERS[name]()[0], gamma=gamma)


# Trees


@pytest.mark.parametrize("parents", [TWO_DRAFTS, DEPTH_2, DEEP], ids=str)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_trees_give_the_greedy_sequence(make: Callable[..., PreTrainedModel], parents: tuple[int, ...]) -> None:
    target = make(dtype=torch.float64)
    asked: dict[str, Any] = {"max_new_tokens": 12, "sampling": Sampling(temperature=0), "progress": False}
    plain = generate(target, PROMPTS, gamma=0, **asked)
    drafter = ModelTreeDrafter(near_copy(target, 0.1), parents)
    assert generate(target, PROMPTS, drafter, gamma=len(parents), **asked).tokens == plain.tokens


def test_a_tree_that_is_a_chain_is_algorithm_1() -> None:
    class AsTree(TableDrafter):
        parents = (-1, 0, 1)

    target = llama(dtype=torch.float64)
    asked: dict[str, Any] = {"gamma": 3, "max_new_tokens": 10, "seed": 5, "eos": 1, "progress": False}
    chain = generate(target, PROMPTS * 10, TableDrafter(table()), **asked)
    tree = generate(target, PROMPTS * 10, AsTree(table()), **asked)
    assert tree.tokens == chain.tokens
    for field in ("accepted", "token", "emitted", "draft_tokens", "tested"):
        assert np.array_equal(getattr(tree.record, field), getattr(chain.record, field)), field
    assert np.allclose(tree.record.beta, chain.record.beta)


class CheckedTreeDrafter(ModelTreeDrafter):
    """Compares each q, and the target's hidden states, with those of the models without a cache."""

    hidden_layers = (-1, 0)
    checked = 0
    target: PreTrainedModel

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        proposal = super().propose(context, uniforms)
        for row, length in enumerate(context.lengths.tolist()):
            known = context.tokens[row, :length].tolist()
            if length < 16:
                states = self.target(torch.tensor([known]), output_hidden_states=True).hidden_states
                expected = torch.cat([states[layer] for layer in self.hidden_layers], dim=-1)[0, :-1]
                assert context.hidden_states is not None
                assert torch.allclose(context.hidden_states[row, : length - 1], expected, atol=1e-9)
            for node, parent in enumerate(self.parents):
                prefix: list[int] = []
                while parent >= 0:
                    prefix.insert(0, int(proposal.draft_tokens[row, parent]))
                    parent = self.parents[parent]
                if length + len(prefix) <= 16:
                    exact = next_distributions(self.model, [known + prefix])[0]
                    assert torch.allclose(proposal.q[row, node], exact, atol=1e-9)
                    self.checked += 1
        return proposal


@pytest.mark.parametrize("make", [llama, gpt2])
def test_caches_and_hidden_states_follow_the_accepted_path(make: Callable[..., PreTrainedModel]) -> None:
    """In refilled rows too. A forward pass without a cache gives the same hidden states and distributions."""
    target = make(dtype=torch.float64)
    drafter = CheckedTreeDrafter(near_copy(target, 0.1), DEEP)
    drafter.target = target
    made = generate(
        target, PROMPTS * 5, drafter, gamma=len(DEEP), max_new_tokens=9, eos=1, batch_size=2, progress=False
    )
    assert made.record.accepted.max() == 3
    assert drafter.checked > 100


@pytest.mark.parametrize("keep", ["chain", "tree of depth 2"])
def test_the_kept_distributions_are_the_target_s_own(keep: str) -> None:
    target = llama(dtype=torch.float64)
    drafter, gamma = DRAFTERS[keep]()
    made = generate(
        target, PROMPTS * 2, drafter, gamma=gamma, max_new_tokens=7, eos=1, batch_size=4, progress=False,
        study=Study(keep_probs=True),
    )  # fmt: skip
    for prompt, tokens, probs in zip(PROMPTS * 2, made.tokens, made.probs or [], strict=True):
        prefixes = [[*prompt, *tokens[:n]] for n in range(len(tokens))]
        exact = torch.cat([next_distributions(target, [prefix]) for prefix in prefixes])
        assert torch.allclose(probs, exact, rtol=0, atol=1e-9)


def test_distributions_are_not_kept_by_compiled_steps() -> None:
    with pytest.raises(ValueError, match="keep_probs is True and compile is True; leave one of them out"):
        generate(llama(), PROMPTS, max_new_tokens=2, compile=True, study=Study(keep_probs=True), progress=False)


def test_a_tree_step_is_static() -> None:
    """Its operations, replayed without Python, give the same tokens."""
    target = llama(dtype=torch.float64)
    asked: dict[str, Any] = {"gamma": len(DEPTH_2), "max_new_tokens": 10, "seed": 4, "eos": 2, "progress": False}
    plain = generate(target, PROMPTS, TableTreeDrafter(DEPTH_2), **asked)
    replayed = generate(target, PROMPTS, TableTreeDrafter(DEPTH_2), **asked, study=Study(batch_class=taped(TreeBatch)))
    assert replayed.tokens == plain.tokens


# Planted bugs of trees


def without_residual(
    p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...], accept: Tensor, final: Tensor
) -> TreeOutcome:
    """Tests each child against p as if no other had been rejected, by a q that leaves nothing to subtract."""
    outcome = recursive_rejection(p, q, draft_tokens, parents, accept, final)
    first = recursive_rejection(p, q, draft_tokens.where(torch.arange(len(parents)) == 0, -1), parents, accept, final)
    second = recursive_rejection(p, q, draft_tokens.where(torch.arange(len(parents)) == 1, -1), parents, accept, final)
    return type(outcome)(*(a.where(first.accepted.view(-1, *[1] * (a.dim() - 1)) > 0, b)
                           for a, b in zip(first, second, strict=True)))  # fmt: skip


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
    parents = TWO_DRAFTS if bug is no_residual else DEPTH_2
    drafter = TableTreeDrafter(parents)
    made = refilled(eager("llama"), drafter, ROWS, gamma=len(parents), seed=6, **bug(monkeypatch))
    assert completions_p_value(made, "llama") < LEVEL


# What is refused


def test_a_rule_for_chains_is_refused_for_a_tree_and_the_reverse() -> None:
    tree = TableTreeDrafter(TWO_DRAFTS)
    with pytest.raises(TypeError, match=r"TableTreeDrafter proposes a tree, and rule is .*; it must be a TreeRule"):
        generate(llama(), PROMPTS, tree, gamma=2, rule=exact_match)
    with pytest.raises(TypeError, match=r"TemplateDrafter proposes a chain, .* it must be a rule for chains, or None"):
        generate(llama(), PROMPTS, TableDrafter(table()), rule=recursive_rejection)


def test_a_tree_has_the_gamma_of_its_nodes() -> None:
    with pytest.raises(ValueError, match="gamma is 4, and the tree of TableTreeDrafter has 2 nodes; give gamma=2"):
        generate(llama(), PROMPTS, TableTreeDrafter(TWO_DRAFTS))
    with pytest.raises(ValueError, match="node 0 has the parent 1; it must be an earlier node"):
        generate(llama(), PROMPTS, TableTreeDrafter((1, -1)), gamma=2)


@pytest.mark.parametrize("rule", [None, recursive_rejection, token_verification])
def test_without_draft_tokens_a_tree_drafter_and_any_exact_rule_decode_plainly(rule: Rule | TreeRule | None) -> None:
    asked: dict[str, Any] = {"gamma": 0, "max_new_tokens": 6, "seed": 2, "progress": False}
    plain = generate(llama(), PROMPTS, **asked)
    assert generate(llama(), PROMPTS, TableTreeDrafter(TWO_DRAFTS), rule=rule, **asked).tokens == plain.tokens


def test_a_drafter_without_the_members_is_told_what_it_lacks() -> None:
    class Bare:
        vocab = VOCAB

        def start(self, context: Context, rows: Tensor | None = None) -> None:
            pass

    with pytest.raises(TypeError, match=r"draft is a Bare; .* It lacks parents, .*propose, update: inherit from"):
        generate(llama(), PROMPTS, Bare())  # type: ignore[arg-type]


def test_hidden_layers_that_are_not_there_are_refused() -> None:
    class Deep(TableDrafter):
        hidden_layers = (7,)

    with pytest.raises(ValueError, match=r"hidden layers \(7,\) are asked for, and LlamaForCausalLM has .* -3 to 2"):
        generate(llama(), PROMPTS, Deep(table()), max_new_tokens=2)


def test_hidden_states_have_to_be_asked_for() -> None:
    class Careless(TableDrafter):
        def propose(self, context: Context, uniforms: Tensor) -> Proposal:
            return Proposal(uniforms, context.last_hidden_state)

    with pytest.raises(ValueError, match="set the drafter's hidden_layers"):
        generate(llama(), PROMPTS, Careless(table()), max_new_tokens=2)


def test_a_drafter_without_propose_says_so() -> None:
    class Unfinished(Drafter):
        vocab = VOCAB

    with pytest.raises(NotImplementedError, match="Unfinished has no propose"):
        generate(llama(), PROMPTS, Unfinished(), max_new_tokens=2)  # type: ignore[abstract]


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


# The parts of a tree's step


def tree_batch(parents: tuple[int, ...] = DEEP, rows: int = 3, **more: Any) -> TreeBatch:
    """Prompts that enter it have 9 tokens to come."""
    settings: dict[str, Any] = {"drafter": TableTreeDrafter(parents), "gamma": len(parents), "sampling": Sampling()}
    chosen = settings | {"rule": recursive_rejection, "ends": 0} | more
    return TreeBatch(
        llama(dtype=torch.float64), chosen["drafter"], chosen["sampling"], chosen["rule"], rows, chosen["gamma"], 30, 9,
        chosen["ends"],
    )  # fmt: skip


def test_a_tree_s_batch_has_its_parents_and_a_path_of_its_depth() -> None:
    batch = tree_batch(ends=2)
    assert batch.parents == DEEP
    assert batch.drafter is not None
    assert batch.state.path is not None
    assert batch.state.path.shape == (3, 10, 3)
    assert (batch.vocab, batch.state.gamma, len(batch.state.eos), batch.runner.capacity) == (VOCAB, len(DEEP), 2, 30)
    assert batch.tree.depths.device.type == "cpu"
    for alone in (tree_batch(gamma=0), tree_batch(drafter=None, gamma=0), tree_batch(drafter=TableDrafter(table()))):
        assert alone.parents == ()
        assert alone.state.path is not None
        assert alone.state.path.shape == (3, 10, 0)
    assert tree_batch(gamma=0).drafter is None


def test_the_target_runs_over_the_newest_token_and_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was proposed, or what is not in the vocabulary, it runs over the nearest token."""
    batch = tree_batch(DEPTH_2)
    batch.state.tokens.copy_(torch.arange(90).reshape(3, 30) % VOCAB)
    batch.state.lengths.copy_(torch.tensor([1, 4, 7]))
    given: list[Any] = []
    monkeypatch.setattr(batch.runner, "run", lambda *inputs, **named: given.append((*inputs, named)))
    batch.run_target(torch.tensor([[0, 1, -1, 4, 9], [0, 0, 0, 0, 0], [3, 2, 1, 0, 3]]))
    ((tokens, slots, named),) = given
    assert tokens.tolist() == [[0, 0, 1, 0, 3, 3], [1, 0, 0, 0, 0, 0], [2, 3, 2, 1, 0, 3]]
    first = torch.tensor([0, 3, 6])
    assert slots.tolist() == [[at + entry for entry in range(6)] for at in first.tolist()]
    assert named["positions"].tolist() == [[at + depth for depth in (0, 1, 1, 2, 2, 2)] for at in first.tolist()]
    assert torch.equal(named["visible"], TokenTree(DEPTH_2).visible(first, 30))
    assert named["keep"] == 6
    assert set(named) == {"keep", "positions", "visible"}


@torch.inference_mode()
def test_a_tree_s_step_is_verified_and_recorded_as_the_rule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 rows of logits at random, 9 in 10 without an end: tokens, record, path, distributions and what is moved."""
    rows, sampling, chance = 40, Sampling(0.8, top_k=3), torch.Generator().manual_seed(1)
    batch = tree_batch(DEEP, rows, sampling=sampling, ends=1)
    state, gamma = batch.state, len(DEEP)
    batch.clear([2])
    prompts = [[1, 3, 0][: 1 + row % 3] for row in range(rows)]
    batch.enter(list(range(rows)), prompts, uniforms(4, range(rows), 9, gamma), 9)
    state.record_probs(VOCAB, torch.float64)
    logits = torch.randn(rows, gamma + 1, VOCAB, generator=chance, dtype=torch.float64)
    q = torch.softmax(torch.randn(rows, gamma, VOCAB, generator=chance), dim=-1)
    draft_tokens = torch.randint(0, VOCAB, (rows, gamma), generator=chance)
    draft_tokens[::4, 3], q[::4, 3] = -1, 0.0
    accept, final = state.step_uniforms[:, gamma : 2 * gamma].clone(), state.step_uniforms[:, -1].clone()
    p = standardise(logits, sampling)
    expected = recursive_rejection(p, q, draft_tokens, DEEP, accept, final)
    moved: list[tuple[list[list[int]], list[list[int]]]] = []
    monkeypatch.setattr(batch.runner, "move", lambda *slots: moved.append(tuple(one.tolist() for one in slots)))
    outcome = batch.verify_and_emit(logits, draft_tokens, q)
    assert all(torch.equal(*pair) for pair in zip(outcome, expected, strict=True))
    ((sources, destinations),) = moved
    for row in range(rows):
        start, accepted, path = len(prompts[row]), int(expected.accepted[row]), expected.path[row].tolist()
        nodes = path[:accepted]
        new = [*draft_tokens[row, nodes].tolist(), int(expected.token[row])]
        new = new[: new.index(2) + 1] if 2 in new else new
        assert state.tokens[row, start : start + len(new)].tolist() == new
        assert int(state.lengths[row]) == start + len(new)
        assert int(state.status[row]) == int(state.remaining[row]) == (0 if 2 in new else 9 - len(new))
        beta = np.minimum(p[row, [parent + 1 for parent in DEEP]].numpy(), q[row].numpy()).sum(axis=1)
        recorded = state.record[row, 0].tolist()
        assert recorded[: gamma + 3] == [*draft_tokens[row].tolist(), accepted, int(expected.token[row]), len(new)]
        assert recorded[gamma + 3 :] == pytest.approx(beta, abs=1e-12)
        assert state.path is not None
        assert state.probs is not None
        assert state.path[row, 0].tolist() == path
        kept = [0, *(node + 1 for node in nodes)]
        assert torch.equal(state.probs[row, : len(kept)], p[row, kept])
        assert sources[row][:accepted] == [start + node for node in nodes]
        assert destinations[row] == [start, start + 1, start + 2]
    assert state.steps.tolist() == [1] * rows
    assert torch.equal(state.step_uniforms, state.uniforms[:, 1])
    assert {int(one) for one in expected.accepted} == {0, 1, 2, 3}
    assert not state.has_nan.any()
    assert not state.improper.any()


@torch.inference_mode()
def test_in_a_tree_nan_is_found_in_any_distribution() -> None:
    """A row each for NaN of the target at the root and at each node, of q at each node; and one without."""
    entries, nodes = len(DEPTH_2) + 1, len(DEPTH_2)
    rows = entries + nodes + 1
    batch = tree_batch(DEPTH_2, rows)
    batch.clear([])
    batch.enter(list(range(rows)), [[1]] * rows, uniforms(0, range(rows), 9, nodes), 9)
    logits, q = torch.zeros(rows, entries, VOCAB), torch.full((rows, nodes, VOCAB), 1 / VOCAB)
    logits[range(entries), range(entries), 1] = torch.nan
    q[range(entries, entries + nodes), range(nodes), 2] = torch.nan
    batch.verify_and_emit(logits, torch.ones(rows, nodes, dtype=torch.int64), q)
    assert batch.state.has_nan.tolist() == [True] * (rows - 1) + [False]
    assert batch.state.status[:-1].tolist() == [NAN] * (rows - 1)
    assert not batch.state.improper.any()
    batch.verify_and_emit(0 * logits.nan_to_num(), torch.ones(rows, nodes, dtype=torch.int64), q.nan_to_num(0.25))
    assert batch.state.has_nan.tolist() == [True] * (rows - 1) + [False], "a later step does not forget it"


def test_in_a_tree_improper_proposals_are_marked() -> None:
    batch = tree_batch(TWO_DRAFTS)
    batch.clear([])
    batch.enter([0, 1, 2], PROMPTS, uniforms(0, range(3), 9, 2), 9)
    q = torch.full((3, 2, VOCAB), 1 / VOCAB)
    q[1] *= 2
    batch.verify_and_emit(torch.zeros(3, 3, VOCAB), torch.tensor([[0, 1], [0, 1], [0, VOCAB]]), q)
    assert batch.state.improper.tolist() == [False, True, True]
    assert batch.state.record[2, 0, :2].tolist() == [0, VOCAB - 1], "clamped, so that a rule can index by it"


def test_in_a_tree_the_outcome_of_the_rule_is_checked() -> None:
    batch = tree_batch(TWO_DRAFTS, rule=TreeRule(lambda p, *others: None))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="the rule returned a NoneType"):
        batch.verify_and_emit(
            torch.zeros(3, 3, VOCAB), torch.zeros(3, 2, dtype=torch.int64), torch.full((3, 2, VOCAB), 1 / VOCAB)
        )


def test_a_tree_step_needs_no_default_device() -> None:
    """Every tensor of a step is made on the model's device."""
    rows = [tree_batch(DEEP), tree_batch(DEEP)]
    own = uniforms(0, range(3), 9, len(DEEP))
    with torch.inference_mode():
        for batch, default in zip(rows, ("cpu", "meta"), strict=True):
            batch.clear([])
            with torch.device(default):
                batch.enter([0, 1, 2], PROMPTS, own, 9)
                batch.step()
                batch.step()
    assert torch.equal(rows[0].state.tokens, rows[1].state.tokens)
    assert torch.equal(rows[0].state.record, rows[1].state.record)
