"""Evidence against a distribution that may be looked at after every token: many bets, one wealth.

A bet turns each token into a factor whose expectation under p, given all before, is at most 1. The
wealth of whoever started with 1 and bets on is then a nonnegative supermartingale, an average of such
wealths with weights fixed beforehand is one too, and by Ville's inequality it ever reaches 1/delta with
probability at most delta: whatever the vocabulary, the distributions, and the moment one stops.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

Array = NDArray[np.float64]

STRENGTHS = (0.9, 0.5, 0.2, 0.06, 0.02)
"""Shares of the wealth that are put on a bet; the rest is kept. A bug that shows in one of 50 tokens
wants 0.02, one that shows in all of them 0.9."""
ALWAYS = 0.5  # the weight of betting at every token; the rest is for betting at some places only
CHUNK = 64


class Evidence:
    """The wealth of all bets: `kinds` names the kind of each of K bets, `places` counts the sets of tokens
    at which alone they are placed as well. Every kind has the same weight, every bet of a kind too."""

    def __init__(self, kinds: list[str], places: int) -> None:
        self.names = sorted(set(kinds), key=kinds.index)
        index = np.array([self.names.index(kind) for kind in kinds])
        self.order = np.argsort(index, kind="stable")  # bets of one kind stand side by side
        self.kind_of = index[self.order]
        self.places = places
        self.starts = np.searchsorted(self.kind_of, np.arange(len(self.names)))
        bets_of_kind = np.bincount(index)[self.kind_of]
        share = np.array([1.0] if places == 0 else [ALWAYS, *[(1 - ALWAYS) / places] * places])
        weight = share[:, None, None] / (bets_of_kind * len(STRENGTHS)) * np.ones((len(STRENGTHS), 1))
        self.log_weight = np.log(weight)  # (1 + places, strengths, K)
        self.log_wealth = self.log_weight.copy()
        self.n = 0
        self.moments = Moments(len(kinds))

    def add(self, ratios: Array, masks: NDArray[np.bool_]) -> Array:
        """Bets on n tokens: `ratios` `(n, K)` are r(x)/p(x), `masks` `(n, places)` says where each set of
        tokens is. Returns the natural logarithm of the evidence of each kind `(n, kinds)` after each token."""
        parts = [
            self._chunk(ratios[at : at + CHUNK, self.order], masks[at : at + CHUNK])
            for at in range(0, len(ratios), CHUNK)
        ]
        self.n += len(ratios)
        return np.concatenate(parts) if parts else np.empty((0, len(self.names)))

    def _chunk(self, ratios: Array, masks: NDArray[np.bool_]) -> Array:
        gains = np.log1p(np.array(STRENGTHS)[:, None] * (ratios[:, None] - 1))  # (n, strengths, K)
        self.moments.add(ratios, gains)
        where = np.concatenate([np.ones((len(masks), 1)), masks], axis=1)
        wealth = gains[:, None] * where[..., None, None]
        for now in wealth:  # a loop over tokens is faster than cumsum along them
            now += self.log_wealth
            self.log_wealth = now
        self.log_wealth = self.log_wealth.copy()
        largest = np.maximum.reduceat(wealth.max(axis=(1, 2)), self.starts, axis=-1)
        wealth -= largest[:, self.kind_of][:, None, None]
        scaled = np.exp(wealth, dtype=np.float32, casting="same_kind")
        return largest + np.log(np.add.reduceat(scaled.sum(axis=(1, 2)), self.starts, axis=-1))

    def detectable(self, delta: float, power: float = 0.9) -> dict[str, float]:
        """For each kind the total variation per token that would have been found in this text with `power`.

        For samplers with the distribution (1 - e) p + e r, r one of the kind's alternatives: each such sampler that is
        at least that far from p would have crossed 1/delta by the end. NaN where not even e = 1 would.
        It takes the text for drawn from p, and the sum of the log factors for normal.
        """
        price = -np.log(delta) - self.log_weight[0] + np.log(len(self.names))
        found = self.moments.detectable(price, power)
        result = {}
        for kind, name in enumerate(self.names):
            distances, certain = (values[self.kind_of == kind] for values in found)
            result[name] = float(distances.max()) if certain.any() else float("nan")
        return result


def total(kinds: Array) -> Array:
    """The logarithm of the average over the last axis of evidences given as logarithms."""
    largest = kinds.max(axis=-1)
    return largest + np.log(np.exp(kinds - largest[..., None]).mean(axis=-1))


class Moments:
    """What detection needs to know of each bet: its mean log factor and the square of it, under p and,
    weighted by r/p, under r; and the total variation between the two."""

    def __init__(self, bets: int) -> None:
        shape = (len(STRENGTHS), bets)
        self.n = 0
        self.distance = np.zeros(bets)
        self.mass = np.zeros(bets)
        self.under_p = np.zeros((2, *shape))
        self.under_r = np.zeros((2, *shape))

    def add(self, ratios: Array, gains: Array) -> None:
        """`ratios` `(n, K)` and their log factors `(n, strengths, K)`."""
        self.n += len(ratios)
        self.mass += ratios.sum(axis=0)
        self.distance += np.maximum(0, 1 - ratios).sum(axis=0)
        self.under_p += np.stack([gains.sum(axis=0), np.einsum("nsk,nsk->sk", gains, gains)])
        weighted = ratios[:, None] * gains
        self.under_r += np.stack([weighted.sum(axis=0), np.einsum("nsk,nsk->sk", weighted, gains)])

    def detectable(self, price: Array, power: float) -> tuple[Array, NDArray[np.bool_]]:
        """Of each bet the total variation found with `power` when log wealth must pass `price` `(strengths, K)`,
        and whether r itself (e = 1) is found; where it is not, the total variation is that of r."""
        n = max(self.n, 1)
        distance = self.distance / n
        p = self.under_p / n
        r = self.under_r / np.maximum(self.mass, 1e-300)
        quantile = norm.isf(power)  # negative: the unlucky texts

        def excess(share: float, bet: int) -> float:
            mean, square = (1 - share) * p[..., bet] + share * r[..., bet]
            spread = np.sqrt(np.maximum(square - mean**2, 0) * n)
            return float((n * mean + quantile * spread - price[:, bet]).max())

        shares = np.ones(len(distance))
        found = np.array([distance[bet] > 0 and excess(1.0, bet) > 0 for bet in range(len(distance))])
        for bet in np.flatnonzero(found).tolist():
            shares[bet] = brentq(excess, 0.0, 1.0, args=(bet,)) if excess(0.0, bet) < 0 else 0.0
        return shares * distance, found
