"""Estimates from what was measured: always with an interval and its n.

Tokens of one text depend on each other, so intervals over text resample whole rows, not tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Array = NDArray[np.float64]


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
    interval = stats.binomtest(int(successes), int(n)).proportion_ci(level, method="wilson")
    return Estimate(successes / n, interval.low, interval.high, int(n))


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
    generator = np.random.default_rng(seed)
    chosen = generator.integers(len(top), size=(resamples, len(top)))
    ratios = top[chosen].sum(axis=1) / bottom[chosen].sum(axis=1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Estimate(float(top.sum() / bottom.sum()), float(low), float(high), int(bottom.sum()))


class Fit(NamedTuple):
    """A goodness-of-fit test: the statistic, its p-value, and how far apart the two laws are."""

    statistic: float
    p_value: float
    total_variation: float
    n: int


def goodness_of_fit(counts: ArrayLike, law: ArrayLike, fitted: int = 0) -> Fit:
    """Pearson's test of observed `counts` `(k,)` against `law` `(k,)`; `fitted` parameters came from the counts.

    Cells that expect fewer than 5 are taken together. A count where the law is zero has p-value 0.
    """
    observed, law = np.asarray(counts, dtype=np.float64).ravel(), np.asarray(law, dtype=np.float64).ravel()
    n = observed.sum()
    distance = float(np.abs(observed / n - law).sum() / 2)
    if (observed[law == 0] > 0).any():
        return Fit(np.inf, 0.0, distance, int(n))
    rare = law * n < 5
    cells_o = np.append(observed[~rare], observed[rare].sum())
    cells_e = np.append(law[~rare] * n, law[rare].sum() * n)
    cells_o, cells_e = cells_o[cells_e > 0], cells_e[cells_e > 0]
    statistic = float(((cells_o - cells_e) ** 2 / cells_e).sum())
    freedom = len(cells_e) - 1 - fitted
    return Fit(statistic, float(stats.chi2.sf(statistic, max(freedom, 1))), distance, int(n))


def detectable_total_variation(cells: int, n: int, false_alarm: float, power: float = 0.99) -> float:
    """The smallest total variation that `goodness_of_fit` finds with `power` at that rate of false alarms.

    For the deviation that a chi-square test sees least: spread evenly over `cells` equally likely cells,
    where the noncentrality is n (2 TV)^2.
    """
    threshold = stats.chi2.isf(false_alarm, cells - 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        found = stats.ncx2.sf(threshold, cells - 1, n * (2 * middle) ** 2) >= power
        low, high = (low, middle) if found else (middle, high)
    return high


def autocorrelation(rows: list[Array], lags: int) -> Array:
    """The autocorrelation `(lags,)` at lags 1 to `lags` of several series about their common mean."""
    mean = np.concatenate(rows).mean()
    centred = [row - mean for row in rows]
    variance = np.concatenate(centred).var()
    products = [[row[lag:] * row[:-lag] for row in centred if len(row) > lag] for lag in range(1, lags + 1)]
    return np.array([np.concatenate(pairs).mean() / variance for pairs in products])
