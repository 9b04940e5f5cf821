"""What may explain a finding: the order of the filters, bfloat16, prompts among the tokens, rows that share noise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from reports import report
from tiny import llama
from transformers import PreTrainedModel

from specnb.decoding.generate import generate
from specnb.distributions import Sampling
from specnb_audit import Auditor, Engine, audit, explanations
from specnb_audit.bets import Row
from specnb_audit.claimed import Claimed
from specnb_audit.explanations import (
    audited,
    bfloat16_note,
    dependent_sequences,
    end_token_note,
    order_note,
    prompt_note,
)
from specnb_audit.numerics import Numerics, in_dtype
from specnb_audit.setting_names import ENGINE_ORDERS
from specnb_audit.teacher_forcing import Completion

PROMPTS = [[1], [2, 3], [0, 1, 2], [3]] * 30
LARGE = Numerics(16, logit=0.5, tv=0.1, tv_mean=0.05, nats=0.05)
CROSSED = np.array([1.0, 5.0, 6.2, 6.1])


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    """Its logits are large, and so are their errors in bfloat16."""
    model = llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(40)
    return model


def completions(model: PreTrainedModel, sampling: Sampling = Sampling()) -> list[Completion]:
    made = generate(model, PROMPTS, model, gamma=2, max_new_tokens=12, sampling=sampling, progress=False)
    return [Completion(prompt, tokens) for prompt, tokens in zip(PROMPTS, made.tokens, strict=True)]


def note(target: PreTrainedModel, given: list[Completion], measured: Numerics | None = LARGE) -> list[str]:
    found = report(found_after=3, running=CROSSED, detectable={})
    return bfloat16_note(found, measured, target, Sampling(), given)


def test_tokens_of_the_target_in_bfloat16_get_the_hint(target: PreTrainedModel) -> None:
    given = completions(in_dtype(target, torch.bfloat16))
    assert "--engine-dtype bfloat16" in "".join(note(target, given))
    assert note(target, given, measured=None) == []
    assert note(target, given, measured=LARGE._replace(nats=0.0)) == []


@pytest.mark.parametrize(("gain", "hint"), [(math.log(20) + 1e-9, True), (math.log(20) - 1e-9, False)])
def test_bfloat16_must_be_twenty_times_as_likely(
    gain: float, hint: bool, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explanations, "_bfloat16_gain", lambda *given: gain)
    given = [Completion([1], [2, 3])]
    said = (
        "numerics as large as those of bfloat16 would explain the e-value (error rate 1e-06), and the target in "
        "bfloat16 fits the tokens better; if the engine computes in bfloat16, give its dtype (--engine-dtype bfloat16)"
    )
    crossed = report(found_after=3, running=CROSSED)
    assert bfloat16_note(crossed, LARGE, target, Sampling(), given) == [said] * hint
    short = report(found_after=3, running=np.array([1.0, 5.9, 5.9]))  # short of 1/delta without any numerics
    assert bfloat16_note(short, LARGE._replace(nats=0.0), target, Sampling(), given) == [said] * hint
    for other in (
        report(found_after=3, running=CROSSED, violations={"impossible": 1}),
        report(found_after=0, running=np.empty(0)),
        report(found_after=3, running=np.array([1.0, 50.0, 50.0])),
    ):
        assert bfloat16_note(other, LARGE, target, Sampling(), given) == []
    assert bfloat16_note(crossed, LARGE, constant, Sampling(), given) == []
    assert bfloat16_note(crossed, None, target, Sampling(), given) == []


# Another order of the filters


TABLE = [0.5, 0.3, 0.15, 0.05]  # at temperature 0.5 before top-p 0.9 two of them are kept, after it three
SAMPLING = Sampling(0.5, top_p=0.9)
HOT = Claimed(0.5, top_p=0.9, order=ENGINE_ORDERS["llama.cpp"])


def constant(prefix: tuple[int, ...]) -> list[float]:
    return TABLE


def texts(*tokens: list[int]) -> list[Completion]:
    return [Completion([], one) for one in tokens]


def words(order: str, engine: str) -> list[str]:
    return [
        f"another order of the filters explains the tokens: {order}, as in {engine}; if the engine applies them so, "
        f"claim it (--filter-order {engine})"
    ]


def test_an_order_that_makes_all_tokens_possible_is_named() -> None:
    for sampling, names, engine in (
        (SAMPLING, "top-p, temperature", "llama.cpp"),
        (Sampling(0.5, 3, 0.9), "top-k, top-p, temperature", "llama.cpp"),
        (Claimed(0.5, top_p=0.9, min_p=0.01), "top-p, min-p, temperature", "llama.cpp"),
    ):
        assert order_note(constant, sampling, texts([0, 1, 2]), set(), 1e-6) == words(names, engine)
        assert order_note(constant, sampling, texts([0, 1, 3]), set(), 1e-6) == []  # impossible in any order
    assert order_note(constant, Sampling(0.5), texts([2]), set(), 1e-6) == []  # there is no other order
    hot = Sampling(2.0, top_p=0.7)  # keeps two tokens in the other order, and here three
    assert order_note(constant, hot, texts([0, 1, 2]), set(), 1e-6) == []


@pytest.mark.parametrize(("claimed", "engines"), [(HOT, 1), (replace(HOT, min_p=0.01), 2)])
@pytest.mark.parametrize("n", [1, 5])
def test_the_likelihood_ratio_must_exceed_one_over_delta_for_each_order(claimed: Claimed, engines: int, n: int) -> None:
    """Before top-p the temperature leaves 0.25 / 0.34 for the first token, and after it 0.25 / 0.3625."""
    ratio = (0.3625 / 0.34) ** n
    for above in (1 - 1e-9, 1 + 1e-9):
        found = order_note(constant, claimed, texts([], [0] * (n - 1), [0]), set(), engines / ratio * above)
        names = "temperature, top-p" if engines == 1 else "temperature, top-p, min-p"
        assert found == (words(names, "transformers") if above > 1 else [])


def test_suspicious_sequences_are_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explanations, "TRIED", 2)
    given = texts([0, 0], [3, 3], [2, 2])  # of which the first decides nothing, and no order explains the second
    for suspicious, found in (({2}, True), (set[int](), False), ({1}, False), ({1, 2}, False), ({0, 2}, False)):
        assert bool(order_note(constant, SAMPLING, given, suspicious, 0.01)) == found


# Prompts, ends and dependence


def test_completions_are_cut_to_what_was_audited() -> None:
    """A stop leaves sequences that were read ahead; tokens after an end token are not audited; steps are cut too."""
    given = [
        Completion([1], [0, 1, 3, 0, 1], [2, 2, 1]),
        Completion([2], []),
        Completion([], [3, 3], [2]),
        Completion([3], [0, 1]),
        Completion([0], [], []),
    ]
    for count, lengths in ((0, []), (1, [3]), (2, [3, 0]), (3, [3, 0, 1]), (5, [3, 0, 1, 2, 0])):
        auditor = Auditor(eos=3)
        for one in given[:count]:
            auditor.add(Row(one.tokens, torch.full((len(one.tokens), 4), 0.25), prompt=one.prompt))
        found = audited(auditor, given)
        assert [len(one.tokens) for one in found] == lengths
        assert [one.prompt for one in found] == [one.prompt for one in given[:count]]
        assert [one.tokens for one in found] == [one.tokens[:n] for one, n in zip(given, lengths, strict=False)]
        steps_found = [[2, 1], None, [1], None, []]
        assert [one.steps for one in found] == steps_found[:count]


def shared_noise(kinds: dict[str, list[list[float]]], delta: float = 1e-3) -> set[int] | None:
    """The dependent sequences where each kind gains so much at each token of each sequence."""
    running = {name: np.cumsum([gain for gains in rows for gain in gains]) for name, rows in kinds.items()}
    rows = next(iter(kinds.values()))
    found = report(delta=delta, running_by_alternative={"argmax": np.full(sum(map(len, rows)), 9.0), **running})
    return dependent_sequences(found, [len(gains) for gains in rows])


@pytest.mark.parametrize(
    ("gains", "found"),
    [
        ([[1.0, 1.0], [2.1], [0.9]], {1}),  # an e-value of more than 100 by its own part
        ([[0.0], [1.0, 1.1], [], [2.5], [0.2]], {1, 3}),
        ([[1.5], [1.4], [0.0]], set()),  # the evidence of all together is less than 1/delta
        ([[1.5], [1.6], [0.5], [0.0]], {0, 1}),  # where it is not, more than 10 by its own part
        ([[1.0], [1.0], [1.0]], None),  # too little in each
        ([[2.5], [-3.0], [0.0]], {0}),
    ],
)
def test_sequences_that_share_noise_have_evidence_of_their_own(
    gains: list[list[float]], found: set[int] | None
) -> None:
    assert shared_noise({"same-tokens": gains}) == found
    assert shared_noise({"noise-of-texts": gains}) == found
    nothing = [[0.0] * len(row) for row in gains]
    assert shared_noise({"same-tokens": gains, "noise-of-texts": nothing}) == found
    assert shared_noise({"same-tokens": nothing, "noise-of-texts": gains}) == found


def test_prompts_within_the_tokens_are_noticed() -> None:
    """More than half of the sequences, with prompts of two tokens or more."""
    twice, once, short = Completion([1, 0], [1, 0, 1]), Completion([1, 0], [1, 1, 0]), Completion([1], [1, 1])
    assert prompt_note([twice, twice, once]) == [
        "the tokens of 2 of 3 sequences begin with their prompt; give the new tokens only"
    ]
    assert prompt_note([twice, once]) == prompt_note([short, short]) == prompt_note([]) == []


@pytest.mark.parametrize(
    ("own", "tokens", "note"),
    [
        (2, [[0, 2, 1], [1, 2], [2]], "1 sequence continues after the end token [2]; give eos if it ends them"),
        ([3, 2], [[3, 0], [2, 2]], "2 sequences continue after the end token [2, 3]; give eos if it ends them"),
        (2, [[0, 1, 2], [2], []], None),
        (None, [[0, 2, 1]], None),
        ([], [[0, 2, 1]], None),
    ],
)
def test_the_note_on_sequences_that_continue(own: Any, tokens: list[list[int]], note: str | None) -> None:
    model = llama()
    model.config.eos_token_id = own
    given = [Completion([1], one) for one in tokens]
    assert end_token_note(model, given) == ([] if note is None else [note])
    assert end_token_note(constant, given) == []
    settings: dict[str, Any] = {"prompts": [[1]] * len(tokens), "progress": False, "engine": Engine(positions=0)}
    assert audit(model, tokens, **settings).notes == ([] if note is None else [note])
    assert audit(model, tokens, eos=1, **settings).notes == []
