"""What every drafter keeps: the target's distribution, enumerated and in the loop; rows that do not
interact. Trees of a draft model: their cache and their schemes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from architectures import tiny_model
from drafter_kinds import BUGS, CHAINS, HIERARCHICAL, TREES, VOCAB, TableDrafter, gamma_of, table
from implementation_distribution import FALSE_ALARMS, PROMPTS, acceptance_p_value, completions_p_value, eager, refilled
from rule_checks import step_off
from tiny import ARCHITECTURES, LIMIT, llama, near_copy, next_distributions
from torch import Tensor

from specnb.distributions import Sampling
from specnb.drafters import Context, Drafter, ModelDrafter, Proposal, TreeDrafter, padded
from specnb.sampler import generate
from specnb.trees import Scheme, distinct_children, independent_children, top_children
from studies.drafters.tables import MixtureDrafter, UniformDrafter

ALL = CHAINS | HIERARCHICAL | TREES
IN_THE_LOOP = [*HIERARCHICAL, *TREES, "copy and stopped", "copy, otherwise a head"]
"""What cannot be enumerated, and two combinations of which each has a cache; of chains every step is
enumerated."""
PREFIXES = ((0, 1, 0), (3, 1, 2, 3, 1))
ROWS = 1_500
LEVEL = FALSE_ALARMS / (2 * len(IN_THE_LOOP))


class WithStates(Drafter):
    """`drafter` with hidden states made from the tokens, as there is no target in an
    enumeration."""

    vocab = VOCAB

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.drafter.start(self.seen(context), rows)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return self.drafter.propose(self.seen(context), uniforms)

    def seen(self, context: Context) -> Context:
        width = 8 * len(self.drafter.hidden_layers)
        states = torch.randn(VOCAB, width, generator=torch.Generator().manual_seed(3))
        return context._replace(hidden_states=states[context.tokens].cumsum(dim=1))


@pytest.mark.parametrize("name", CHAINS)
def test_a_step_with_the_drafter_has_the_target_s_joint_distribution(name: str) -> None:
    for seed, prefix in enumerate(PREFIXES):
        assert step_off(WithStates(CHAINS[name]()), prefix, seed=seed) < 1e-6  # tables and models are float32


@pytest.mark.parametrize("name", BUGS)
def test_the_enumeration_finds_the_planted_bug(name: str) -> None:
    assert max(step_off(BUGS[name](), prefix, seed=seed) for seed, prefix in enumerate(PREFIXES)) > 0.005


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Drafter]:
    """Makes a drafter whose models compute in float64, where rounding does not reach a uniform."""
    for architecture, make in ARCHITECTURES.items():
        monkeypatch.setitem(ARCHITECTURES, architecture, partial(make, dtype=torch.float64))

    def made(name: str) -> Drafter:
        torch.set_default_dtype(torch.float64)  # of heads
        try:
            return ALL[name]()
        finally:
            torch.set_default_dtype(torch.float32)

    return made


# q along given tokens


@torch.inference_mode()
def started(drafter: Drafter) -> Context:
    """Rows of unequal lengths, one of them of a single token."""
    tokens = torch.randint(VOCAB, (12, 14), generator=torch.Generator().manual_seed(1))
    context = WithStates(drafter).seen(Context(tokens, torch.arange(12) % 6 + 1))
    drafter.start(context)
    return context


@pytest.mark.parametrize("name", CHAINS | HIERARCHICAL)
@torch.inference_mode()
def test_q_along_sampled_tokens_is_that_of_the_proposal(name: str) -> None:
    drafter = ALL[name]()
    uniforms = torch.rand(12, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    tokens, q = padded(*drafter.propose(started(drafter), uniforms), 3)
    assert (tokens >= 0).any()
    assert torch.allclose(drafter.along(started(drafter), tokens.clamp_min(0)), q, atol=1e-5)


BY_STEPS = {"entropy-guided, cut at the end", "model, entropy-guided"}
"""A step changes what the next one proposes, so `propose` cannot be asked again."""


@pytest.mark.parametrize("name", [name for name in CHAINS if name not in BY_STEPS])
@torch.inference_mode()
def test_any_tokens_can_be_given_by_the_uniforms_of_propose(name: str) -> None:
    """Up to a token that the row cannot sample."""
    drafter = ALL[name]()
    tokens = torch.randint(VOCAB, (12, 3), generator=torch.Generator().manual_seed(4))
    by_propose = Drafter.along(drafter, started(drafter), tokens)
    own = drafter.along(started(drafter), tokens)
    possible = (own.gather(-1, tokens[..., None])[..., 0] > 0)[:, :-1].cumprod(dim=1).bool()
    possible = torch.cat([torch.ones(12, 1, dtype=torch.bool), possible], dim=1)
    assert torch.allclose(by_propose, own.where(possible[..., None], 0.0), atol=1e-5)


class Backwards(TableDrafter):
    """Samples the first token with the last uniform."""

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return super().propose(context, uniforms.flip(1))


def test_tokens_that_cannot_be_given_are_refused() -> None:
    context = Context(torch.zeros(2, 8, dtype=torch.int64), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="write along"):
        Backwards(table()).along(context, torch.tensor([[0, 1, 2], [3, 2, 1]]))
    for name in TREES:
        drafter = TREES[name]()
        with pytest.raises(TypeError, match="tree"):
            drafter.along(context, torch.tensor([[0, 1], [1, 2]]))


@pytest.mark.parametrize("name", ALL)
def test_a_row_gets_the_same_tokens_whatever_batch_it_is_in(name: str, in_float64: Callable[[str], Drafter]) -> None:
    """All together; in two rows, which others take over; and alone. Eager attention has a float32
    part."""
    target, drafter = llama(dtype=torch.float64), in_float64(name)
    asked: dict[str, Any] = {"gamma": gamma_of(drafter), "max_new_tokens": 12, "seed": 3}
    together = generate(target, PROMPTS * 2, drafter, **asked)
    for batch_size in (2, 1):
        # It forgets the batch before.
        made = generate(target, PROMPTS * 2, drafter, batch_size=batch_size, **asked)
        assert made.tokens == together.tokens
        assert np.array_equal(made.record.draft_tokens, together.record.draft_tokens)
        assert np.allclose(made.record.beta, together.record.beta, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CHAINS | HIERARCHICAL)
def test_a_row_can_be_drafted_for_up_to_the_last_position(name: str) -> None:
    """The models have no position after the last token asked for, and the caches no slot after
    those allocated. Rows need different numbers of steps, so some have ended while others go on."""
    target, drafter, prompts = llama(), ALL[name](), torch.arange(16).reshape(8, 2).remainder(VOCAB)
    for gamma in range(1, 7):
        made = generate(target, prompts, drafter, gamma=gamma, max_new_tokens=LIMIT - 2)
        assert {len(tokens) for tokens in made.tokens} == {LIMIT - 2}


@pytest.mark.parametrize("name", IN_THE_LOOP)
def test_the_loop_has_the_target_s_distribution(name: str) -> None:
    architecture, eos = [("llama", None), ("gpt2", 1)][IN_THE_LOOP.index(name) % 2]
    drafter = ALL[name]()
    made = refilled(eager(architecture), drafter, ROWS, gamma=gamma_of(drafter), eos=eos, seed=8)
    assert completions_p_value(made, architecture, eos) > LEVEL
    assert name in TREES or acceptance_p_value(made.record) > LEVEL
    assert made.record.accepted.any()


# What is refused, as it would be wrong without a word.

FOUR = UniformDrafter(VOCAB)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelDrafter(tiny_model("recurrent_gemma")),  # type: ignore[arg-type]
        lambda: TreeDrafter(llama(), (0, -1)),
    ],
)
def test_drafters_that_do_not_fit_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        make()


@pytest.mark.parametrize("inside", [lambda drafter: drafter, lambda drafter: MixtureDrafter(drafter, FOUR)])
def test_nan_in_the_distribution_of_a_draft_token_is_an_error_and_not_the_end_of_the_draft(inside: Any) -> None:
    class NotANumber(UniformDrafter):
        def distribution(self, context: Context, position: int) -> Tensor:
            return super().distribution(context, position) * (float("nan") if position == 1 else 1)

    with pytest.raises(FloatingPointError, match="NaN"):
        generate(llama(), [[1, 2]], inside(NotANumber(VOCAB)), gamma=3, max_new_tokens=8)


# Trees of a draft model.

SHAPES = [(-1, -1), (-1, 0, 1), (-1, -1, 0, 0, 1), (-1, 0, -1, 1, 2, 1)]


class Checked(TreeDrafter):
    """Compares each q with the model's distribution without a cache."""

    checked = 0

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        proposal = super().propose(context, uniforms)
        for row, length in enumerate(context.lengths.tolist()):
            known, tokens = context.tokens[row, :length].tolist(), proposal.draft_tokens[row].tolist()
            for node, parent in enumerate(self.parents):
                prefix = tuple(tokens[i] for i in self.tree.paths[parent + 1].tolist() if i >= 0)
                if length + len(prefix) > 16:
                    continue
                siblings = [torch.tensor(tokens[i]) for i in range(node) if self.parents[i] == parent]
                if -1 in prefix:
                    expected = torch.zeros(4, dtype=torch.float64)
                else:
                    expected = self.scheme(next_distributions(self.model, [known + list(prefix)])[0], siblings)
                assert torch.allclose(proposal.q[row, node], expected, atol=1e-9)
                assert (tokens[node] >= 0) == bool(expected.sum() > 0)
                self.checked += 1
        return proposal


