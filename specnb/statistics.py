"""Estimates with an interval and their number of observations, and goodness-of-fit tests.

Tokens of one sequence are not independent, so bootstrap intervals resample whole sequences, not
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import scipy  # its parts, which take a second, are imported when first used
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]

MIN_EXPECTED = 25.0
"""`goodness_of_fit` merges cells that expect fewer counts. A test of two cells at level 1e-6 then
has a false-alarm rate of 7e-6; with the usual minimum of 5 it would be 7e-5."""

BOUNDS = (1e-12, 1e-4)
"""Upper bounds of accumulated rounding errors, in float64 and in float32, with a wide margin."""


class Estimate(NamedTuple):
    """A value, its 95% interval and the number of observations.

    Printed with as many decimals as give the width of the interval two significant digits, and at
    most four; more digits than that are noise.

    >>> print(Estimate(0.61234, 0.6, 0.63, 4096))
    0.612 [0.600, 0.630] (n = 4,096)
    """

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        value, low, high = (format(x, self._precision()) for x in (self.value, self.low, self.high))
        return f"{value} [{low}, {high}] (n = {self.n:,})"

    def _precision(self) -> str:
        width = self.high - self.low
        return f".{min(4, max(0, 1 - math.floor(math.log10(width))))}f" if 0 < width < math.inf else ".4g"


def proportion(successes: int, n: int, level: float = 0.95) -> Estimate:
    """The proportion of successes in independent trials with its Wilson interval.

    Raises `ValueError` unless 0 <= successes <= n and n > 0.

    >>> print(proportion(9, 10))
    0.90 [0.60, 0.98] (n = 10)
    """
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} successes in {n} trials: there must be 0 to n successes and at least 1 trial")
    wilson = scipy.stats.binomtest(int(successes), int(n)).proportion_ci(level, method="wilson")
    return Estimate(successes / n, wilson.low, wilson.high, int(n))


def bootstrap_indices(rows: int, resamples: int, seed: int) -> Indices:
    """Row indices `(resamples, rows)`, drawn with replacement: one bootstrap sample per line.

    >>> bootstrap_indices(3, 2, seed=0).shape
    (2, 3)
    """
    return np.random.default_rng(seed).integers(rows, size=(resamples, rows))


def interval(values: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """The percentile interval: the middle `level` of the bootstrapped `values` lies between the two
    numbers.

    >>> interval(range(101), level=0.5)
    (25.0, 75.0)
    """
    low, high = np.quantile(np.asarray(values, dtype=np.float64), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


# `scipy.stats.bootstrap` resamples the same rows for the same seed, but its percentile interval
# differs in the last bit in about half of the cases, which would change committed tables; it also
# takes two to three times as long.
def bootstrap(
    statistic: Callable[[Indices], ArrayLike], rows: int, resamples: int, seed: int, level: float = 0.95
) -> Estimate:
    """`statistic` of all rows, with a percentile bootstrap interval over rows; n is the number of
    rows.

    `statistic` maps row indices `(..., rows)` to values `(...)`.

    >>> times = np.array([1.0, 1.1, 0.9, 1.0])
    >>> print(bootstrap(lambda chosen: np.median(times[chosen], axis=-1), rows=4, resamples=200, seed=0))
    1.00 [0.90, 1.10] (n = 4)
    """
    value = np.asarray(statistic(np.arange(rows)), dtype=np.float64)
    return Estimate(float(value), *interval(statistic(bootstrap_indices(rows, resamples, seed)), level), rows)


def ratio_of_sums(
    numerators: ArrayLike, denominators: ArrayLike, level: float = 0.95, resamples: int = 4000, seed: int = 0
) -> Estimate:
    """sum(numerators) / sum(denominators), both `(rows,)`, with a bootstrap interval over
    independent rows.

    Gives the mean over all tokens of several sequences: one entry per sequence, its sum and its
    count. n is the sum of the denominators. Raises `ValueError` for fewer than 8 rows, too few to
    resample.

    >>> ratio_of_sums([3] * 8, [4] * 8)
    Estimate(value=0.75, low=0.75, high=0.75, n=32)
    """
    top, bottom = _equally_long(numerators, denominators, 8, "numbers")
    ratio = bootstrap(
        lambda chosen: top[chosen].sum(axis=-1) / bottom[chosen].sum(axis=-1), len(top), resamples, seed, level
    )
    return ratio._replace(n=int(bottom.sum()))


def ratio_of_medians(top: ArrayLike, bottom: ArrayLike, resamples: int = 2000, seed: int = 0) -> Estimate:
    """median(top) / median(bottom) of times `(repetitions,)`, with a bootstrap interval over
    repetitions.

    Both times of a repetition are resampled together. n is the number of repetitions. Raises
    `ValueError` for unequal lengths or fewer than 3 repetitions.

    >>> ratio_of_medians([2.0, 2.0, 2.0], [1.0, 1.0, 1.0])
    Estimate(value=2.0, low=2.0, high=2.0, n=3)
    """
    top, bottom = _equally_long(top, bottom, 3, "times")
    return bootstrap(
        lambda chosen: np.median(top[chosen], axis=-1) / np.median(bottom[chosen], axis=-1), len(top), resamples, seed
    )


def _equally_long(top: ArrayLike, bottom: ArrayLike, least: int, of: str) -> tuple[Array, Array]:
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    if top.shape != bottom.shape or top.ndim != 1 or len(top) < least:
        raise ValueError(
            f"need two equally long rows of at least {least} {of}, got shapes {top.shape} and {bottom.shape}"
        )
    return top, bottom


def over_rows(
    statistic: Callable[[Indices], float], rows: int, level: float = 0.95, resamples: int = 1000, seed: int = 0
) -> Estimate:
    """`statistic` of all rows, with a bootstrap interval over rows; n is the number of rows.

    `statistic` takes the indices `(rows,)` of the rows to use, with repetitions, and returns a
    number. A difference between two numbers from the same sequences so keeps what they have in
    common. Raises `ValueError` for fewer than 8 rows, too few to resample.

    >>> lengths = np.full(8, 5.0)
    >>> over_rows(lambda chosen: lengths[chosen].mean(), rows=8)
    Estimate(value=5.0, low=5.0, high=5.0, n=8)
    """
    if rows < 8:
        raise ValueError(f"{rows} rows are too few to resample; need at least 8")

    def each(chosen: Indices) -> ArrayLike:
        return statistic(chosen) if chosen.ndim == 1 else [float(statistic(one)) for one in chosen]

    return bootstrap(each, rows, resamples, seed, level)


class Fit(NamedTuple):
    """A goodness-of-fit test: the statistic, its p-value, the observed total variation, and the
    number of counts."""

    statistic: float
    p_value: float
    total_variation: float
    n: int


def goodness_of_fit(counts: ArrayLike, probs: ArrayLike, fitted: int = 0) -> Fit:
    """Pearson's chi-square test of `counts` `(k,)` against `probs` `(k,)`, after merging rare cells
    (`MIN_EXPECTED`).

    `fitted` is the number of parameters of `probs` that were estimated from the counts. A count in
    a cell of probability zero has p-value 0. Raises `ValueError` for different lengths, no counts,
    and `probs` that do not sum to 1.

    >>> goodness_of_fit([50, 50], [0.5, 0.5])
    Fit(statistic=0.0, p_value=1.0, total_variation=0.0, n=100)
    """
    observed, probs = np.asarray(counts, dtype=np.float64).ravel(), np.asarray(probs, dtype=np.float64).ravel()
    n = observed.sum()
    if observed.shape != probs.shape or n == 0 or not abs(probs.sum() - 1) < 1e-4:
        raise ValueError(
            f"{len(observed)} counts of sum {n:g} cannot be tested against a distribution of {len(probs)} that sums to "
            f"{probs.sum():g}"
        )
    distance = float(np.abs(observed / n - probs).sum() / 2)
    if (observed[probs == 0] > 0).any():
        return Fit(np.inf, 0.0, distance, int(n))
    merged = merged_cells(probs * n)
    # Weighted counts are floats already, which the stub of numpy does not know.
    cells_o, cells_e = (np.bincount(merged, weights=own).astype(np.float64) for own in (observed, probs * n))
    statistic = float(((cells_o - cells_e) ** 2 / cells_e).sum())
    freedom = len(cells_e) - 1 - fitted
    return Fit(statistic, float(scipy.stats.chi2.sf(statistic, max(freedom, 1))), distance, int(n))


def merged_cells(expected: Array) -> Indices:
    """The number of the merged cell of each cell `(cells,)`: in order of what they expect, until
    each expects `MIN_EXPECTED`.

    >>> merged_cells(np.array([40.0, 10.0, 20.0]))
    array([1, 0, 0])
    """
    merged, number, sum_of_cell = np.zeros(len(expected), dtype=np.int64), 0, 0.0
    for cell in np.argsort(expected, kind="stable"):
        if sum_of_cell >= MIN_EXPECTED:
            number, sum_of_cell = number + 1, 0.0
        merged[cell] = number
        sum_of_cell += expected[cell]
    if sum_of_cell < MIN_EXPECTED and number > 0:
        merged[merged == number] = number - 1
    return merged


def detectable_total_variation(cells: int, n: int, false_alarm: float, power: float = 0.99) -> float:
    """The smallest total variation that `goodness_of_fit` detects with probability `power` at that
    false-alarm rate.

    Computed for the deviation with the least power: every cell off by the same relative amount, so
    that the noncentrality is n (2 TV)^2. `cells` counts the cells after merging. Infinite if `n` is
    too small to detect a total variation of 1. Raises `ValueError` for fewer than 2 cells, n < 1,
    rates outside (0, 1) and power <= false_alarm.

    >>> round(detectable_total_variation(cells=10, n=100_000, false_alarm=1e-6), 4)
    0.0134
    """
    if cells < 2 or n < 1 or not 0 < false_alarm < power < 1:
        raise ValueError(f"no test has {cells} cells, n = {n}, false alarms {false_alarm} and power {power}")
    threshold = scipy.stats.chi2.isf(false_alarm, cells - 1)

    def excess(distance: float) -> float:
        return float(scipy.stats.ncx2.sf(threshold, cells - 1, n * (2 * distance) ** 2)) - power

    return float(scipy.optimize.brentq(excess, 0.0, 1.0)) if excess(1.0) > 0 else np.inf


def within_chance(deviations: ArrayLike, false_alarm: float) -> bool:
    """Whether deviations in standard errors are within chance; `false_alarm` is the rate for all of
    them together.

    >>> within_chance([0.3, -2.1], 1e-6), within_chance([0.3, -7.5], 1e-6)
    (True, False)
    """
    return p_of_all(deviations) > false_alarm


def p_of_all(deviations: ArrayLike) -> float:
    """The p-value of deviations in standard errors, for all of them together: the smallest of n,
    times n (Bonferroni).

    >>> round(p_of_all([0.3, -2.1]), 4), p_of_all([0.3, -0.2])
    (0.0715, 1.0)
    """
    sizes = np.abs(np.atleast_1d(np.asarray(deviations, dtype=np.float64)))
    return float(min(1, 2 * sizes.size * scipy.stats.norm.sf(sizes.max())))


def below(error: float) -> float:
    """The first of `BOUNDS` that exceeds |`error`|, or infinity.

    Rounding errors differ between processors, so results state this bound instead of the error.

    >>> below(3e-16), below(2e-6), below(0.5), below(float("nan"))
    (1e-12, 0.0001, inf, inf)
    """
    return next((bound for bound in BOUNDS if abs(error) < bound), float("inf"))
