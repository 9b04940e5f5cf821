"""Estimates with intervals, goodness-of-fit tests, and interleaved timing.

Bootstrap intervals resample whole sequences, whose tokens are not independent. What is timed runs
in turn, in a new random order in each round.
"""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import scipy  # its parts, which take a second, are imported when first used
import torch
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Clock = Callable[[], float]
T = TypeVar("T")

# `goodness_of_fit` merges cells that expect fewer counts: at level 1e-6 two cells have a false-alarm
# rate of 7e-6, and with the usual 5 it would be 7e-5
MIN_EXPECTED = 25.0

LEVEL = 0.95  # of every interval
BOUNDS = (1e-12, 1e-4)  # upper bounds of accumulated rounding errors, in float64 and in float32, with a wide margin


class Estimate(NamedTuple):
    """A value, its 95% interval and the number of observations.

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


def proportion(successes: int, n: int) -> Estimate:
    """The proportion of successes in independent trials, with its Wilson interval.

    >>> print(proportion(9, 10))
    0.90 [0.60, 0.98] (n = 10)
    """
    wilson = scipy.stats.binomtest(int(successes), int(n)).proportion_ci(LEVEL, method="wilson")
    return Estimate(successes / n, wilson.low, wilson.high, int(n))


def bootstrap_indices(rows: int, resamples: int, seed: int) -> Indices:
    return np.random.default_rng(seed).integers(rows, size=(resamples, rows))


def interval(values: ArrayLike) -> tuple[float, float]:
    """The percentile interval of bootstrapped `values`."""
    low, high = np.quantile(np.asarray(values, dtype=np.float64), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


# The intervals of `scipy.stats.bootstrap` differ in the last bit, which would change committed tables,
# and take two to three times as long.
def bootstrap(statistic: Callable[[Indices], ArrayLike], rows: int, resamples: int, seed: int) -> Estimate:
    """`statistic`, from row indices `(..., rows)` to values `(...)`, with a percentile interval over rows.

    Of few rows it is too narrow: for the mean of normal values it covers 91% with 12 rows, and 87% with 6.
    """
    value = np.asarray(statistic(np.arange(rows)), dtype=np.float64)
    return Estimate(float(value), *interval(statistic(bootstrap_indices(rows, resamples, seed))), rows)


def ratio_of_sums(
    numerators: ArrayLike, denominators: ArrayLike, resamples: int = 4000, seed: int = 0, least: int = 8
) -> Estimate:
    """sum(numerators) / sum(denominators), with a bootstrap interval over at least `least` independent rows.

    n is the sum of the denominators.

    >>> ratio_of_sums([3] * 8, [4] * 8)
    Estimate(value=0.75, low=0.75, high=0.75, n=32)
    """
    top, bottom = _equally_long(numerators, denominators, least)
    ratio = bootstrap(lambda rows: top[rows].sum(axis=-1) / bottom[rows].sum(axis=-1), len(top), resamples, seed)
    return ratio._replace(n=int(bottom.sum()))


def ratio_of_medians(top: ArrayLike, bottom: ArrayLike) -> Estimate:
    """median(top) / median(bottom) of times `(repetitions,)`, both resampled together."""
    top, bottom = _equally_long(top, bottom, 3)
    medians = partial(np.median, axis=-1)
    return bootstrap(lambda rows: medians(top[rows]) / medians(bottom[rows]), len(top), 2000, 0)


def _equally_long(top: ArrayLike, bottom: ArrayLike, least: int) -> tuple[Array, Array]:
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    if top.shape != bottom.shape or top.ndim != 1 or len(top) < least:
        raise ValueError(f"{top.shape} and {bottom.shape} numbers; need two equally long rows of at least {least}")
    return top, bottom


def over_rows(statistic: Callable[[Indices], float], rows: int, resamples: int = 1000, seed: int = 0) -> Estimate:
    """`statistic`, from indices of rows to a number, of all rows, with a bootstrap interval over at least 8."""
    if rows < 8:
        raise ValueError(f"{rows} rows are too few to resample; need at least 8")

    def each(chosen: Indices) -> ArrayLike:
        return statistic(chosen) if chosen.ndim == 1 else [float(statistic(one)) for one in chosen]

    return bootstrap(each, rows, resamples, seed)


class Fit(NamedTuple):
    """A goodness-of-fit test: statistic, p-value, observed total variation, and number of counts."""

    statistic: float
    p_value: float
    total_variation: float
    n: int


def goodness_of_fit(counts: ArrayLike, probs: ArrayLike, fitted: int = 0) -> Fit:
    """Pearson's chi-square test of `counts` `(k,)` against `probs` `(k,)`, after merging rare cells.

    `fitted` parameters of `probs` were estimated from the counts. A count where `probs` is 0 has
    p-value 0.

    >>> goodness_of_fit([50, 50], [0.5, 0.5])
    Fit(statistic=0.0, p_value=1.0, total_variation=0.0, n=100)
    """
    observed, probs = np.asarray(counts, dtype=np.float64).ravel(), np.asarray(probs, dtype=np.float64).ravel()
    n = observed.sum()
    if (
        observed.shape != probs.shape
        or n == 0
        or not abs(probs.sum() - 1) < 1e-4
        or np.minimum(observed, probs).min() < 0
    ):
        raise ValueError(
            f"{len(observed)} counts of sum {n:g}, but {len(probs)} probs of sum {probs.sum():g}, or below 0"
        )
    distance = float(np.abs(observed / n - probs).sum() / 2)
    if (observed[probs == 0] > 0).any():
        return Fit(np.inf, 0.0, distance, int(n))
    merged = merged_cells(probs * n)
    # Weighted counts are floats already, which the stub of numpy does not know.
    cells_o, cells_e = (np.bincount(merged, weights=cells).astype(np.float64) for cells in (observed, probs * n))
    statistic = float(((cells_o - cells_e) ** 2 / cells_e).sum())
    freedom = len(cells_e) - 1 - fitted
    return Fit(statistic, float(scipy.stats.chi2.sf(statistic, max(freedom, 1))), distance, int(n))


def merged_cells(expected: Array) -> Indices:
    """The number of the merged cell of each cell: rare ones first, until each expects `MIN_EXPECTED`."""
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
    """The smallest total variation that `goodness_of_fit` detects with probability `power`; inf if there is none.

    For the deviation that is hardest to detect: all merged `cells` off by the same relative amount.

    >>> round(detectable_total_variation(cells=10, n=100_000, false_alarm=1e-6), 4)
    0.0134
    """
    threshold = scipy.stats.chi2.isf(false_alarm, cells - 1)

    def excess(distance: float) -> float:
        return float(scipy.stats.ncx2.sf(threshold, cells - 1, n * (2 * distance) ** 2)) - power

    return float(scipy.optimize.brentq(excess, 0.0, 1.0)) if excess(1.0) > 0 else np.inf


def p_of_all(deviations: ArrayLike) -> float:
    """The p-value of several deviations in standard errors together (Bonferroni); NaN if one is."""
    sizes = np.abs(np.atleast_1d(np.asarray(deviations, dtype=np.float64)))
    return float(np.minimum(1, 2 * sizes.size * scipy.stats.norm.sf(sizes.max())))


def below(error: float) -> float:
    """The first of `BOUNDS` above |error|; results state it, because errors differ between processors."""
    return next((bound for bound in BOUNDS if abs(error) < bound), float("inf"))


class Job(NamedTuple):
    """What is timed: `run`, `times` times in a row, after the functions `before`."""

    run: Callable[[], Any]
    before: Sequence[Callable[[], Any]] = ()
    times: int = 1


def run_round(functions: Sequence[Callable[[], T]], order: np.random.Generator) -> list[T]:
    """What each function returns, in the order given; they are called in a random order."""
    returned = {at: functions[at]() for at in order.permutation(len(functions)).tolist()}
    return [returned[at] for at in range(len(functions))]


def time_round(jobs: Sequence[Job], clock: Clock, order: np.random.Generator) -> Array:
    def seconds(job: Job) -> float:
        for function in job.before:
            function()
        started = clock()
        for _ in range(job.times):
            job.run()
        return (clock() - started) / job.times

    return np.array(run_round([partial(seconds, job) for job in jobs], order))


def machine(device: torch.device = torch.device("cpu")) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    listed = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    names = re.findall(r"^model name\s*: (.*)$", listed, re.MULTILINE)
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def measured_on(dtype: torch.dtype, device: torch.device = torch.device("cpu")) -> str:
    """The conditions to state beside a speed: machine, threads, version of torch, dtype."""
    threads = torch.get_num_threads()
    name = str(dtype).removeprefix("torch.")
    return f"{machine(device)}; {threads} thread{'s' * (threads != 1)}; torch {torch.__version__}; {name}"
