"""The parts of a step, what a drafter is told, and what a model, a drafter and a rule may not return.

Which tokens a step emits is in test_sampler.py, and that it waits for nothing in test_device.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from drafter_kinds import TableDrafter, chain, table
from implementation_distribution import PROMPTS, SHARP, VOCAB
from tiny import llama, near_copy
from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb.cache import slots_for
from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling, one_hot
from specnb.drafters import Context, Drafter, Proposal, TreeDrafter
from specnb.enumeration import step_distribution
from specnb.rules import Outcome, Plan, PlannedRule, Rule
from specnb.sampler import Sampler, generate
from specnb.step import Batch, Setup
from specnb.trees import SCHEMES

TARGET = llama(dtype=torch.float64)


def batch_of(drafter: Drafter | None) -> Batch:
    """A batch of two draft tokens a step for five tokens after the usual prompts."""
    gamma = 0 if drafter is None else 2
    slots = slots_for(max(map(len, PROMPTS)), 5, gamma)
    return Batch(Setup(TARGET, drafter, gamma, max_rows=3, slots=slots, max_steps=5, max_eos=1))


# The parts of a step.


@pytest.mark.parametrize("drafter", [None, chain()])
def test_what_an_idle_step_left_does_not_reach_the_prompts_of_all_rows(drafter: Drafter | None) -> None:
    """On a device the host learns a step late that rows have ended."""
    batch = batch_of(drafter)
    batch.clear([])
    for _ in range(2):
        batch.enter([0, 1, 2], PROMPTS[:3], batch.uniforms_of(1, range(3), 5), 5)
        batch.step()
        assert not batch.state.fault.any()
        for layer in batch.runner.cache.ragged:
            layer.keys[:, :, -1] = layer.values[:, :, -1] = torch.nan


@pytest.mark.parametrize(
    ("capturable", "in_parts", "captured"),
    [
        (None, False, ["in_parts"]),
        (True, False, ["in_parts"]),
        (True, True, ["propose", "run_target", "verify_and_emit"]),
        (False, False, ["run_target", "verify_and_emit"]),
    ],
)
def test_a_whole_step_is_captured_unless_it_is_timed_or_drafts_cannot_be(
    capturable: bool | None, in_parts: bool, captured: list[str]
) -> None:
    drafter = None if capturable is None else chain()
    if drafter is not None:
        drafter.capturable = bool(capturable)
    batch = batch_of(drafter)
    batch.capture(in_parts)
    assert list(batch.captured) == captured


@torch.inference_mode()
def test_a_drafter_is_told_which_rows_begin_and_what_became_of_its_tokens() -> None:
    told: list[Any] = []

    class Listening(TableDrafter):
        hidden_layers = (-1,)

        def start(self, context: Context, rows: Tensor | None = None) -> None:
            told.append((None if rows is None else rows.tolist(), context.lengths.tolist()))

        def update(self, context: Context, outcome: Outcome) -> None:
            told.append((outcome.accepted.tolist(), context.lengths.tolist()))

    batch = batch_of(Listening(table()))
    batch.clear([])
    batch.enter([0, 1, 2], PROMPTS, batch.uniforms_of(0, range(3), 5), 5)
    lengths = [len(prompt) for prompt in PROMPTS]
    batch.enter([2, 0], [[1], [3, 3]], batch.uniforms_of(0, [3, 4], 5), 5)
    assert told == [(None, lengths), ([2, 0], [2, lengths[1], 1])]
    states = batch.runner.hidden_states
    assert states is not None
    assert bool(states[1, 0].any())
    batch.step()
    accepted = batch.state.record[:, 0, 2].int().tolist()
    expected = [length + n + 1 for length, n in zip((2, lengths[1], 1), accepted, strict=True)]
    assert told[2:] == [(accepted, expected)]
    batch.clear([])
    assert not states.any(), "hidden states of earlier sequences are forgotten"


# What a model, a drafter and a rule may not return.


class Proposing(Drafter):
    """Proposes token 1 with a uniform q, after a change."""

    vocab = VOCAB

    def __init__(self, change: Callable[..., Any], parents: tuple[int, ...] | None = None) -> None:
        self.change, self.parents = change, parents

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        draft_tokens = torch.ones(uniforms.shape, dtype=torch.int64)
        return Proposal(*self.change(draft_tokens, torch.full((*uniforms.shape, VOCAB), 1 / VOCAB)))


def moved(by: float) -> Tensor:
    """A change of q that leaves its sum as it is."""
    return torch.tensor([-by, by, 0.0, 0.0])


@pytest.mark.parametrize("parents", [None, (-1, 0, -1, -1)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("change", "proper"),
    [
        (lambda tokens, q: (tokens, q), True),
        (lambda tokens, q: (0 * tokens - 1, 0 * q), True),
        (lambda tokens, q: (tokens, q * (1 + 9e-5)), True),
        (lambda tokens, q: (tokens, q + moved(0.25)), True),
        (lambda tokens, q: (tokens, q * (1 + 1.2e-4)), False),
        (lambda tokens, q: (tokens, q * (1 - 1.2e-4)), False),
        (lambda tokens, q: (tokens, 0 * q), False),
        (lambda tokens, q: (0 * tokens - 1, q), False),
        (lambda tokens, q: (tokens, q + moved(0.26)), False),
        (lambda tokens, q: (tokens + VOCAB, q), False),
        (lambda tokens, q: (tokens - 5, 0 * q), False),
        (lambda tokens, q: (tokens, one_hot((tokens + 1) % VOCAB, VOCAB, q.dtype)), False),
    ],
    ids=["plain", "nothing", "rounded", "with a zero", "sum above 1", "sum below 1", "sum 0", "no token, yet a q",
         "negative", "outside the vocabulary", "below -1", "another token's"],
)  # fmt: skip
def test_a_proposal_that_is_no_distribution_is_reported(
    change: Callable[..., Any], proper: bool, parents: tuple[int, ...] | None
) -> None:
    asked: dict[str, Any] = {"gamma": 4, "max_new_tokens": 4, "progress": False}
    if proper:
        assert len(generate(TARGET, [[1, 2], [0]], Proposing(change, parents), **asked).tokens) == 2
    else:
        with pytest.raises(ValueError, match="a drafter proposed"):
            generate(TARGET, [[1, 2], [0]], Proposing(change, parents), **asked)


def test_a_rule_that_accepts_a_missing_token_is_reported() -> None:
    def accepting_all(p: Tensor, q: Tensor, draft_tokens: Tensor, *others: Tensor) -> Outcome:
        zeros = torch.zeros(len(p), dtype=torch.int64)
        return Outcome(zeros + draft_tokens.shape[1], zeros)

    def only_in_the_first_row(tokens: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.arange(len(tokens))[:, None] == 0
        return tokens.where(first, -1), q.where(first[..., None], 0.0)

    # Of four prompts the check compares two.
    asked: dict[str, Any] = {"gamma": 1, "max_new_tokens": 4, "progress": False, "rule": accepting_all}
    with pytest.raises(ValueError, match="a rule accepted a token of -1"):
        generate(TARGET, [[1], [2, 0], [2, 1], [1, 2, 0]], Proposing(only_in_the_first_row), **asked)


def test_log_probabilities_of_a_chain_are_no_distribution() -> None:
    with pytest.raises(ValueError, match="a drafter proposed"):
        generate(TARGET, [[1, 2]], TableDrafter(table().log()), gamma=4, max_new_tokens=4, progress=False)


def test_a_proposal_of_a_row_that_has_ended_is_not_checked() -> None:
    class Careless(Proposing):
        """Twice a distribution where a sequence has ended."""

        def propose(self, context: Context, uniforms: Tensor) -> Proposal:
            draft_tokens, q = super().propose(context, uniforms)
            return Proposal(draft_tokens, torch.where((context.newest == 3)[:, None, None], 2 * q, q))

    made = generate(TARGET, [[1]] * 4, Careless(lambda *both: both), gamma=4, max_new_tokens=9, progress=False, eos=3)
    assert len(set(map(len, made.tokens))) > 1


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens, q: (tokens[:, :1], q),
        lambda tokens, q: (tokens, q[..., :1]),
        lambda tokens, q: (tokens.float(), q),
        lambda tokens, q: (tokens, q.bfloat16()),
    ],
)
def test_a_proposal_of_another_shape_or_type_is_reported(change: Callable[..., Any]) -> None:
    with pytest.raises(TypeError):
        generate(TARGET, [[1]], Proposing(change), gamma=4, max_new_tokens=4, progress=False)


# NaN.


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), SHARP, Sampling(top_p=0.9), Sampling(temperature=0)], ids=str)
@pytest.mark.parametrize("broken", ["target", "draft"])
def test_a_model_that_produces_nan_is_reported(broken: str, sampling: Sampling, value: float) -> None:
    target, draft = llama(), llama(seed=2)
    (target if broken == "target" else draft).lm_head.weight.data[1] = value
    for gamma in (0, 3) if broken == "target" else (3,):
        with pytest.raises(FloatingPointError, match=f"^the {broken} produced NaN"):
            generate(target, PROMPTS, draft, gamma=gamma, max_new_tokens=3, sampling=sampling, progress=False)


def test_a_draft_that_produces_nan_is_reported_in_a_tree() -> None:
    draft = llama(seed=2)
    draft.lm_head.weight.data[1] = torch.nan
    for scheme in SCHEMES[:2]:  # the third samples nothing
        tree = TreeDrafter(draft, (-1, -1, 0), SHARP, scheme)
        with pytest.raises(FloatingPointError, match=r"^the draft produced NaN"):
            generate(llama(), PROMPTS, tree, max_new_tokens=3, sampling=SHARP, progress=False)


@pytest.mark.parametrize("parents", [None, (-1, 0, -1)], ids=["chain", "tree"])
@pytest.mark.parametrize("position", range(4))
def test_nan_is_reported_where_a_token_rests_on_it_and_changes_nothing_elsewhere(
    position: int, parents: tuple[int, ...] | None
) -> None:
    """In the logits of one position of each step, in one row of three."""
    target = llama(dtype=torch.float64)

    def spoil(module: nn.Module, inputs: Any, logits: Tensor) -> None:
        if logits.shape[:2] == (3, 4):
            logits[1, position, 2] = torch.nan

    target.lm_head.register_forward_hook(spoil)
    model = near_copy(TARGET, noise=0.2)
    draft: Any = model if parents is None else TreeDrafter(model, parents)
    reported = []
    for seed in range(10):
        asked: dict[str, Any] = {"gamma": 3, "max_new_tokens": 4, "seed": seed, "progress": False}
        plain = generate(TARGET, PROMPTS, draft, **asked)
        record, needed = plain.record, set[int]()
        for step in range(record.target_passes[1]):
            entries = [0, *(1 + np.flatnonzero(record.accepted_nodes[1, step]))]
            needed |= set(entries[: record.emitted[1, step]])
        reported.append(position in needed)
        if position in needed:
            with pytest.raises(FloatingPointError, match="for prompt 1"):
                generate(target, PROMPTS, draft, **asked)
        else:
            assert generate(target, PROMPTS, draft, **asked).tokens == plain.tokens
    assert any(reported)
    assert all(reported) == (position == 0) or position == 1


def without_token_3(embedded: float) -> PreTrainedModel:
    """A target that never emits token 3, and computes with `embedded` where it reads one."""
    target = llama(dtype=torch.float64)
    target.lm_head.register_forward_hook(lambda module, inputs, logits: logits.index_fill(-1, torch.tensor(3), -1e4))
    target.model.embed_tokens.weight.data[3] = embedded
    return target


class Now3(Drafter):
    """Proposes 1, 3, 3 in every other step: what follows reads NaN that it left in the cache, unless
    that is hidden well."""

    vocab = VOCAB

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        drafted = torch.tensor([1, 3, 3]).expand(len(uniforms), 3)
        drafted = drafted.where(context.lengths[:, None] % 2 == 0, -1)
        return Proposal(drafted, one_hot(drafted.clamp_min(0), VOCAB) * (drafted >= 0)[..., None])


def test_nan_in_the_cache_of_rejected_tokens_changes_nothing() -> None:
    for prompt in ([0], [1, 2], [2, 0, 1]):
        made = [
            generate(without_token_3(embedded), [prompt], Now3(), gamma=3, max_new_tokens=12, seed=2, progress=False)
            for embedded in (0.0, float("nan"))
        ]
        assert made[0].tokens == made[1].tokens
        assert (made[0].record.draft_tokens == 3).any()


@pytest.mark.parametrize("gamma", [0, 3])
def test_a_token_that_was_emitted_and_whose_keys_overflow_is_reported(gamma: int) -> None:
    """The pass that keeps NaN out of the cache would make them finite."""
    target: Any = llama(8, seed=2, dtype=torch.float16)
    embedded = target.model.embed_tokens.weight.data
    embedded[:, 0], embedded[3], embedded[3, 0] = 0, 0, 3
    target.model.layers[0].self_attn.k_proj.weight.data[:, 0] = torch.finfo(torch.float16).max
    assert target(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False).logits[0, -1].isnan().all()
    with pytest.raises(FloatingPointError):
        generate(target, [[1, 2]], PromptLookupDrafter(8), gamma=gamma, max_new_tokens=12, seed=2, progress=False)


def test_nan_names_its_prompt_and_keeps_what_was_finished() -> None:
    target, prompts = without_token_3(float("nan")), [[0], [1, 2], [3, 0], [2]]
    asked: dict[str, Any] = {"gamma": 0, "max_new_tokens": 4, "progress": False}
    with pytest.raises(FloatingPointError, match="for prompt 2") as raised:
        generate(target, prompts, batch_size=1, **asked)
    expected = generate(target, prompts[:2], **asked).tokens
    assert raised.value.finished == dict(enumerate(expected))  # type: ignore[attr-defined]
    sampler = Sampler(target, None, compile=False, rows=4, progress=False)
    with pytest.raises(FloatingPointError, match="for prompt 2") as raised:
        sampler.generate(prompts, max_new_tokens=4)
    assert raised.value.finished == {}  # type: ignore[attr-defined]
    # It is no fault of the next call, in the same rows.
    assert sampler.generate(prompts[:2], max_new_tokens=4).tokens == expected


# What is no rule.


def outcome_of(change: Callable[[Tensor], Any]) -> Rule:
    """A rule that returns a change of zeros, one for each row."""
    return lambda p, *others: change(torch.zeros(len(p), dtype=torch.int64))


def returning_none(*given: Any) -> Any:
    return None


@pytest.mark.parametrize(
    "rule",
    [
        outcome_of(lambda zeros: None),
        outcome_of(lambda zeros: (zeros, zeros)),
        outcome_of(lambda zeros: Outcome(zeros.float(), zeros)),
        outcome_of(lambda zeros: Outcome(zeros[:, None], zeros)),
        "token",
        PlannedRule(returning_none),
        PlannedRule(lambda p, q, x, tree: Plan(x, p[..., 1:, :])),
    ],
)
def test_what_is_no_rule_is_refused_by_loop_and_enumeration_alike(rule: Any) -> None:
    half = torch.tensor([0.5, 0.5]).double()
    with pytest.raises(TypeError):
        generate(TARGET, [[1]], chain(), gamma=1, rule=rule, max_new_tokens=3, progress=False)
    with pytest.raises(TypeError):
        step_distribution(rule, lambda _: half, lambda _: half, gamma=1)
