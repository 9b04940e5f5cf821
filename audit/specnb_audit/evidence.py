"""Test martingales: evidence against p that may be looked at after every token.

A bet turns each token x into the factor 1 + s (r(x)/p(x) - 1), whose expectation under p, given all
tokens before, is at most 1. The running product of such factors is a nonnegative supermartingale
that starts at 1 (a *test martingale*), and so is an average of several with weights fixed
beforehand. By Ville's inequality this *e-value* ever reaches 1/delta with probability at most
delta.

`TotalVariationEstimate` bounds the total variation per token between sampler and p from below. A
test function maps tokens to [0, 1]; under the sampler the deviation f(x) - E_p f has a mean of at
most the total variation. At each token the function with the largest sum of deviations so far is
used, which is itself a test function, so there is no selection bias. Nothing here bounds the total
variation from above.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.stats import norm

from specnb.statistics import Estimate

Array = NDArray[np.float64]

STRENGTHS = (0.9, 0.5, 0.2, 0.06, 0.02)
"""Fractions s of the martingale that are staked on a bet. A bug that affects one token in 50 is
found fastest with 0.02, one that affects every token with 0.9."""
# Weight of the bets on every token; the rest goes to bets on subsets of the tokens.
ALL_TOKENS_WEIGHT = 0.5
CHUNK = 64
BEYOND = 2.0
RATES = 2.0 ** -np.arange(1, 12)


class Evidence:
    """The test martingales of K bets.

    `alternatives` names the alternative of each bet. A bet is made on every token, and again on
    each of `subsets` subsets alone. All alternatives have one weight, and so have all bets of one.
    """

    def __init__(self, alternatives: list[str], subsets: int) -> None:
        self.names = sorted(set(alternatives), key=alternatives.index)
        index = np.array([self.names.index(name) for name in alternatives])
        # Puts the bets of one alternative side by side.
        self.order = np.argsort(index, kind="stable")
        self.alternative_of = index[self.order]
        self.subsets = subsets
        self.starts = np.searchsorted(self.alternative_of, np.arange(len(self.names)))
        bets_per_alternative = np.bincount(index)[self.alternative_of]
        fractions = [ALL_TOKENS_WEIGHT, *[(1 - ALL_TOKENS_WEIGHT) / subsets] * subsets] if subsets else [1.0]
        weight = np.array(fractions)[:, None, None] / (bets_per_alternative * len(STRENGTHS))
        # (1 + subsets, strengths, K).
        self.log_weight = np.log(weight * np.ones((len(STRENGTHS), 1)))
        self.log_martingale = self.log_weight.copy()
        self.moments = Moments(len(alternatives))

    def add(self, ratios: Array, masks: NDArray[np.bool_]) -> Array:
        """The natural logarithm of each alternative's e-value `(n, alternatives)` after each of n
        tokens.

        `ratios` `(n, K)` are r(x)/p(x) at the tokens, `masks` `(n, subsets)` their subsets.
        """
        parts = [
            self._chunk(ratios[start : start + CHUNK, self.order], masks[start : start + CHUNK])
            for start in range(0, len(ratios), CHUNK)
        ]
        return np.concatenate(parts)

    def _chunk(self, ratios: Array, masks: NDArray[np.bool_]) -> Array:
        gains = np.log1p(np.array(STRENGTHS)[:, None] * (ratios[:, None] - 1))  # (n, strengths, K)
        self.moments.add(ratios, gains)
        included = np.concatenate([np.ones((len(masks), 1)), masks], axis=1)
        logs = gains[:, None] * included[..., None, None]
        for now in logs:  # a loop over tokens is faster than cumsum along them
            now += self.log_martingale
            self.log_martingale = now
        self.log_martingale = self.log_martingale.copy()
        largest = np.maximum.reduceat(logs.max(axis=(1, 2)), self.starts, axis=-1)
        logs -= largest[:, self.alternative_of][:, None, None]
        scaled = np.exp(logs, dtype=np.float32, casting="same_kind")
        return largest + np.log(np.add.reduceat(scaled.sum(axis=(1, 2)), self.starts, axis=-1))

    def detectable(self, needed: float, power: float = 0.9) -> dict[str, float]:
        """For each alternative, the total variation per token from which on it would have been
        detected with `power`; `needed` is the logarithm of the e-value that rejects.

        It is about samplers with the distribution (1 - e) p + e r, e the same at every token: each
        such sampler at least that far from p would have passed it by the last token. NaN where
        none would. The tokens seen are taken to be from p, and the sum of the log factors to be
        normal.
        """
        threshold = needed - self.log_weight[0] + np.log(len(self.names))
        shares, distances = self.moments.detectable(threshold, power)
        result = {}
        for number, name in enumerate(self.names):
            share, distance = (values[self.alternative_of == number] for values in (shares, distances))
            known = ~np.isnan(share)
            figure = (share * distance)[known].max(initial=0.0)
            # A distribution that is not detected counts unless it is nearer to p than the figure
            # anyway. Beyond a total variation of 1 there is no distribution.
            is_figure = (share <= 1).any() and distance[~known].max(initial=0.0) <= figure <= 1
            result[name] = float(figure) if is_figure else float("nan")
        return result


def log_mean(logs: Array) -> Array:
    """The logarithm of the mean over the last axis of numbers given as logarithms."""
    largest = logs.max(axis=-1)
    return largest + np.log(np.exp(logs - largest[..., None]).mean(axis=-1))  # type: ignore[no-any-return]


class Moments:
    """Moments of each bet's log factor g under p and, weighted by r/p, under r; and TV(p, r)."""

    def __init__(self, bets: int) -> None:
        self.n = 0
        self.distance = np.zeros(bets)
        self.ratio = np.zeros((2, bets))  # sums of x = r/p - 1, and of its square
        # Of (r/p)^i g^j, i = 0, 1, 2 and j = 1, 2.
        self.sums = np.zeros((3, 2, len(STRENGTHS), bets))

    def add(self, ratios: Array, gains: Array) -> None:
        """Add n tokens: `ratios` `(n, K)` and their log factors `(n, strengths, K)`."""
        self.n += len(ratios)
        self.distance += np.maximum(0, 1 - ratios).sum(axis=0)
        self.ratio += np.stack([(ratios - 1).sum(axis=0), ((ratios - 1) ** 2).sum(axis=0)])
        for order in range(3):
            weighted = ratios[:, None] ** order * gains
            self.sums[order] += np.stack([weighted.sum(axis=0), np.einsum("nsk,nsk->sk", weighted, gains)])

    def detectable(self, threshold: Array, power: float) -> tuple[Array, Array]:
        """For each bet the share e of r in (1 - e) p + e r that is detected with `power`, and TV(p,
        r).

        Detected means that the log martingale passes `threshold` `(strengths, K)`. Shares up to
        `BEYOND` stand for distributions farther out in the direction of r. By chance the tokens
        seen may favour r, so the means are corrected by regression on x = r/p - 1, whose mean under
        p is 0, and the remaining error counts as spread.
        """
        n = max(self.n, 1)
        distance = self.distance / n
        (mean_x, mean_xx), sums = self.ratio / n, self.sums / n
        variance_x = np.maximum(mean_xx - mean_x**2, 0)
        varies = variance_x > 1e-12 * mean_xx
        corrected, error = [], []
        for order in range(2):  # of g under p, and of g r/p under p, which is g under r
            mean, square = sums[order, 0], sums[2 * order, 1]
            covariance = sums[order + 1, 0] - mean - mean * mean_x
            slope = np.where(varies, covariance, 0.0) / np.where(varies, variance_x, 1.0)
            corrected.append(mean - slope * mean_x)
            error.append(np.sqrt(np.maximum(square - mean**2 - slope**2 * variance_x, 0)))
        moments = (np.stack(corrected), sums[:2, 1])
        quantile = norm.isf(power)  # negative: with probability `power` the sum is larger

        def excess(share: float, bet: int) -> float:
            mean, square = ((1 - share) * p[..., bet] + share * r[..., bet] for p, r in moments)
            unsure = abs(1 - share) * error[0][:, bet] + share * error[1][:, bet]
            spread = np.sqrt(np.maximum(square - mean**2, 0) + unsure**2)
            return float((n * mean + quantile * np.sqrt(n) * spread - threshold[:, bet]).max())

        shares = np.full(len(distance), np.nan)
        for bet in np.flatnonzero(distance > 0).tolist():
            detected = [share for share in (1.0, BEYOND) if excess(share, bet) > 0]
            if detected:
                shares[bet] = brentq(excess, 0.0, detected[0], args=(bet,)) if excess(0.0, bet) < 0 else 0.0
        return shares, distance


