"""Noise that is used twice: bets on a token's place in the cumulated laws of the vocabulary.

A sampler that draws by `specnb.law.draw`, or in any way that goes through token ids, puts x where the
cumulated law passes its uniform. So a token tells in which interval the uniform lay, and what another
draw with the same uniform would have given. These need the whole vocabulary in its own order, and are
computed at the emitted token only.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]


class Interval(NamedTuple):
    """Where in [0, 1] the uniforms lie that give each token: from `low` to `high`, `(n,)` each."""

    low: Array
    high: Array

    @property
    def width(self) -> Array:
        """The probability of each token."""
        return self.high - self.low


def interval(law: Tensor, tokens: Tensor) -> Interval:
    """The interval of each of `tokens` `(n,)` in the cumulated `law` `(n, vocab)`.

    Both ends are entries of one rising sequence, so the intervals of all tokens never overlap, rounded
    as they may be.
    """
    low, high = (end.double() for end in _ends(law, tokens))
    return Interval(low.numpy(force=True), high.numpy(force=True))


def _ends(mass: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The cumulated `mass` `(n, vocab)`, as a share of its sum, before and after each of `tokens` `(n,)`."""
    cumulated = mass.cumsum(dim=-1)
    whole = cumulated[:, -1].where(cumulated[:, -1] > 0, 1.0)
    after = cumulated.gather(-1, tokens[:, None])[:, 0]
    before = cumulated.gather(-1, (tokens - 1).clamp_min(0)[:, None])[:, 0]
    return torch.where(tokens > 0, before, 0.0) / whole, after / whole


def same_uniform(own: Interval, earlier: Interval, law: Interval) -> Array:
    """r(x)/p(x) `(n,)` where r is what a law gives to a uniform known to lie in the interval `earlier`.

    `law` is the interval of x in the cumulated law that the sampler is suspected to draw with, `own`
    that in p. 1 where `earlier` is empty: no earlier draw is known there.
    """
    shared = np.maximum(np.minimum(law.high, earlier.high) - np.maximum(law.low, earlier.low), 0.0)
    known = (earlier.width > 0) & (own.width > 0)
    # One after the other: the product of two small widths may be too small for a float.
    share = shared / np.where(known, earlier.width, 1.0)
    return np.where(known, share / np.where(known, own.width, 1.0), 1.0)


def reused(p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Array, Array]:
    """r(x)/p(x) `(n,)` at the `tokens` for two bugs of one step of Algorithm 1, p and q `(n, vocab)`.

    First *one-uniform*: the uniform that rejected the draft draws from the residual; given the rejection
    it has the density sum over d of q(d) 1[u > p(d)/q(d)]. Then *shared-noise*: the uniform that drew the
    draft draws from the residual; each d was rejected with q(d) - min(p, q)(d) of its interval.
    """
    accepted = torch.minimum(p, q)
    rejected = q - accepted
    low, high = _ends(p - accepted, tokens)
    cumulated, lost = q.cumsum(dim=-1), rejected.cumsum(dim=-1)

    def one_uniform(u: Tensor) -> Tensor:
        return (u[:, None] * q - accepted).clamp_min(0).sum(dim=-1, dtype=torch.float64)

    def shared_noise(u: Tensor) -> Tensor:
        at = torch.searchsorted(cumulated, u[:, None], right=True).clamp_max(q.shape[-1] - 1)
        wide, missing = q.gather(-1, at), rejected.gather(-1, at)
        into = (u[:, None] - cumulated.gather(-1, at) + wide) / wide.where(wide > 0, 1.0)
        return (lost.gather(-1, at) - missing + into.clamp(0, 1) * missing)[:, 0].double()

    own, kept = (law.gather(-1, tokens[:, None])[:, 0].double() for law in (p, accepted))
    ratios = []
    for passed in (one_uniform, shared_noise):
        law = torch.where(high > low, kept + (passed(high) - passed(low)).clamp_min(0), kept)
        ratios.append(torch.where(own > 0, law / own.where(own > 0, 1.0), 1.0).numpy(force=True))
    return ratios[0], ratios[1]
