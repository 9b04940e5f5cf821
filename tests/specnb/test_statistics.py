"""Estimates: intervals that cover, tests that raise as many false alarms as they say, and find what
they say; and jobs that are timed in turn."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specnb.statistics import (
    Estimate,
    Job,
    below,
    detectable_total_variation,
    goodness_of_fit,
    over_rows,
    p_of_all,
    proportion,
    ratio_of_medians,
    ratio_of_sums,
    run_round,
    time_round,
)


def fraction_within(hits: int, n: int, low: float, high: float) -> bool:
    """Whether a fraction seen in simulation can be a chance from `low` to `high`; false once in a
    million."""
    return bool(stats.binomtest(hits, n, float(np.clip(hits / n, low, high))).pvalue > 1e-6)


def skewed_distribution(cells: int) -> np.ndarray:
    probs = 0.8 ** np.arange(cells)
    return np.asarray(probs / probs.sum())


# Goodness of fit


@pytest.mark.parametrize("n", [60, 2000])
def test_p_values_of_exact_samples_are_uniform(n: int) -> None:
    """The distribution has cells that expect far less than one count at both sizes, and they are
    joined."""
    probs, samples = skewed_distribution(40), 1500
    counts = np.random.default_rng(0).multinomial(n, probs, size=samples)
    p_values = np.array([goodness_of_fit(row, probs).p_value for row in counts])
    for rate in (0.5, 0.1, 0.01):
        # The statistic is a whole number of steps, so its rate can be off by one of them.
        assert fraction_within(int((p_values < rate).sum()), samples, 0.8 * rate, 1.2 * rate)


def test_the_statistic_is_pearsons() -> None:
    counts, probs = [[130, 70], [90, 110]], [[0.25, 0.25], [0.25, 0.25]]
    fit, want = goodness_of_fit(counts, probs), stats.chisquare([130, 70, 90, 110])
    assert fit == pytest.approx((want.statistic, want.pvalue, (30 + 30 + 10 + 10) / 400 / 2, 400))
    assert goodness_of_fit(counts, probs, fitted=1).p_value == pytest.approx(stats.chi2.sf(20, 2))


def test_cells_are_joined_from_the_rarest_on_until_they_expect_enough() -> None:
    expected = np.array([400.0, 20, 30, 4, 9])  # 4 + 9 + 20 | 30 | 400
    fit = goodness_of_fit([380, 30, 40, 4, 9], expected / 463)
    assert fit[:2] == pytest.approx(tuple(stats.chisquare([43, 40, 380], [33, 30, 400])))
    left_over = goodness_of_fit([12, 20, 20, 20, 28], np.full(5, 0.2))  # 20 + 20 | 20 + 20 + 20
    assert left_over.statistic == pytest.approx(64 / 40 + 64 / 60)
    # One cell is left: too few counts to tell.
    assert goodness_of_fit([12, 0], [0.5, 0.5]).p_value == 1


def test_something_impossible_has_p_value_zero() -> None:
    assert goodness_of_fit([500, 499, 1], [0.5, 0.5, 0]).p_value == 0
    assert goodness_of_fit([500, 500, 0], [0.5, 0.5, 0]).p_value == 1


@pytest.mark.parametrize(("cells", "n", "false_alarm", "power"), [(16, 4000, 1e-3, 0.9), (4, 1000, 1e-6, 0.5)])
def test_what_is_detectable_is_detected_with_that_power(cells: int, n: int, false_alarm: float, power: float) -> None:
    distance, samples = detectable_total_variation(cells, n, false_alarm, power), 1500
    probs = np.full(cells, 1 / cells)
    signs = np.resize([1, -1], cells)

    def found(distance: float) -> int:
        counts = np.random.default_rng(0).multinomial(n, probs * (1 + 2 * distance * signs), size=samples)
        return sum(goodness_of_fit(row, probs).p_value < false_alarm for row in counts)

    assert fraction_within(found(distance), samples, power - 0.02, power + 0.02)
    assert found(distance / 2) < found(distance) / 2
    assert detectable_total_variation(100, 5, 1e-6) == np.inf  # no sample of that size shows any


# Intervals


def test_intervals_over_rows_cover_although_rows_are_alike_within_themselves() -> None:
    """Each row has its own acceptance; an interval over tokens would take them for independent."""
    generator = np.random.default_rng(0)
    samples, rows, tokens = 300, 40, 50
    truth, covered, covered_by_tokens = 0.6, 0, 0
    for seed in range(samples):
        accepted = generator.binomial(tokens, generator.beta(6, 4, size=rows))
        one = ratio_of_sums(accepted, np.full(rows, tokens), resamples=400, seed=seed)
        covered += one.low <= truth <= one.high
        other = proportion(int(accepted.sum()), rows * tokens)
        covered_by_tokens += other.low <= truth <= other.high
    assert fraction_within(covered, samples, 0.91, 0.96)
    assert not fraction_within(covered_by_tokens, samples, 0.85, 1.0)


def test_a_ratio_of_sums_weighs_rows_by_their_length_and_is_one_statistic_over_rows() -> None:
    top, bottom = np.array([1.0] * 8 + [30]), np.array([1.0] * 8 + [60])
    ratio = ratio_of_sums(top, bottom, seed=3)
    assert ratio.value == pytest.approx(38 / 68)
    assert ratio.n == 68
    general = over_rows(lambda chosen: top[chosen].sum() / bottom[chosen].sum(), 9, resamples=4000, seed=3)
    assert general[:3] == pytest.approx(ratio[:3])


def test_what_was_measured_together_is_resampled_together() -> None:
    rows = np.random.default_rng(2).normal(size=20)
    assert over_rows(lambda chosen: (rows[chosen] + 1).mean() - rows[chosen].mean(), 20)[:3] == pytest.approx((1, 1, 1))
    drift = np.linspace(1, 9, 15)  # a machine that slows down ninefold, for both alike
    assert ratio_of_medians(3 * drift, drift) == pytest.approx((3, 3, 3, 15))
    apart = ratio_of_medians(3 * drift, drift[::-1])
    assert apart.low < 2 < 4 < apart.high


@pytest.mark.parametrize(
    ("estimate", "printed"),
    [
        (Estimate(0.6937, 0.5895, 0.7894, 40), "0.69 [0.59, 0.79] (n = 40)"),
        (Estimate(1234.5, 1200, 1280, 9), "1234 [1200, 1280] (n = 9)"),
        (Estimate(0, 0, 0, 960), "0 [0, 0] (n = 960)"),
        (Estimate(float("nan"), float("nan"), float("nan"), 1), "nan [nan, nan] (n = 1)"),
    ],
)
def test_an_estimate_has_no_more_digits_than_its_interval_supports(estimate: Estimate, printed: str) -> None:
    assert str(estimate) == printed


def test_a_deviation_that_is_no_number_leaves_no_p_value() -> None:
    assert np.isnan(p_of_all([np.nan, 10.0]))
    assert p_of_all([0.1, 10.0]) < 1e-20


def test_errors_of_rounding_are_stated_as_bounds() -> None:
    errors = (0.0, 3e-16, -3e-16, 1e-12, 0.5, np.inf, np.nan)
    assert [below(error) for error in errors] == [1e-12, 1e-12, 1e-12, 1e-4, np.inf, np.inf, np.inf]


@pytest.mark.parametrize(
    "call",
    [
        lambda: ratio_of_sums([1] * 7, [1] * 7),
        lambda: ratio_of_sums([1] * 9, [1] * 8),
        lambda: ratio_of_medians([1.0, 2.0], [1.0, 2.0]),
        lambda: over_rows(len, 7),
        lambda: goodness_of_fit([1, 2, 3], [0.5, 0.5]),
        lambda: goodness_of_fit([1, 2], [0.5, np.nan]),
        lambda: goodness_of_fit([1, 2], [1.5, -0.5]),
        lambda: goodness_of_fit([3, -2], [0.5, 0.5]),
    ],
)
def test_what_has_no_answer_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=" "):
        call()


# Timing. No test asserts a time.


def test_jobs_run_in_random_order_and_what_comes_before_is_not_timed() -> None:
    """By a clock that advances by one second for each name in `ran`."""
    ran: list[str] = []
    jobs = [Job(partial(ran.extend, name), [partial(ran.append, f"before {name}")], times=2) for name in ("a", "bbb")]
    order = np.random.default_rng(0)
    for _ in range(8):
        assert time_round(jobs, lambda: float(len(ran)), order).tolist() == [1.0, 3.0]
    a, b = ("before a", *"aa"), ("before bbb", *"bbbbbb")
    assert {tuple(ran[at : at + 10]) for at in range(0, len(ran), 10)} == {a + b, b + a}


def test_results_come_back_in_the_order_given() -> None:
    order = np.random.default_rng(0)
    assert all(run_round([lambda: 1, lambda: 2, lambda: 3], order) == [1, 2, 3] for _ in range(9))
