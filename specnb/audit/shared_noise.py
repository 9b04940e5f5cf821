"""Noise that is used twice: bets on a token's place in the cumulated distributions of the vocabulary.

A sampler that draws by `specnb.sampling.distributions.draw`, or in any way that goes through token ids, puts x where the
cumulated distribution passes its uniform. So a token tells in which interval the uniform lay, and what another
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

BLOCK = 64


class Interval(NamedTuple):
    """Where in [0, 1] the uniforms lie that give each token: from `low` to `high`, `(n,)` each."""

    low: Array
    high: Array

    @property
    def width(self) -> Array:
        """The probability of each token."""
        return self.high - self.low


class CumulativeMass:
    """Masses `(n, vocab)` cumulated over the vocabulary in float64. Sums are kept of blocks only, and filled in
    where they are asked for: of each row, at one token.

    All that is looked up is in one rising sequence, so the intervals of all tokens tile, rounded as they may be.
    """

    def __init__(self, mass: Tensor) -> None:
        self.vocab = mass.shape[-1]
        short = -self.vocab % BLOCK
        self.blocks = (torch.nn.functional.pad(mass, (0, short)) if short else mass).unflatten(-1, (-1, BLOCK))
        rising = self.blocks.double().sum(dim=-1).cumsum(dim=-1)
        self.starts = torch.nn.functional.pad(rising, (1, 0))  # (n, blocks + 1)
        self.whole = rising[:, -1]

    def ends(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The mass before and after each of `tokens` `(n,)`."""
        block, place = tokens // BLOCK, tokens % BLOCK
        inside = torch.nn.functional.pad(self._inside(block), (1, 0))
        start, stop = (self.starts.gather(-1, at[:, None])[:, 0] for at in (block, block + 1))
        before, after = (inside.gather(-1, at[:, None])[:, 0] for at in (place, place + 1))
        is_last = (place == BLOCK - 1) | (tokens == self.vocab - 1)
        return torch.minimum(start + before, stop), torch.where(is_last, stop, torch.minimum(start + after, stop))

    def find(self, u: Tensor) -> Tensor:
        """The token `(n,)` whose mass is passed at each of `u` `(n,)`."""
        block = torch.searchsorted(self.starts[:, 1:].contiguous(), u[:, None], right=True)[:, 0]
        block = block.clamp_max(self.blocks.shape[1] - 1)
        left = u - self.starts.gather(-1, block[:, None])[:, 0]
        place = torch.searchsorted(self._inside(block), left[:, None], right=True)[:, 0].clamp_max(BLOCK - 1)
        return (block * BLOCK + place).clamp_max(self.vocab - 1)

    def interval(self, tokens: Tensor) -> Interval:
        """The interval of each of `tokens` `(n,)`; where there is no mass at all, from 0 to 0."""
        low, high = self.shares(tokens)
        return Interval(low.numpy(force=True), high.numpy(force=True))

    def shares(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """`ends` as shares of the whole."""
        low, high = self.ends(tokens)
        whole = self.whole.where(self.whole > 0, 1.0)
        return low / whole, high / whole

    def _inside(self, block: Tensor) -> Tensor:
        return self.blocks[torch.arange(len(block), device=block.device), block].double().cumsum(dim=-1)


def same_uniform(own: Interval, earlier: Interval, probs: Interval) -> Array:
    """r(x)/p(x) `(n,)` where r is what a distribution gives to a uniform known to lie in the interval `earlier`.

    `distribution` is the interval of x in the cumulated distribution that the sampler is suspected to draw with, `own`
    that in p. 1 where `earlier` is empty: no earlier draw is known there.
    """
    shared = np.maximum(np.minimum(probs.high, earlier.high) - np.maximum(probs.low, earlier.low), 0.0)
    known = (earlier.width > 0) & (own.width > 0)
    # One after the other: the product of two small widths may be too small for a float.
    share = shared / np.where(known, earlier.width, 1.0)
    return np.where(known, share / np.where(known, own.width, 1.0), 1.0)


def reused(p: Tensor, q: Tensor, tokens: Tensor, drafted: CumulativeMass) -> tuple[Array, Array]:
    """r(x)/p(x) `(n,)` at the `tokens` for two bugs of one step of Algorithm 1, p and q `(n, vocab)`, q `drafted`.

    First *one-uniform*: the uniform that rejected the draft draws from the residual; given the rejection
    it has the density sum over d of q(d) 1[u > p(d)/q(d)]. Then *shared-noise*: the uniform that drew the
    draft draws from the residual; each d was rejected with q(d) - min(p, q)(d) of its interval.
    """
    accepted = torch.minimum(p, q)
    low, high = CumulativeMass(p - accepted).shares(tokens)
    lost = CumulativeMass(q - accepted)

    def one_uniform(u: Tensor) -> Tensor:
        passed = u.to(q.dtype)[:, None] * q
        return passed.sub_(accepted).clamp_min_(0).double().sum(dim=-1)

    def shared_noise(u: Tensor) -> Tensor:
        draft = drafted.find(u)
        (start, stop), (before, after) = drafted.ends(draft), lost.ends(draft)
        wide = stop - start
        into = ((u - start) / wide.where(wide > 0, 1.0)).clamp(0, 1)
        return before + into * (after - before)

    own, kept = (probs.gather(-1, tokens[:, None])[:, 0].double() for probs in (p, accepted))
    ratios = []
    for passed in (one_uniform, shared_noise):
        probs = torch.where(high > low, kept + (passed(high) - passed(low)).clamp_min(0), kept)
        ratios.append(torch.where(own > 0, probs / own.where(own > 0, 1.0), 1.0).numpy(force=True))
    return ratios[0], ratios[1]
