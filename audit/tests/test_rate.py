"""Impossible tokens whose size numerics explain: an engine with such numerics is not rejected,
their number counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specnb.distributions import Sampling, sample
from specnb_audit import Engine, audit
from specnb_audit.claimed import Claimed, claimed_probs
from specnb_audit.numerics import Numerics, impossible_rate
from specnb_audit.report import Report
from specnb_audit.teacher_forcing import Completion, Models

NOISE = 0.05
LOGITS = torch.log_softmax(torch.from_numpy(np.random.default_rng(0).normal(0, 2, (1500, 12))), dim=-1)
SETTINGS = (Sampling(0), Sampling(0.8, top_p=0.9), Sampling(top_k=4), Claimed(1.3, min_p=0.1))
TOP_P = Sampling(top_p=0.95)


def target(prefix: tuple[int, ...]) -> Tensor:
    """The distribution depends on the number of tokens before."""
    return LOGITS[len(prefix) - 1].exp()


def emitted(logits: Tensor, sampling: Sampling, seed: int) -> list[Completion]:
    """A sequence sampled from the logits `(n, vocab)` of an engine, after a prompt of its own."""
    u = torch.from_numpy(np.random.default_rng(seed).random(len(logits)))
    return [Completion([seed], sample(claimed_probs(logits, sampling), u).tolist())]


def noisy(seed: int, noise: float = NOISE) -> Tensor:
    return LOGITS + noise * torch.from_numpy(np.random.default_rng([1, seed]).standard_normal(LOGITS.shape))


DRAFT = torch.log_softmax(LOGITS + torch.from_numpy(np.random.default_rng(5).normal(0, 0.3, LOGITS.shape)), dim=-1)


def draft(prefix: tuple[int, ...]) -> Tensor:
    return DRAFT[len(prefix) - 1].exp()


@pytest.mark.parametrize("drafter", [None, draft])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_an_engine_with_the_noise_is_not_rejected(sampling: Sampling, drafter: Any) -> None:
    """Twelve engines at delta = 0.05, looked at after every token; the noise is as large as it may
    be. With a draft there is a bet on it, too."""
    alarms = 0
    for seed in range(12):
        given = emitted(noisy(seed)[:400], sampling, seed)
        alarms += impossible_rate(Models(target, sampling, drafter), given, NOISE, 0.05, seed).found_after is not None
    assert alarms <= 5  # six or more have a chance of 1e-5


def test_a_filter_that_is_not_applied_is_found_by_the_number() -> None:
    given = emitted(LOGITS, Sampling(), 0)
    rate = impossible_rate(Models(target, TOP_P), given, NOISE, 1e-8)
    assert rate.found_after is not None
    assert rate.expected < rate.impossible / 5
    assert (rate.tokens, rate.log10_e > 8) == (rate.found_after, True)


def test_near_ties_that_are_all_the_drafts_are_found_by_that() -> None:
    """No more of them than noise makes, but each is the draft's most probable token."""
    tokens: list[int] = []
    for target_row, draft_row in zip(noisy(1), DRAFT, strict=True):
        best, drafted = int(target_row.argmax()), int(draft_row.argmax())
        near = float(LOGITS[len(tokens)].max() - LOGITS[len(tokens), drafted]) < 3 * NOISE
        tokens.append(drafted if near else best)
    given = [Completion([0], tokens)]
    rates = [impossible_rate(Models(target, Sampling(0), one), given, 2 * NOISE, 1e-8) for one in (None, draft)]
    print(*rates, sep="\n")
    assert [rate.drafted for rate in rates] == [False, True]
    assert rates[1].log10_e > rates[0].log10_e + 1
    assert "that are the draft's most probable token" in str(rates[1])


def test_the_same_near_tie_counts_once() -> None:
    """An engine errs again in the same way after the same tokens."""
    near = Completion([0], [int(LOGITS[0].topk(2).indices[1])])
    once = impossible_rate(Models(target, Sampling(0)), [near], 1e-6, 1e-8)
    again = impossible_rate(Models(target, Sampling(0)), [near] * 50, 1e-6, 1e-8)
    assert (once.impossible, again.impossible) == (1, 1)
    assert again.log10_e == pytest.approx(once.log10_e)


class Supposed(Engine):
    """An engine of unknown dtype, which bfloat16 may explain: gaps up to 1 in a logit, and 0.2 in
    mass."""

    def numerics(self, *given: object) -> tuple[None, Any]:
        return None, lambda: Numerics(1, 0.5, 0.1, 0.1, 0.0, spread=NOISE / 2)


def report_on(given: list[Completion], sampling: Sampling, **settings: Any) -> Report:
    tokens, prompts = [one.tokens for one in given], [one.prompt for one in given]
    return audit(target, tokens, prompts=prompts, sampling=sampling, progress=False, **settings)


def test_an_audit_rejects_what_no_filter_or_a_loose_one_emits() -> None:
    """Top-p is not applied; a greedy engine accepts what is within 0.3 of the argmax, here
    always."""
    loose = [Completion([0], [int((row >= row.max() - 0.3).nonzero()[-1]) for row in LOGITS])]
    ignored = report_on(emitted(LOGITS, Sampling(), 0), TOP_P, engine=Supposed())
    greedy = report_on(loose, Sampling(0), engine=Supposed(), draft=lambda prefix: [1 / 12] * 12)
    for report in (ignored, greedy):
        assert (report.verdict, report.diagnosis, report.undecided) == ("rejected", "impossible", "")
        assert "and not their number" in str(report)
    assert "top-p is not applied" in report_headline(ignored)
    assert "of them the draft's most probable token" in str(greedy)


def report_headline(report: Report) -> str:
    return str(report).splitlines()[0]


@pytest.mark.parametrize("sampling", [Sampling(0), TOP_P])
def test_an_honest_engine_with_such_numerics_is_undecided(sampling: Sampling) -> None:
    report = report_on(emitted(noisy(3, NOISE / 2), sampling, 3), sampling, engine=Supposed())
    assert (report.verdict, report.rate is None) == ("numerics", False)
    assert report_headline(report).startswith("UNDECIDED: the tokens deviate from the target, by no more than")


def test_the_control_decides_where_the_number_alone_does_not() -> None:
    """So few tokens are not enough for the bet; a control with none is more than noise explains."""
    given = emitted(LOGITS[:140], Sampling(), 0)
    plain = [one for seed in range(1, 4) for one in emitted(LOGITS, TOP_P, seed)]
    alone, beside = (report_on(given, TOP_P, engine=Supposed(control=control)) for control in ([], plain))
    assert alone.rate is not None
    assert 2 < alone.rate.log10_e < 8
    assert (alone.verdict, beside.verdict) == ("numerics", "rejected")
    assert beside.control is not None
    assert (beside.control.source, beside.control.only_here) == ("speculation", ["impossible"])
    same = report_on(given, TOP_P, engine=Supposed(control=emitted(LOGITS[:140], Sampling(), 5)))
    assert same.verdict == "numerics"
