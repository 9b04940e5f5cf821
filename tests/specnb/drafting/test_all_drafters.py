"""What every drafter keeps: the target's distribution, enumerated and in the loop; rows that do not
interact."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import distribution_pair
from drafter_kinds import BUGS, CHAINS, HIERARCHICAL, TREES, VOCAB, TableDrafter, chain, gamma_of, table
from implementation_distribution import FALSE_ALARMS, PROMPTS, acceptance_p_value, completions_p_value, eager, refilled
from numpy.typing import NDArray
from specnb.decoding import step
from specnb.decoding.auto_gamma import Auto, AutoGamma, varies
from tiny import ARCHITECTURES, LIMIT, llama
from torch import Tensor

from specnb.distributions import sample
from specnb.drafters import Context, Drafter, MixtureDrafter, Proposal
from specnb.enumeration import completed, drafter_step_distribution, joint_distribution
from specnb.rules import Outcome
from specnb.sampler import generate

ALL = CHAINS | HIERARCHICAL | TREES
IN_THE_LOOP = [*HIERARCHICAL, *TREES, "bandit, stopped", "copy and an attention head", "copy, otherwise another model"]
"""What cannot be enumerated, and three combinations of which each has a cache; of chains every step
is enumerated."""
PREFIXES = ((0, 1, 0), (3, 1, 2, 3, 1))
ROWS, GAMMA = 1_500, 2
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


@torch.inference_mode()
def deviation(drafter: Drafter, prefix: tuple[int, ...], seed: int = 0) -> float:
    """Total variation between what a step with `drafter` leads to and the target's distribution."""
    p, _ = distribution_pair("dense", VOCAB, seed)
    emitted = drafter_step_distribution(WithStates(drafter), p, prefix, GAMMA)
    return float((completed(emitted, p, GAMMA + 1) - joint_distribution(p, GAMMA + 1)).abs().sum()) / 2


@pytest.mark.parametrize("name", CHAINS)
def test_a_step_with_the_drafter_has_the_target_s_joint_distribution(name: str) -> None:
    for seed, prefix in enumerate(PREFIXES):
        assert deviation(CHAINS[name](), prefix, seed) < 1e-6  # tables and models are float32


@pytest.mark.parametrize("name", BUGS)
def test_the_enumeration_finds_the_planted_bug(name: str) -> None:
    assert max(deviation(BUGS[name](), prefix, seed) for seed, prefix in enumerate(PREFIXES)) > 0.005


@torch.inference_mode()
@pytest.mark.parametrize("name", CHAINS)
def test_tokens_are_sampled_from_q_with_the_uniforms_given(name: str) -> None:
    """In rows of different lengths; what stands after a row means nothing. q sums to 1, or to 0
    where nothing is."""
    lengths, uniforms = torch.tensor([3, 1, 5]), torch.rand(3, 3, generator=torch.Generator().manual_seed(1)).double()
    proposals = []
    for filling in (0, VOCAB - 1):
        tokens = torch.tensor([[0, 1, 0, 0, 0], [2, 0, 0, 0, 0], [3, 1, 2, 3, 1]])
        tokens = torch.nn.functional.pad(tokens, (0, 8), value=filling)
        tokens[torch.arange(13) >= lengths[:, None]] = filling
        drafter = WithStates(CHAINS[name]())
        drafter.start(Context(tokens, lengths))
        proposals.append(drafter.propose(Context(tokens, lengths), uniforms))
    (drafted, q), other = proposals
    assert torch.equal(drafted, other.draft_tokens)
    assert torch.equal(q, other.q)
    width = drafted.shape[1]  # 3, or fewer where every row stops earlier
    assert q.shape == (3, width, VOCAB)
    proposed = q.sum(dim=-1) > 0
    assert torch.equal(drafted, sample(q, uniforms[:, :width]).where(proposed, -1))
    assert torch.allclose(q.sum(dim=-1)[proposed], torch.ones(()).to(q.dtype), atol=1e-6)
    assert (q >= 0).all()


class ByHistory(AutoGamma):
    """Widths that depend on what each row accepted so far: some rows make plain steps while others
    draft."""

    widths = (0, 3, 1, 2, 0, 0, 5)

    def __init__(self, rows: int, *settings: Any) -> None:
        super().__init__(rows, *settings)
        self.history = np.zeros(rows, dtype=np.int64)

    def forget(self, rows: list[int]) -> None:
        self.history[rows] = 0

    def learn(self, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> None:
        self.history = (3 * self.history + accepted + 1) % len(self.widths)

    def choose(self, matched: object = None) -> NDArray[np.int64]:
        return np.take(self.widths, self.history)


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


class Told(TableDrafter):
    """Counts the steps that it is told of."""

    steps = 0

    def update(self, context: Context, outcome: Outcome) -> None:
        self.steps += 1


@pytest.mark.parametrize(
    "around",
    [
        lambda told: MixtureDrafter(told, chain()),
        lambda told: MixtureDrafter(chain(), told),
    ],
)
def test_the_parts_of_a_drafter_are_told_what_became_of_its_tokens(around: Callable[[Drafter], Drafter]) -> None:
    told = Told(table())
    made = generate(llama(), [[1]], around(told), gamma=2, max_new_tokens=6, progress=False)
    assert told.steps == made.record.target_passes[0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("auto", [False, True], ids=["fixed", "auto"])
def test_a_row_gets_the_same_tokens_whatever_batch_it_is_in(
    name: str, auto: bool, in_float64: Callable[[str], Drafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together; in two rows, which others take over; and alone. Eager attention has a float32
    part."""
    monkeypatch.setattr(step, "AutoGamma", ByHistory)
    target, drafter = llama(dtype=torch.float64), in_float64(name)
    gamma: Any = Auto(costs=range(1, 7)) if auto else gamma_of(drafter)
    asked: dict[str, Any] = {"gamma": gamma, "max_new_tokens": 12, "seed": 3, "progress": False}
    together = generate(target, PROMPTS * 2, drafter, **asked)
    if auto and varies(target, drafter, compile=False):
        drafted = (together.record.draft_tokens >= 0).sum(axis=-1)[together.record.emitted > 0]
        assert drafted.any()
        assert not drafted.all()
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
        made = generate(target, prompts, drafter, gamma=gamma, max_new_tokens=LIMIT - 2, progress=False)
        assert {len(tokens) for tokens in made.tokens} == {LIMIT - 2}


@pytest.mark.parametrize("name", IN_THE_LOOP)
def test_the_loop_has_the_target_s_distribution(name: str) -> None:
    architecture, eos = [("llama", None), ("gpt2", 1)][IN_THE_LOOP.index(name) % 2]
    drafter = ALL[name]()
    made = refilled(eager(architecture), drafter, ROWS, gamma=gamma_of(drafter), eos=eos, seed=8)
    assert completions_p_value(made, architecture, eos) > LEVEL
    assert name in TREES or acceptance_p_value(made.record) > LEVEL
    assert made.record.accepted.any()
