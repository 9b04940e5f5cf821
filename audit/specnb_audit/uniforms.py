"""The uniform behind a token: its transform, which is uniform under p, and uniforms used twice.

The randomised probability integral transform U = P(tokens before x in some order) + W P(x), W
uniform, is uniform and independent of the past exactly if x was drawn from p (Rosenblatt 1952), for
any order fixed beforehand. So every density on [0, 1] that is known beforehand is a fair bet.

A sampler that inverts the cumulative distribution over ids emits x if its uniform lies in x's
interval. So a token tells where the uniform was, and what another sample with it would be.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

EDGES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
BINS = 16
LEARNING = (1.0, 10.0, 100.0)
"""Initial count of each bin. A small one adapts fast; a large one loses little while U is
uniform."""
BLOCK = 64  # tokens of the vocabulary whose masses are summed at once


def transform(p: Tensor, score: Tensor, cell: Tensor, w: Array) -> Array:
    """U `(n,)` of the emitted `cell` `(n,)` under p `(n, C)`, cells ordered by falling `score` `(n,
    C)`; equal scores count as one cell. `w` `(n,)` are the uniforms W."""
    emitted = score.gather(-1, cell[:, None])
    before = torch.where(score > emitted, p, 0.0).sum(dim=-1)
    tied = torch.where(score == emitted, p, 0.0).sum(dim=-1)
    u = before.numpy(force=True) + w * tied.numpy(force=True)
    return np.clip(u, 0.0, 1.0)  # type: ignore[no-any-return]  # numpy returns Any


def fixed_bets(u: Array) -> Array:
    """Densities `(n, bets)` at `u` `(n,)`: uniform below or above each of `EDGES`, and 1 plus or
    minus Legendre polynomials of degree 1 to 3."""
    edges = np.array(EDGES)
    below = u[:, None] < edges
    x = 2 * u[:, None] - 1
    # Mean 0, in [-1, 1].
    polynomials = np.concatenate([x, (3 * x**2 - 1) / 2, (5 * x**3 - 3 * x) / 2], axis=1)
    return np.concatenate([below / edges, ~below / (1 - edges), 1 + polynomials, 1 - polynomials], axis=1)


class Histogram:
    """Bets that U is distributed as its histogram so far, one for each initial count in `LEARNING`,
    as in Krichevsky and Trofimov."""

    def __init__(self) -> None:
        self.counts = np.zeros(BINS)

    def bets(self, u: Array) -> Array:
        """Densities `(n, len(LEARNING))` at each of `u` `(n,)`, from the values before it."""
        bins = np.minimum((u * BINS).astype(np.int64), BINS - 1)
        hits = np.eye(BINS)[bins]
        total = self.counts + hits.cumsum(axis=0)
        before = np.take_along_axis(total - hits, bins[:, None], axis=1)
        n_before = self.counts.sum() + np.arange(len(u))[:, None]
        self.counts = total[-1] if len(u) else self.counts
        initial = np.array(LEARNING)
        return BINS * (before + initial) / (n_before + BINS * initial)  # type: ignore[no-any-return]


class Interval(NamedTuple):
    """The uniforms in [0, 1] that give each token: from `low` to `high`, `(n,)` each."""

    low: Array
    high: Array

    @property
    def width(self) -> Array:
        return self.high - self.low


class CumulativeMass:
    """Masses `(n, vocab)` cumulated over the vocabulary in float64.

    Sums over blocks are kept, the rest is computed for one token per row. All results are points of
    one rising sequence, so intervals cover [0, 1] without gaps or overlaps.
    """

    def __init__(self, mass: Tensor) -> None:
        self.vocab = mass.shape[-1]
        short = -self.vocab % BLOCK
        self.blocks = (torch.nn.functional.pad(mass, (0, short)) if short else mass).unflatten(-1, (-1, BLOCK))
        rising = self.blocks.double().sum(dim=-1).cumsum(dim=-1)
        self.starts = torch.nn.functional.pad(rising, (1, 0))  # (n, blocks + 1)
        self.total = rising[:, -1]

    def ends(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        block, position = tokens // BLOCK, tokens % BLOCK
        inside = torch.nn.functional.pad(self._inside(block), (1, 0))
        start, stop = (self.starts.gather(-1, at[:, None])[:, 0] for at in (block, block + 1))
        before, after = (inside.gather(-1, at[:, None])[:, 0] for at in (position, position + 1))
        is_last = (position == BLOCK - 1) | (tokens == self.vocab - 1)
        return torch.minimum(start + before, stop), torch.where(is_last, stop, torch.minimum(start + after, stop))

    def find(self, u: Tensor) -> Tensor:
        """The token `(n,)` in whose interval each of the masses `u` `(n,)` lies."""
        block = torch.searchsorted(self.starts[:, 1:].contiguous(), u[:, None], right=True)[:, 0]
        block = block.clamp_max(self.blocks.shape[1] - 1)
        rest = u - self.starts.gather(-1, block[:, None])[:, 0]
        position = torch.searchsorted(self._inside(block), rest[:, None], right=True)[:, 0].clamp_max(BLOCK - 1)
        return (block * BLOCK + position).clamp_max(self.vocab - 1)

    def interval(self, tokens: Tensor) -> Interval:
        """The interval of each of `tokens` `(n,)`; from 0 to 0 in rows without mass."""
        low, high = self.normalised_ends(tokens)
        return Interval(low.numpy(force=True), high.numpy(force=True))

    def normalised_ends(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        low, high = self.ends(tokens)
        total = self.total.where(self.total > 0, 1.0)
        return low / total, high / total

    def _inside(self, block: Tensor) -> Tensor:
        rows = torch.arange(len(block), device=block.device)
        inside: Tensor = self.blocks[rows, block].double().cumsum(dim=-1)
        return inside


def same_uniform_ratio(p_interval: Interval, earlier: Interval, interval: Interval) -> Array:
    """r(x)/p(x) `(n,)` where r is the distribution of a sample whose uniform lies in `earlier`; 1
    where that is empty.

    `interval` is x's in the cumulative distribution that the sampler may invert (p or q),
    `p_interval` in p.
    """
    shared = np.maximum(np.minimum(interval.high, earlier.high) - np.maximum(interval.low, earlier.low), 0.0)
    known = (earlier.width > 0) & (p_interval.width > 0)
    # Two divisions: the product of two small widths may underflow.
    fraction = shared / np.where(known, earlier.width, 1.0)
    return np.where(known, fraction / np.where(known, p_interval.width, 1.0), 1.0)


class Likely(NamedTuple):
    """The likeliest tokens at n positions, `(n, L)` each: their ids, and their probabilities."""

    ids: NDArray[np.int64]
    probs: Array


def same_race_ratio(p: Array, p_token: Array, likely: Likely, earlier: Array, again: NDArray[np.bool_]) -> Array:
    """r(x)/p(x) `(n,)` where the sampler takes the token with the least noise / p, as
    `torch.multinomial`, and the noise is that of an earlier sample from p'.

    The earlier token y wins again with probability 1 / sum over z of max(p(z)/p(y), p'(z)/p'(y)),
    given that both are won; tokens beyond the `likely` ones of p' count as one, and other tokens
    share the rest as under p.

    p        p `(n, L)` at the tokens of `likely`
    p_token  p(y) `(n,)`, and `earlier` p'(y); 0 where there is no earlier sample
    again    whether y is the token emitted
    """
    known = (p_token > 0) & (p_token < 1) & (earlier > 0)
    here, there = (np.where(known, probs, 0.5)[:, None] for probs in (p_token, earlier))
    pairs = [np.concatenate([probs, 1 - probs.sum(axis=1, keepdims=True)], axis=1) for probs in (p, likely.probs)]
    both = 1 / np.maximum(pairs[0] / here, pairs[1] / there).sum(axis=1)
    repeated = np.minimum(both / there[:, 0], 1.0)
    ratio: Array = np.where(again, repeated / here[:, 0], (1 - repeated) / (1 - here[:, 0]))
    return np.where(known, ratio, 1.0)


def ratio_of(r: Tensor, p: Tensor) -> Array:
    """r/p `(n,)`, and 1 where p is 0."""
    top, bottom = r.double(), p.double()
    ratios: Array = torch.where(bottom > 0, top / bottom.where(bottom > 0, 1.0), 1.0).numpy(force=True)
    return ratios


def same_race(p: Tensor, tokens: Tensor, before: NDArray[np.int64], likely: Likely, earlier: Array) -> Array:
    """`same_race_ratio` of `tokens` `(n,)` under p `(n, vocab)`, where `before` `(n,)` were the earlier tokens."""
    here = p.gather(-1, torch.from_numpy(np.column_stack([before, likely.ids])).to(p.device))
    probs: Array = here.double().numpy(force=True)
    return same_race_ratio(probs[:, 1:], probs[:, 0], likely, earlier, before == tokens.numpy(force=True))


def within_step_ratios(p: Tensor, q: Tensor, tokens: Tensor, q_mass: CumulativeMass) -> tuple[Array, ...]:
    """r(x)/p(x) `(n,)` at `tokens` for three bugs of a step; p and q `(n, vocab)`, `q_mass` that of
    q.

    *one-uniform*: the uniform that rejected the draft token samples from the residual; given the
    rejection its density is the sum over d of q(d) 1[u > p(d)/q(d)]. *shared-noise*: the uniform
    that sampled the draft token does; d is rejected in q(d) - min(p, q)(d) of its interval.
    *not-clamped*, twice: the recovered token is the first at which the sum of p - q exceeds the
    uniform, in parts of the residual's mass; and the last, or the first, token where none is.
    """
    accepted = torch.minimum(p, q)
    low, high = CumulativeMass(p - accepted).normalised_ends(tokens)
    rejected = CumulativeMass(q - accepted)

    def one_uniform(u: Tensor) -> Tensor:
        mass = u.to(q.dtype)[:, None] * q
        return mass.sub_(accepted).clamp_min_(0).double().sum(dim=-1)

    def shared_noise(u: Tensor) -> Tensor:
        draft_token = q_mass.find(u)
        (start, stop), (before, after) = q_mass.ends(draft_token), rejected.ends(draft_token)
        width = stop - start
        fraction = ((u - start) / width.where(width > 0, 1.0)).clamp(0, 1)
        return before + fraction * (after - before)

    def at_token(values: Tensor) -> Tensor:
        return values.gather(-1, tokens[:, None])[:, 0].double()

    p_token, accepted_token = at_token(p), at_token(accepted)
    ratios = []
    for cumulative in (one_uniform, shared_noise):
        recovered = (cumulative(high) - cumulative(low)).clamp_min(0)
        ratios.append(ratio_of(torch.where(high > low, accepted_token + recovered, accepted_token), p_token))
    highest = torch.nn.functional.pad((p - q).double().cumsum(dim=-1).clamp_min(0), (1, 0)).cummax(dim=-1).values
    rest = (q - accepted).double().sum(dim=-1)  # the mass of the residual
    reached = highest[:, -1].clamp_max(rest)
    own = (highest.gather(-1, tokens[:, None] + 1) - highest.gather(-1, tokens[:, None]))[:, 0]
    for token in (p.shape[-1] - 1, 0):
        ratios.append(ratio_of(accepted_token + own + (rest - reached) * (tokens == token), p_token))
    return tuple(ratios)
