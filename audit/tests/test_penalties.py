"""Penalties and a logit bias: definitions against references, the whole audit of engines with and
without them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tiny import llama
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from specnb.distributions import Sampling, sample, standardise
from specnb_audit import Aim, Engine, audit, teacher_forcing
from specnb_audit.claimed import Claimed, claimed_sampling, twice_each
from specnb_audit.logit_faults import newest_counted
from specnb_audit.penalties import NO_PENALTIES, Penalties, penalised
from specnb_audit.report import Report
from specnb_audit.teacher_forcing import Completion, Models, teacher_forced_rows

VOCAB = 6
PROMPT, TOKENS = [1, 3, 3], [0, 2, 2, 5, 2, 0]
ALL = Penalties(1.3, 0.4, -0.7, {2: -1.5, 4: 2.0})
EACH: dict[str, dict[str, Any]] = {
    "repetition-penalty": {"repetition_penalty": 4.0},
    "presence-penalty": {"presence_penalty": 1.5},
    "frequency-penalty": {"frequency_penalty": 0.8},
    "logit-bias": {"logit_bias": {2: -1.0}},
}
"""One of each, large enough to be found in the tokens of a few hundred short sequences."""


def logits_of(n: int) -> Tensor:
    return 2 * torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def by_hand(logits: list[float], prompt: list[int], output: list[int], penalties: Penalties) -> list[float]:
    """vLLM's definition for one token, of one logit after the other."""
    bias, counts, found = dict(penalties.logit_bias), Counter(output), list[float]()
    for token, given in enumerate(logits):
        x = given + bias.get(token, 0.0)
        if token in prompt or token in output:
            x = x / penalties.repetition_penalty if x > 0 else x * penalties.repetition_penalty
        found.append(x - penalties.frequency_penalty * counts[token] - penalties.presence_penalty * (token in output))
    return found


@pytest.mark.parametrize("penalties", [ALL, *(Penalties(**one) for one in EACH.values())], ids=str)
@pytest.mark.parametrize(("start", "n"), [(0, 6), (2, 3), (5, 1)])
def test_penalties_are_those_of_the_definition(penalties: Penalties, start: int, n: int) -> None:
    logits = logits_of(n)
    before = logits.clone()
    found = penalised(logits, penalties, PROMPT, TOKENS, start)
    want = [by_hand(row, PROMPT, TOKENS[: start + at], penalties) for at, row in enumerate(logits.tolist())]
    torch.testing.assert_close(found, torch.tensor(want, dtype=torch.float64))
    assert torch.equal(logits, before)


def test_repetition_penalty_and_bias_are_those_of_transformers() -> None:
    bias, factor = {2: -1.5, 4: 2.0}, 1.3
    processors = (
        SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
        RepetitionPenaltyLogitsProcessor(factor),
    )
    logits = logits_of(len(TOKENS)).float()
    found = penalised(logits, Penalties(factor, logit_bias=bias), PROMPT, TOKENS)
    for at, row in enumerate(logits):
        scores, ids = row[None].clone(), torch.tensor([[*PROMPT, *TOKENS[:at]]])
        for processor in processors:
            scores = processor(ids, scores)
        torch.testing.assert_close(found[at], scores[0])


def test_none_change_nothing_and_the_result_has_float32_or_better() -> None:
    logits = logits_of(2).bfloat16()
    assert penalised(logits, NO_PENALTIES, [0], [1, 2]) is logits
    assert penalised(logits, ALL, [0], [1, 2]).dtype == torch.float32


