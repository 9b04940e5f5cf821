"""Tokens of probability zero: near ties are numerics, and what is beyond them rejects exactness."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import llama

from specnb.audit.auditor import Auditor
from specnb.audit.bets import CutoffGap, Row
from specnb.audit.engine import Engine
from specnb.audit.impossible import Impossible, summary
from specnb.audit.numerics import Numerics, given_numerics
from specnb.audit.teacher_forcing import Completion
from specnb.sampling.distributions import Sampling, standardise, total_variation

P = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
BFLOAT16 = Numerics(16, logit=0.05, tv=0.02, tv_mean=0.01, nats=1e-4, spread=0.01)


def audited(gap: float, **settings: object) -> Auditor:
    auditor = Auditor(**settings)  # type: ignore[arg-type]
    auditor.add(Row([0, 1, 0], P.expand(3, -1)))
    auditor.add(Row([2], P, cutoff_gaps={0: CutoffGap(gap, 0.0)}))
    return auditor


def test_a_near_tie_of_unknown_dtype_is_numerics() -> None:
    report = audited(3e-5, undeclared=lambda: BFLOAT16).report()
    assert report.verdict == "numerics"
    assert not report.rejected
    assert np.isfinite(report.log10_e_peak)
    words = str(report)
    assert "1 of 4 tokens is impossible (25%), by up to 3e-05 in a logit" in words.splitlines()[0]
    assert "--engine-dtype bfloat16" in words
    assert report.to_dict()["undeclared"][0]["logit"] == 3e-5


def test_a_large_gap_rejects_whatever_the_dtype() -> None:
    report = audited(2.0, undeclared=lambda: BFLOAT16).report()
    assert report.diagnosis == "impossible"
    assert "by up to 2 in a logit" in str(report).splitlines()[0]


def test_bfloat16_is_measured_only_when_a_token_needs_it() -> None:
    def never() -> Numerics:
        raise AssertionError("measured")

    auditor = Auditor(undeclared=never)
    auditor.add(Row([0], P))
    assert auditor.report().verdict == "not rejected"
    assert audited(0.01, numerics=BFLOAT16, undeclared=never).report().verdict == "not rejected"
    assert audited(float("nan")).report().rejected


@pytest.mark.parametrize(
    ("engine", "dtype", "unknown"),
    [
        (None, torch.float32, True),
        (None, torch.float64, True),
        (None, torch.bfloat16, False),
        (torch.float32, torch.float32, False),
        (torch.bfloat16, torch.float32, False),
    ],
)
def test_bfloat16_is_supposed_only_where_no_dtype_is_known(
    engine: torch.dtype | None, dtype: torch.dtype, unknown: bool
) -> None:
    completions = [Completion([1], [0, 1, 2])]
    _, undeclared = Engine(engine).numerics(llama(dtype=dtype), completions, Sampling(), positions=2)
    assert (undeclared is not None) == unknown
    assert undeclared is None or "in bfloat16 differ" in undeclared().source


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_a_given_tolerance_bounds_what_it_says(temperature: float) -> None:
    """Logits moved by up to half the tolerance: total variation and divergence stay within the stated bounds."""
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature)
    numerics = given_numerics(0.3, sampling)
    logits = torch.randn(200, 6, generator=generator, dtype=torch.float64)
    signs = torch.randint(2, logits.shape, generator=generator) * 2 - 1
    p, r = (standardise(each, sampling) for each in (logits, logits + 0.15 * signs))
    assert float(total_variation(p, r).max()) <= numerics.tv
    for order in (1.5, 2.0, 8.0):
        renyi = (r**order * p ** (1 - order)).sum(dim=-1).log() / (order - 1)
        assert float(renyi.max()) <= order * numerics.nats
    assert numerics.explains(0.3, 0.0)
    assert not numerics.explains(0.31, 0.0)


def test_the_bound_of_a_measurement_covers_the_largest_of_many_normal_errors() -> None:
    errors = np.random.default_rng(0).normal(scale=1e-5, size=(2, 10**6))
    numerics = Numerics(16, logit=4e-5, tv=1e-6, tv_mean=1e-6, nats=0.0, spread=1e-5)
    assert np.abs(errors[0] - errors[1]).max() < numerics.logit_gap < 3e-4


@pytest.mark.parametrize("given", [-1.0, float("nan"), float("inf")])
def test_bad_tolerances_are_refused(given: float) -> None:
    with pytest.raises(ValueError, match="logit_tolerance is"):
        Engine(logit_tolerance=given)
    with pytest.raises(TypeError, match="dtype is 'bfloat16'"):
        Engine(dtype="bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gap", "words"),
    [
        ((0.25, 0.0), " (its logit is 0.25 below the smallest one kept)"),
        ((0.0, 0.125), " (likelier tokens have 0.125 more than top-p)"),
        ((0.25, 0.5), " (its logit is 0.25 below the smallest one kept and likelier tokens have 0.5 more than top-p)"),
        ((float("nan"), float("nan")), ""),
    ],
)
def test_a_token_is_shown_with_the_gaps_that_it_has(gap: tuple[float, float], words: str) -> None:
    assert str(Impossible(3, 17, 5, *gap)) == f"sequence 3, position 17: token 5{words}"


def test_the_summary_of_tokens_without_logits() -> None:
    assert summary([(float("nan"), float("nan"))] * 2, 1000) == "2 of 1,000 tokens are impossible (0.2%)"
    assert summary([(0.0, 0.125)], 10).endswith("by up to 0.12 in top-p")
    assert summary([(0.25, 0.0)] * 3, 3).startswith("3 of 3 tokens are impossible (100%)")
