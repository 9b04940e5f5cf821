"""Tokens of probability zero: near ties are numerics, and what is beyond them rejects exactness."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
from tiny import llama

from specnb.distributions import Sampling, standardise, total_variation
from specnb_audit.auditor import Auditor
from specnb_audit.bets import CutoffGap, Row
from specnb_audit.engine import Aim, Engine
from specnb_audit.numerics import Impossible, ImpossibleTokens, Numerics, given_numerics, measure_numerics, summary
from specnb_audit.teacher_forcing import Completion

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
    _, undeclared = Engine(engine, positions=2).numerics(llama(dtype=dtype), completions, Sampling())
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


NAN = float("nan")
NARROW = Numerics(16, logit=0.1, tv=0.05, tv_mean=0.0, nats=0.0)  # up to 0.2 in a logit and 0.1 in mass
WIDE = Numerics(16, logit=0.5, tv=0.25, tv_mean=0.0, nats=0.0)  # up to 1 and 0.5


@pytest.mark.parametrize(
    ("gap", "with_both", "without_any", "without_bfloat16", "without_the_engine"),
    [
        ((0.2, 0.1), "borderline", "violations", "borderline", "undeclared"),
        ((0.21, 0.0), "undeclared", "violations", "violations", "undeclared"),
        ((0.0, 0.11), "undeclared", "violations", "violations", "undeclared"),
        ((1.0, 0.5), "undeclared", "violations", "violations", "undeclared"),
        ((1.01, 0.0), "violations", "violations", "violations", "violations"),
        ((0.0, 0.51), "violations", "violations", "violations", "violations"),
        ((NAN, NAN), "violations", "violations", "violations", "violations"),
    ],
)
def test_the_class_of_a_token_is_what_explains_its_gaps(
    gap: tuple[float, float], with_both: str, without_any: str, without_bfloat16: str, without_the_engine: str
) -> None:
    one = Impossible(0, 1, 2, *gap)
    for numerics, undeclared, name in (
        (NARROW, WIDE, with_both),
        (None, None, without_any),
        (NARROW, None, without_bfloat16),
        (None, WIDE, without_the_engine),
    ):
        asked: list[int] = []

        def measure(given: Numerics | None = undeclared, asked: list[int] = asked) -> Numerics:
            assert given is not None
            asked.append(1)
            return given

        found = ImpossibleTokens(numerics, None if undeclared is None else measure)
        assert found.add(one) == found.add(one) == name
        assert found.listed == {key: [one] * 2 * (key == name) for key in ("violations", "borderline", "undeclared")}
        assert found.counts == {key: 2 * (key == name) for key in ("violations", "borderline", "undeclared")}
        assert len(found.gaps) == 2
        needed = undeclared is not None and gap[0] == gap[0] and name != "borderline"
        assert asked == [1] * needed  # bfloat16 is measured once, for the first token that needs it


def test_a_hundred_tokens_of_each_class_are_listed_and_all_are_counted() -> None:
    found = ImpossibleTokens(None, lambda: WIDE)
    for at in range(102):
        found.add(Impossible(0, at, 5, 9.0, 0.0))
        found.add(Impossible(1, at, 5, 0.5, 0.0))
    assert [one.position for one in found.listed["violations"]] == list(range(100))
    assert [one.position for one in found.listed["undeclared"]] == list(range(100))
    assert found.counts == {"violations": 102, "borderline": 0, "undeclared": 102}
    assert found.gaps == [(9.0, 0.0), (0.5, 0.0)] * 102
    assert found.summary(1000) == "204 of 1,000 tokens are impossible (20%), by up to 9 in a logit"


def test_violations_that_are_excused_follow_the_undeclared_ones() -> None:
    for first, second in ((2, 3), (99, 3), (0, 100), (3, 0)):
        found = ImpossibleTokens(NARROW, lambda: WIDE)
        for at in range(first):
            found.add(Impossible(1, at, 5, 0.5, 0.0))
        for at in range(second):
            found.add(Impossible(0, at, 5, 9.0, 0.0))
        found.add(Impossible(2, 0, 5, 0.1, 0.0))
        found.excuse()
        order = [(1, at) for at in range(first)] + [(0, at) for at in range(second)]
        assert [(one.sequence, one.position) for one in found.listed["undeclared"]] == order[:100]
        assert (found.listed["violations"], len(found.listed["borderline"])) == ([], 1)
        assert found.counts == {"violations": 0, "borderline": 1, "undeclared": first + second}


@pytest.mark.parametrize(
    ("gaps", "tokens", "words"),
    [
        ([], 10, ""),
        ([(0.0, 0.0)], 1, "1 of 1 tokens is impossible (100%)"),
        ([(0.0, 0.0)], 0, "1 of 0 tokens is impossible (100%)"),
        ([(0.256, 0.123), (0.1, 0.5)], 3000, (
            "2 of 3,000 tokens are impossible (0.067%), by up to 0.26 in a logit and 0.5 in top-p"
        )),
        ([(NAN, NAN), (0.25, NAN)], 123456, "2 of 123,456 tokens are impossible (0.0016%), by up to 0.25 in a logit"),
        ([(0.0, 2.0)] * 1500, 6000, "1,500 of 6,000 tokens are impossible (25%), by up to 2 in top-p"),
    ],
)  # fmt: skip
def test_the_summary_in_full(gaps: list[tuple[float, float]], tokens: int, words: str) -> None:
    assert summary(gaps, tokens) == words


# What is known of the engine


def test_numerics_are_given_or_measured_where_there_is_something_to_measure() -> None:
    model, texts = llama(), [Completion([1], []), Completion([1], [0, 1, 2])]

    def coin(prefix: tuple[int, ...]) -> list[float]:
        return [0.5, 0.5]

    for tolerance in (0.0, 0.3):
        given = Engine(torch.bfloat16, tolerance, positions=4).numerics(model, texts, Sampling(0.5))
        assert given == (given_numerics(tolerance, Sampling(0.5)), None)
        assert Engine(None, tolerance, positions=0).numerics(coin, [], Sampling(0.5)) == given
    for target, completions, positions in ((coin, texts, 4), (model, texts[:1], 4), (model, texts, 0), (model, [], 4)):
        assert Engine(positions=positions).numerics(target, completions, Sampling()) == (None, None)
    for positions in (1, 2):
        numerics, _ = Engine(positions=positions).numerics(model, texts, Sampling(0.5))
        assert numerics == measure_numerics(model, texts, Sampling(0.5), positions)
        assert numerics is not None
        assert numerics.positions == positions


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64, torch.bfloat16])
def test_numerics_are_those_of_the_engine_s_dtype(dtype: torch.dtype | None) -> None:
    model, texts, sampling = llama(), [Completion([1], [0, 1, 2])], Sampling(0.5)
    numerics, undeclared = Engine(dtype, positions=2).numerics(model, texts, sampling)
    assert numerics == measure_numerics(model, texts, sampling, 2, dtype)
    assert (undeclared is None) == (dtype is not None)
    if undeclared is not None:
        assert undeclared() == measure_numerics(model, texts, sampling, 2, torch.bfloat16)
        assert undeclared() is undeclared()  # measured once


def test_what_may_be_said_of_an_engine() -> None:
    assert (Engine().dtype, Engine().logit_tolerance, Engine().control) == (None, None, ())
    assert (Aim().ignore, Aim().suspected) == ((), None)
    largest = torch.finfo(torch.float32).max
    for tolerance in (0, 0.0, 1, largest):
        assert Engine(logit_tolerance=tolerance).logit_tolerance == tolerance
    for bad in (-1e-9, 2 * largest):
        words = f"logit_tolerance is {bad}; it must be 0 or more, in units of logits"
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            Engine(logit_tolerance=bad)
    for count in (-1, 2.5, True):
        with pytest.raises(ValueError, match=f"^positions is {count}; it must be a whole number from 0$"):
            Engine(positions=count)  # type: ignore[arg-type]
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert Engine(dtype).dtype == dtype
    for other in (torch.int64, torch.bool, "float32", 1):
        words = f"dtype is {other!r}; give a dtype of floating point, such as torch.bfloat16, or None"
        with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
            Engine(other)  # type: ignore[arg-type]
    for one, name in ((Engine(), "dtype"), (Aim(), "ignore")):
        with pytest.raises(FrozenInstanceError):
            setattr(one, name, None)
