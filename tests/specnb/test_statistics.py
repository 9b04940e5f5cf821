"""Estimates: intervals that cover, tests that raise as many false alarms as they say, and find what
they say; and jobs that are timed in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from scipy import stats

from specnb import statistics
from specnb.statistics import (
    Estimate,
    Job,
    below,
    detectable_total_variation,
    goodness_of_fit,
    over_rows,
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


def test_false_alarms_at_one_in_a_million_are_as_rare_as_the_docstring_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells, one of which expects just enough: the exact chance of an alarm, summed over all
    counts."""

    def exact_rate(expected: float) -> float:
        monkeypatch.setattr(statistics, "MIN_EXPECTED", expected)
        n = 100_000
        probs = np.array([expected / n, 1 - expected / n])
        counts = np.arange(150)
        alarms = [goodness_of_fit([count, n - count], probs).p_value < 1e-6 for count in counts]
        return float(stats.binom.pmf(counts, n, probs[0])[alarms].sum())

    assert f"{exact_rate(statistics.MIN_EXPECTED):.0e}" == "7e-06"
    assert f"{exact_rate(5.0):.0e}" == "7e-05"


def test_the_statistic_is_pearsons() -> None:
    counts, probs = [[130, 70], [90, 110]], [[0.25, 0.25], [0.25, 0.25]]
    fit, want = goodness_of_fit(counts, probs), stats.chisquare([130, 70, 90, 110])
    assert fit == pytest.approx((want.statistic, want.pvalue, (30 + 30 + 10 + 10) / 400 / 2, 400))
    assert goodness_of_fit(counts, probs, fitted=1).p_value == pytest.approx(stats.chi2.sf(20, 2))


def test_cells_are_joined_from_the_rarest_on_until_they_expect_enough() -> None:
    expected = np.array([400.0, 20, 30, 4, 9])  # 4 + 9 + 20 | 30 | 400
    fit = goodness_of_fit([380, 30, 40, 4, 9], expected / 463)
    cells = np.array([[43, 33], [40, 30], [380, 400]])
    assert fit.statistic == pytest.approx(((cells[:, 0] - cells[:, 1]) ** 2 / cells[:, 1]).sum())
    assert fit.p_value == pytest.approx(stats.chi2.sf(fit.statistic, 2))
    left_over = goodness_of_fit([12, 20, 20, 20, 28], np.full(5, 0.2))  # 20 + 20 | 20 + 20 + 20
    assert left_over.statistic == pytest.approx(64 / 40 + 64 / 60)
    # One cell is left: too few counts to tell.
    assert goodness_of_fit([12, 0], [0.5, 0.5]).p_value == 1
    assert goodness_of_fit([600, 399, 1], [0.6, 0.39999, 0.00001]).p_value > 0.5


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


@pytest.mark.parametrize("n", [30, 400])
@pytest.mark.parametrize("level", [0.95, 0.8])
def test_intervals_of_a_proportion_cover(n: int, level: float) -> None:
    """Exactly: the chance of each count, summed over those whose interval holds the truth."""
    intervals = [proportion(k, n, level) for k in range(n + 1)]
    assert [one.value for one in intervals] == [k / n for k in range(n + 1)]
    truths = np.linspace(0.05, 0.95, 91)
    coverage = [
        sum(stats.binom.pmf(k, n, truth) for k, one in enumerate(intervals) if one.low <= truth <= one.high)
        for truth in truths
    ]
    assert np.mean(coverage) == pytest.approx(level, abs=0.01)
    assert min(coverage) > level - 0.1


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
    assert ratio.low < ratio.value < ratio.high
    general = over_rows(lambda chosen: top[chosen].sum() / bottom[chosen].sum(), 9, resamples=4000, seed=3)
    assert general[:3] == pytest.approx(ratio[:3])
    assert general.n == 9
    one, other = np.random.default_rng(0).random((2, 20))
    assert ratio_of_sums(one, other) == ratio_of_sums(one, other) != ratio_of_sums(one, other, seed=1)


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
        (Estimate(0.76, 0.751234, 0.77, 12345), "0.760 [0.751, 0.770] (n = 12,345)"),
        (Estimate(0.6937, 0.5895, 0.7894, 40), "0.69 [0.59, 0.79] (n = 40)"),
        (Estimate(1234.5, 1200, 1280, 9), "1234 [1200, 1280] (n = 9)"),
        (Estimate(0, 0, 0, 960), "0 [0, 0] (n = 960)"),
        (Estimate(float("nan"), float("nan"), float("nan"), 1), "nan [nan, nan] (n = 1)"),
        (Estimate(1.5, 0.5, float("inf"), 2), "1.5 [0.5, inf] (n = 2)"),
    ],
)
def test_an_estimate_has_no_more_digits_than_its_interval_supports(estimate: Estimate, printed: str) -> None:
    assert str(estimate) == printed


def test_errors_of_rounding_are_stated_as_bounds() -> None:
    errors = (0.0, 3e-16, -3e-16, 1e-12, 0.5, np.inf, np.nan)
    assert [below(error) for error in errors] == [1e-12, 1e-12, 1e-12, 1e-4, np.inf, np.inf, np.inf]


@pytest.mark.parametrize(
    "call",
    [
        lambda: proportion(3, 2),
        lambda: ratio_of_sums([1] * 7, [1] * 7),
        lambda: ratio_of_sums([1] * 9, [1] * 8),
        lambda: ratio_of_medians([1.0, 2.0], [1.0, 2.0]),
        lambda: over_rows(len, 7),
        lambda: goodness_of_fit([1, 2, 3], [0.5, 0.5]),
        lambda: goodness_of_fit([1, 2], [0.5, 0.6]),
        lambda: goodness_of_fit([1, 2], [0.5, np.nan]),
        lambda: detectable_total_variation(1, 100, 1e-6),
        lambda: detectable_total_variation(5, 0, 1e-6),
        lambda: detectable_total_variation(5, 10, 0),
        lambda: detectable_total_variation(5, 10, 0.5, power=0.4),
    ],
)
def test_what_has_no_answer_is_refused(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=" "):
        call()


# Timing. No test asserts a time.


class Ticks:
    """A clock that advances by one second for each call of `work`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.ran: list[str] = []

    def __call__(self) -> float:
        return self.seconds

    def work(self, name: str) -> None:
        self.seconds += 1
        self.ran.append(name)


def test_jobs_run_in_random_order_and_what_comes_before_is_not_timed() -> None:
    clock = Ticks()

    def job(name: str, work: int, times: int) -> Job:
        before = [lambda: clock.work(f"before {name}")]
        return Job(lambda: [clock.work(name) for _ in range(work)], before, times)

    order = np.random.default_rng(0)
    for _ in range(8):
        assert time_round([job("a", 1, 1), job("b", 3, 2)], clock, order).tolist() == [1.0, 3.0]
    a, b = ("before a", "a"), ("before b", *["b"] * 6)
    rounds_run = {tuple(clock.ran[at : at + 9]) for at in range(0, len(clock.ran), 9)}
    assert len(clock.ran) == 9 * 8
    assert rounds_run == {a + b, b + a}


def test_results_come_back_in_the_order_given() -> None:
    order = np.random.default_rng(0)
    assert all(run_round([lambda: 1, lambda: 2, lambda: 3], order) == [1, 2, 3] for _ in range(9))
