"""A lower bound on the total variation per token between a sampler and p, by test functions.

A test function f maps tokens to [0, 1] and is chosen before the token is seen. Its deviation f(x) - E_p f has, under
the sampler, a mean of at most the total variation. At each token we use the test function with the largest sum of
deviations so far; that choice is itself a test function, so there is no selection bias. Nothing here bounds the total
variation from above: the test functions tried may all miss the deviation.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specnb.measure.statistics import Estimate

Array = NDArray[np.float64]

RATES = 2.0 ** -np.arange(1, 12)


class TotalVariationEstimate:
    """The mean deviation of the best of J test functions; `add` takes their deviations at each token.

    >>> estimate = TotalVariationEstimate()
    >>> estimate.add(np.array([[0.2, -0.2]] * 100)).tolist()[:2]
    [0.2, 0.2]
    >>> round(estimate.estimate().value, 3)
    0.2
    """

    def __init__(self) -> None:
        self.sums: Array | float = 0.0
        self.total = 0.0
        self.squares = 0.0
        self.n = 0

    def add(self, deviations: Array) -> Array:
        """The deviation `(n,)` of the test function in use at each token.

        `deviations` `(n, J)` are f(x) - E_p f of each test function.
        """
        so_far = self.sums + np.cumsum(deviations, axis=0) - deviations
        chosen = np.take_along_axis(deviations, so_far.argmax(axis=1)[:, None], axis=1)[:, 0]
        self.sums = self.sums + deviations.sum(axis=0)
        self.total += float(chosen.sum())
        self.squares += float((chosen**2).sum())
        self.n += len(chosen)
        return chosen

    def estimate(self, level: float = 0.95) -> Estimate:
        """The mean deviation, clipped at 0, over n tokens, with an interval that is valid at any stopping time.

        `low` bounds the mean total variation per token from below with confidence (1 + level) / 2; `high` bounds the
        mean deviation of the test functions used, not the total variation.

        For a test function f, its mean under the sampler and the deviation d = f - E_p f,
        exp(rate (f - mean) + (log(1 - rate) + rate) d^2) has expectation at most 1 (Fan, Grama and Liu 2015); taking
        the best of several rates is a union bound over them.
        """
        if self.n == 0:
            return Estimate(0.0, 0.0, 1.0, 0)
        threshold = np.log(2 * len(RATES) / (1 - level))
        width = float((((-np.log1p(-RATES) - RATES) * self.squares + threshold) / RATES).min()) / self.n
        mean = self.total / self.n
        value, low, high = np.clip([mean, mean - width, mean + width], 0.0, 1.0).tolist()
        return Estimate(value, low, high, self.n)