@pytest.mark.parametrize("size", [1, 4, 10**6])
def test_rows_have_them_for_the_target_and_the_suspected_model_and_not_for_the_draft(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a sequence is cut into pieces; temperature and filters come after them."""
    monkeypatch.setattr(teacher_forcing, "LOGITS", VOCAB * size)
    model, sampling = llama(VOCAB, dtype=torch.float64), Claimed(0.7, 4, penalties=ALL)
    with torch.inference_mode():
        given = [Completion(PROMPT, TOKENS), Completion([2], [2, 2])]
        rows = list(teacher_forced_rows(Models(model, sampling, model, Sampling(), model), given))
        plain = list(teacher_forced_rows(Models(model, Sampling()), given))
    logits = torch.cat([row.p for row in plain])
    bare = [model(torch.tensor([[*PROMPT, *TOKENS]])).logits[0, 2:-1], model(torch.tensor([[2, 2]])).logits[0]]
    wanted = [by_hand(row, PROMPT, TOKENS[:at], ALL) for at, row in enumerate(bare[0].tolist())]
    wanted += [by_hand(row, [2], [2][:at], ALL) for at, row in enumerate(bare[1].tolist())]
    want = standardise(torch.tensor(wanted, dtype=torch.float64), Sampling(0.7, 4))
    for name, expected in (("p", want), ("suspected", want), ("q", logits)):
        torch.testing.assert_close(torch.cat([getattr(row, name) for row in rows]), expected)


# Engines


def completions_of(penalties: Penalties, model: Any, count: int, length: int = 12) -> tuple[list[list[int]], ...]:
    """Prompts and completions of an engine that has the penalties, token by token, with its own
    random numbers."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(VOCAB, (count, 2), generator=generator).tolist()
    outputs: list[list[int]] = [[] for _ in prompts]
    for _ in range(length):
        ids = torch.tensor([[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)])
        logits = model(ids).logits[:, -1].tolist()
        changed = [by_hand(*one, penalties) for one in zip(logits, prompts, outputs, strict=True)]
        p = torch.softmax(torch.tensor(changed, dtype=torch.float64) / 0.9, dim=-1)
        for output, token in zip(outputs, sample(p, torch.rand(count, generator=generator)).tolist(), strict=True):
            output.append(token)
    return prompts, outputs


def audited(model: Any, made: tuple[list[list[int]], ...], claimed: dict[str, Any], **more: Any) -> Report:
    sampling = claimed_sampling({"temperature": 0.9, **claimed})
    return audit(model, made[1], prompts=made[0], sampling=sampling, progress=False, **more)


@pytest.mark.parametrize("name", EACH)
def test_an_engine_with_a_penalty_is_rejected_without_the_claim_and_only_then(name: str) -> None:
    model, penalty = llama(VOCAB, seed=3), EACH[name]
    with torch.inference_mode():
        made, plain = (completions_of(one, model, 90) for one in (Penalties(**penalty), NO_PENALTIES))
    assert audited(model, made, {}).rejected
    assert not audited(model, made, penalty, draft=llama(VOCAB, seed=4), aim=Aim(suspected=model)).rejected
    not_applied = audited(model, plain, penalty)
    assert not_applied.rejected
    assert not_applied.cause == f"it looks as if {name} is not applied: without it the tokens are explained"


@pytest.mark.parametrize(
    "claim",
    [{"repetition_penalty": 2.0}, {"presence_penalty": 0.75}, {"frequency_penalty": 0.4}, {"logit_bias": {2: -0.5}}],
    ids=EACH,
)
def test_a_penalty_that_is_applied_twice_is_named(claim: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """The engine's are those of `EACH`."""
    name, model = request.node.callspec.id, llama(VOCAB, seed=3)
    with torch.inference_mode():
        made = completions_of(Penalties(**EACH[name]), model, 300)
    report = audited(model, made, claim)
    assert report.cause == f"it looks as if {name} is applied twice: so the tokens are explained"


def test_a_penalty_that_would_be_out_of_range_is_not_tried_twice() -> None:
    assert twice_each(Claimed(penalties=Penalties(presence_penalty=1.5))) == {}


def test_near_ties_are_judged_by_penalised_logits() -> None:
    """Greedy decoding with penalties; the second best token by a hair is excused by numerics as
    without penalties."""
    model = llama(VOCAB, seed=3, dtype=torch.float64)
    penalties: dict[str, Any] = {"repetition_penalty": 1.6, "frequency_penalty": 0.8}
    output: list[int] = []
    with torch.inference_mode():
        for _ in range(8):
            logits = model(torch.tensor([[1, 2, *output]])).logits[0, -1].tolist()
            changed = by_hand(logits, [1, 2], output, Penalties(**penalties))
            output.append(changed.index(max(changed)))
    gap = sorted(changed)[-1] - sorted(changed)[-2]
    second = [*output[:-1], changed.index(sorted(changed)[-2])]
    greedy: dict[str, Any] = {"sampling": claimed_sampling({"temperature": 0, **penalties}), "progress": False}
    assert not audit(model, [output], prompts=[[1, 2]], **greedy).rejected
    for tolerance, rejected in ((0.99 * gap, True), (1.01 * gap, False)):
        engine = Engine(logit_tolerance=tolerance)
        assert audit(model, [second], prompts=[[1, 2]], engine=engine, **greedy).rejected == rejected


def test_penalties_that_add_to_logits_are_claimed_for_a_function_too() -> None:
    """The first of two equal tokens gets log 3 more: it is sampled three times in four."""
    bias = claimed_sampling({"logit_bias": {0: torch.tensor(3.0).log().item()}})
    (row,) = teacher_forced_rows(Models(lambda prefix: [0.5, 0.5], bias), [Completion([], [0])])
    assert row.p[0].tolist() == pytest.approx([0.75, 0.25])


def test_the_newest_token_counted_once_is_the_penalty_itself() -> None:
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    for penalties in (Penalties(0.7, -1.0, 0.5), Penalties(1.5, 1.0, -0.5, {2: 1.0})):
        given = penalties, [1, 3], [0, 0, 2, 1, 3], 0
        assert torch.allclose(newest_counted(logits, *given, times=1), penalised(logits, *given))
        assert not torch.allclose(newest_counted(logits, *given, times=0), penalised(logits, *given))