class TotalVariationEstimate:
    """The mean deviation of the best of J test functions."""

    def __init__(self) -> None:
        self.sums: Array | float = 0.0
        self.total = 0.0
        self.squares = 0.0
        self.n = 0

    def add(self, deviations: Array) -> Array:
        """The deviation `(n,)` of the test function in use at each token; `deviations` `(n, J)` are
        those of all."""
        so_far = self.sums + np.cumsum(deviations, axis=0) - deviations
        chosen = np.take_along_axis(deviations, so_far.argmax(axis=1)[:, None], axis=1)[:, 0]
        self.sums = self.sums + deviations.sum(axis=0)
        self.total += float(chosen.sum())
        self.squares += float((chosen**2).sum())
        self.n += len(chosen)
        return chosen

    def estimate(self, level: float = 0.95) -> Estimate:
        """The mean deviation, clipped at 0, with an interval that is valid at any stopping time.

        `low` bounds the mean total variation per token from below with confidence (1 + level) / 2;
        `high` bounds the mean deviation of the functions used. For a test function with mean m
        under the sampler and d = f - E_p f, exp(rate (f - m) + (log(1 - rate) + rate) d^2) has
        expectation at most 1 (Fan, Grama and Liu 2015); several rates share the level.
        """
        if self.n == 0:
            return Estimate(0.0, 0.0, 1.0, 0)
        threshold = np.log(2 * len(RATES) / (1 - level))
        width = float((((-np.log1p(-RATES) - RATES) * self.squares + threshold) / RATES).min()) / self.n
        mean = self.total / self.n
        value, low, high = np.clip([mean, mean - width, mean + width], 0.0, 1.0).tolist()
        return Estimate(value, low, high, self.n)
