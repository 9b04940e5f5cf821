"""The randomised probability integral transform (PIT), and bets on it.

U = P(tokens before x in some order) + W P(x), W uniform, is uniform on [0, 1] and independent of the past exactly
when x was drawn from p (Rosenblatt 1952), for any order that is fixed before x is seen. So every density on [0, 1]
that is known beforehand is a fair bet: its mean under p is 1.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

EDGES = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
BINS = 16
LEARNING = (1.0, 10.0, 100.0)
"""Initial count of each bin. A small one adapts fast; a large one loses little while U is uniform."""


def transform(p: Tensor, score: Tensor, cell: Tensor, w: Array) -> Array:
    """U `(n,)` of the emitted `cell` `(n,)` under p `(n, C)`, cells ordered by decreasing `score` `(n, C)`.

    Cells with equal scores count as one; `w` `(n,)` are the uniforms W.

    >>> p = torch.tensor([[0.5, 0.3, 0.2]])
    >>> transform(p, p, torch.tensor([1]), np.array([0.5])).round(6).tolist()
    [0.65]
    """
    emitted = score.gather(-1, cell[:, None])
    before = torch.where(score > emitted, p, 0.0).sum(dim=-1)
    tied = torch.where(score == emitted, p, 0.0).sum(dim=-1)
    u = before.numpy(force=True) + w * tied.numpy(force=True)
    return np.clip(u, 0.0, 1.0)  # type: ignore[no-any-return]  # numpy returns Any


def fixed_bets(u: Array) -> Array:
    """Densities `(n, bets)` at `u` `(n,)`: uniform below or above each of `EDGES`, and 1 plus or minus Legendre
    polynomials of degree 1 to 3."""
    edges = np.array(EDGES)
    below = u[:, None] < edges
    x = 2 * u[:, None] - 1
    polynomials = np.concatenate([x, (3 * x**2 - 1) / 2, (5 * x**3 - 3 * x) / 2], axis=1)  # mean 0, in [-1, 1]
    return np.concatenate([below / edges, ~below / (1 - edges), 1 + polynomials, 1 - polynomials], axis=1)


class Histogram:
    """Bets that U is distributed as its histogram so far, one for each initial count in `LEARNING`.

    The probability of a bin is (its count + initial count) / (sum over all bins), as in Krichevsky and Trofimov.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(BINS)

    def bets(self, u: Array) -> Array:
        """Densities `(n, len(LEARNING))` at each of `u` `(n,)`; each uses the values before it only."""
        bins = np.minimum((u * BINS).astype(np.int64), BINS - 1)
        hits = np.eye(BINS)[bins]
        total = self.counts + hits.cumsum(axis=0)
        before = np.take_along_axis(total - hits, bins[:, None], axis=1)
        n_before = self.counts.sum() + np.arange(len(u))[:, None]
        self.counts = total[-1] if len(u) else self.counts
        initial = np.array(LEARNING)
        return BINS * (before + initial) / (n_before + BINS * initial)  # type: ignore[no-any-return]
