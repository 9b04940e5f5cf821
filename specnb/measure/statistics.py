"""Estimates from what was measured: always with an interval and its n.

Tokens of one text depend on each other, so intervals over text resample whole rows, not tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.optimize import brentq

Array = NDArray[np.float64]

MIN_EXPECTED = 25.0
"""Cells that expect less are taken together. Two cells tested at 1e-6 then raise a false alarm at 7e-6;
with the textbook's 5 it would be at 7e-5."""

BOUNDS = (1e-12, 1e-4)
"""What rounding stays below by far, in float64 and in float32."""


class Estimate(NamedTuple):
    """A value, its 95% interval and the number of observations behind it."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}] (n = {self.n:,})"


def proportion(successes: int, n: int, level: float = 0.95) -> Estimate:
    """A share of independent trials with its Wilson interval. Raises `ValueError` unless 0 <= successes <= n, n > 0."""
    if not 0 <= successes <= n or n == 0:
        raise ValueError(f"{successes} successes in {n} trials: there must be 0 to n successes and at least 1 trial")
    wilson = stats.binomtest(int(successes), int(n)).proportion_ci(level, method="wilson")
    return Estimate(successes / n, wilson.low, wilson.high, int(n))


def bootstrap_indices(rows: int, resamples: int, seed: int) -> NDArray[np.int64]:
    """Indices `(resamples, rows)` of rows drawn with replacement: one bootstrap sample in each line."""
    return np.random.default_rng(seed).integers(rows, size=(resamples, rows))


def interval(values: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """The two numbers between which the middle `level` of the bootstrapped `values` lies."""
    low, high = np.quantile(np.asarray(values, dtype=np.float64), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def ratio_of_sums(
    numerators: ArrayLike, denominators: ArrayLike, level: float = 0.95, resamples: int = 4000, seed: int = 0
) -> Estimate:
    """sum(numerators) / sum(denominators) over independent rows, with a bootstrap interval over rows.

    The mean of something over all tokens of several texts: one entry per text, its sum and its count.
    n is the sum of the denominators. Raises `ValueError` for fewer than 8 rows, too few to resample.
    """
    top, bottom = np.asarray(numerators, dtype=np.float64), np.asarray(denominators, dtype=np.float64)
    if top.shape != bottom.shape or top.ndim != 1 or len(top) < 8:
        raise ValueError(f"need two equally long rows of at least 8 numbers, got shapes {top.shape} and {bottom.shape}")
    chosen = bootstrap_indices(len(top), resamples, seed)
    ratios = top[chosen].sum(axis=1) / bottom[chosen].sum(axis=1)
    return Estimate(float(top.sum() / bottom.sum()), *interval(ratios, level), int(bottom.sum()))


def over_rows(
    statistic: Callable[[NDArray[np.int64]], float],
    rows: int,
    level: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
) -> Estimate:
    """Any number made of several texts, with a bootstrap interval over rows.

    `statistic` is given the indices of the rows to use, some of them more than once, and returns the
    number; so differences between two numbers from the same texts keep what these have in common.
    n is the number of rows. Raises `ValueError` for fewer than 8, too few to resample.
    """
    if rows < 8:
        raise ValueError(f"{rows} rows are too few to resample; need at least 8")
    values = [float(statistic(pick)) for pick in bootstrap_indices(rows, resamples, seed)]
    return Estimate(float(statistic(np.arange(rows))), *interval(values, level), rows)


class Fit(NamedTuple):
    """A goodness-of-fit test: the statistic, its p-value, and how far apart the two distributions are."""

    statistic: float
    p_value: float
    total_variation: float
    n: int


def goodness_of_fit(counts: ArrayLike, probs: ArrayLike, fitted: int = 0) -> Fit:
    """Pearson's test of observed `counts` `(k,)` against `distribution` `(k,)`; `fitted` parameters came from the counts.

    Rare cells are taken together until they expect at least `LEAST_EXPECTED`. A count where the distribution is
    zero has p-value 0. Raises `ValueError` for different lengths, no counts, and a distribution that does not sum to 1.
    """
    observed, probs = np.asarray(counts, dtype=np.float64).ravel(), np.asarray(probs, dtype=np.float64).ravel()
    n = observed.sum()
    if observed.shape != probs.shape or n == 0 or not abs(probs.sum() - 1) < 1e-4:
        counted, lawful = (
            f"{len(observed)} counts of sum {n:g}",
            f"a distribution of {len(probs)} that sums to {probs.sum():g}",
        )
        raise ValueError(f"{counted} cannot be tested against {lawful}")
    distance = float(np.abs(observed / n - probs).sum() / 2)
    if (observed[probs == 0] > 0).any():
        return Fit(np.inf, 0.0, distance, int(n))
    cells_o, cells_e = _without_rare_cells(observed, probs * n)
    statistic = float(((cells_o - cells_e) ** 2 / cells_e).sum())
    freedom = len(cells_e) - 1 - fitted
    return Fit(statistic, float(stats.chi2.sf(statistic, max(freedom, 1))), distance, int(n))


def _without_rare_cells(observed: Array, expected: Array) -> tuple[Array, Array]:
    """Both from the rarest cell on, neighbours added up until each sum expects enough."""
    order = np.argsort(expected, kind="stable")
    observed, expected = observed[order], expected[order]
    starts, merge_rows = [0], 0.0
    for cell, expects in enumerate(expected):
        if merge_rows >= MIN_EXPECTED:
            starts.append(cell)
            merge_rows = 0.0
        merge_rows += expects
    if merge_rows < MIN_EXPECTED and len(starts) > 1:
        starts.pop()
    return np.add.reduceat(observed, starts), np.add.reduceat(expected, starts)


def detectable_total_variation(cells: int, n: int, false_alarm: float, power: float = 0.99) -> float:
    """The smallest total variation that `goodness_of_fit` finds with `power` at that rate of false alarms.

    For the deviation that a chi-square test sees least: every cell off by the same share of itself, where
    the noncentrality is n (2 TV)^2; `cells` are those that remain when rare ones are taken together. inf if
    `n` is too small to find even a total variation of 1. Raises `ValueError` for fewer than 2 cells, n < 1,
    rates outside (0, 1) and power <= false_alarm.
    """
    if cells < 2 or n < 1 or not 0 < false_alarm < power < 1:
        raise ValueError(f"no test has {cells} cells, n = {n}, false alarms {false_alarm} and power {power}")
    threshold = stats.chi2.isf(false_alarm, cells - 1)

    def excess(distance: float) -> float:
        return float(stats.ncx2.sf(threshold, cells - 1, n * (2 * distance) ** 2)) - power

    return float(brentq(excess, 0.0, 1.0)) if excess(1.0) > 0 else np.inf


def below(error: float) -> float:
    """The first of `BOUNDS` that `error` lies below, or infinity.

    The rounding errors of a sum are others on every processor, so results quote this bound instead of them.

    >>> below(3e-16), below(2e-6), below(0.5), below(float("nan"))
    (1e-12, 0.0001, inf, inf)
    """
    return next((bound for bound in BOUNDS if abs(error) < bound), float("inf"))


def autocorrelation(rows: list[Array], lags: int) -> Array:
    """The autocorrelation `(lags,)` at lags 1 to `lags` of several series about their common mean."""
    mean = np.concatenate(rows).mean()
    centred = [row - mean for row in rows]
    variance = np.concatenate(centred).var()
    products = [[row[lag:] * row[:-lag] for row in centred if len(row) > lag] for lag in range(1, lags + 1)]
    return np.array([np.concatenate(pairs).mean() / variance for pairs in products])


def ratio_of_medians(top: ArrayLike, bottom: ArrayLike, resamples: int = 2000, seed: int = 0) -> Estimate:
    """median(top) / median(bottom) of times taken in the same repetitions; the interval resamples those.

    n is the number of repetitions. Raises `ValueError` for unequal lengths or fewer than 3 repetitions.
    """
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    if top.shape != bottom.shape or top.ndim != 1 or len(top) < 3:
        raise ValueError(f"need two equally long rows of at least 3 times, got shapes {top.shape} and {bottom.shape}")
    chosen = bootstrap_indices(len(top), resamples, seed)
    ratios = np.median(top[chosen], axis=1) / np.median(bottom[chosen], axis=1)
    return Estimate(float(np.median(top) / np.median(bottom)), *interval(ratios), len(top))