@pytest.mark.parametrize("scheme", [independent_children, distinct_children, top_children])
@pytest.mark.parametrize("parents", SHAPES, ids=str)
def test_the_cache_follows_the_accepted_path(parents: tuple[int, ...], scheme: Scheme) -> None:
    """After accepted leaves too, which the draft model has not seen, and in refilled rows."""
    target = llama(dtype=torch.float64)
    drafter = Checked(near_copy(target, 0.1), parents, scheme=scheme)
    made = generate(target, PROMPTS * 8, drafter, gamma=len(parents), max_new_tokens=9, eos=1, batch_size=8)
    assert made.record.accepted.max() == drafter.tree.depth
    assert drafter.checked > 50


@torch.inference_mode()
def test_children_are_several_if_the_scheme_and_the_sampling_allow_it() -> None:
    """Distinct ones differ, and the fifth of four is missing; at temperature 0 only the top ones are
    several."""
    context = Context(torch.zeros(5, 12, dtype=torch.int64).random_(4), torch.full((5,), 3))

    def proposed(parents: tuple[int, ...], scheme: Scheme, temperature: float) -> Proposal:
        drafter = TreeDrafter(llama(), parents, Sampling(temperature), scheme)
        drafter.start(context)
        return drafter.propose(context, torch.rand(5, len(parents), dtype=torch.float64))

    tokens, q = proposed((-1,) * 5 + (4,), distinct_children, 1.0)
    assert (tokens[:, :4].sort(-1).values == torch.arange(4)).all()
    assert (tokens[:, 4:] == -1).all()  # the fifth child, and the child of that
    assert (q[:, 4:] == 0).all()
    assert (proposed((-1, -1), distinct_children, 0.0).draft_tokens[:, 1] == -1).all()
    tokens, q = proposed((-1, -1), top_children, 0.0)
    assert (tokens[:, 0] != tokens[:, 1]).all()
    assert (q.amax(-1) == 1).all()
