"""How far a sampler is from p: what the best of many witnesses sees of the total variation.

A witness is a set of tokens (or a share of each) chosen before the token is seen. How much more often
the sampler hits it than p does, its *excess*, is at most the total variation between the two distributions. At
each token we follow the witness that did best so far, which is itself a witness, so its mean excess
estimates, without any bias of selection, a lower bound on the mean total variation at the visited
prefixes. Nothing bounds that from above: no witness may see what is wrong.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specnb.measure.statistics import Estimate

Array = NDArray[np.float64]

RATES = 2.0 ** -np.arange(1, 12)


class DistanceEstimate:
    """Follows the best of J witnesses. `add` takes the excess of each at each token."""

    def __init__(self) -> None:
        self.sums: Array | float = 0.0
        self.total = 0.0
        self.squares = 0.0
        self.n = 0

    def add(self, excess: Array) -> Array:
        """`excess` `(n, J)`: hit or not (a share of it), minus the chance of it under p. Returns that of the
        witness followed, `(n,)`."""
        so_far = self.sums + np.cumsum(excess, axis=0) - excess
        followed = np.take_along_axis(excess, so_far.argmax(axis=1)[:, None], axis=1)[:, 0]
        self.sums = self.sums + excess.sum(axis=0)
        self.total += float(followed.sum())
        self.squares += float((followed**2).sum())
        self.n += len(followed)
        return followed

    def estimate(self, level: float = 0.95) -> Estimate:
        """The mean excess, clipped at 0, with an interval that holds at any time one stops, and n tokens.

        `low` bounds the mean total variation per token from below with confidence (1 + level) / 2; `high`
        bounds what the followed witnesses see, not the total variation.

        For a witness f in [0, 1], its mean under the sampler and the deviation d = f - E_p f,
        exp(rate (f - mean) + (log(1 - rate) + rate) d^2) has expectation at most 1 (Fan, Grama and Liu 2015); one
        of several rates may be chosen for the price of their number.
        """
        if self.n == 0:
            return Estimate(0.0, 0.0, 1.0, 0)
        price = np.log(2 * len(RATES) / (1 - level))
        width = float((((-np.log1p(-RATES) - RATES) * self.squares + price) / RATES).min()) / self.n
        mean = self.total / self.n
        value, low, high = np.clip([mean, mean - width, mean + width], 0.0, 1.0).tolist()
        return Estimate(value, low, high, self.n)
