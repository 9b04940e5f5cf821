"""The randomised probability integral transform, and bets on it.

U = P(tokens before x in some order) + W P(x), W uniform, is uniform on [0, 1] and independent of the
past exactly when x was drawn from p (Rosenblatt), for any order that is fixed before x is seen. So
every density on [0, 1] that is known beforehand is a fair bet: it has mean 1.
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
"""Counts that each bin starts with: few learn fast, many lose little when there is nothing to learn."""


def transform(p: Tensor, score: Tensor, cell: Tensor, w: Array) -> Array:
    """U `(n,)` of the emitted `cell` `(n,)` under p `(n, C)`, cells ordered by falling `score` `(n, C)`.

    Cells with equal scores count as one, whose inside the uniforms `w` `(n,)` order at random.
    """
    own = score.gather(-1, cell[:, None])
    before = torch.where(score > own, p, 0.0).sum(dim=-1)
    tied = torch.where(score == own, p, 0.0).sum(dim=-1)
    u = before.numpy(force=True) + w * tied.numpy(force=True)
    return np.clip(u, 0.0, 1.0)


def fixed_bets(u: Array) -> Array:
    """Densities `(n, bets)` at `u` `(n,)`: all mass below or above an edge, and smooth waves of both signs."""
    edges = np.array(EDGES)
    below = u[:, None] < edges
    x = 2 * u[:, None] - 1
    waves = np.concatenate([x, (3 * x**2 - 1) / 2, (5 * x**3 - 3 * x) / 2], axis=1)  # Legendre: mean 0, within [-1, 1]
    return np.concatenate([below / edges, ~below / (1 - edges), 1 + waves, 1 - waves], axis=1)


class Histogram:
    """Bets on what the histogram of U has been so far, with one learning rate for each of `LEARNING`.

    Krichevsky and Trofimov's rule: the chance of a bin is its count, and a start, over all counts.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(BINS)

    def bets(self, u: Array) -> Array:
        """Densities `(n, len(LEARNING))` at each of `u` `(n,)`, made of those before it only."""
        bins = np.minimum((u * BINS).astype(np.int64), BINS - 1)
        hits = np.eye(BINS)[bins]
        total = self.counts + hits.cumsum(axis=0)
        before = np.take_along_axis(total - hits, bins[:, None], axis=1)
        seen = self.counts.sum() + np.arange(len(u))[:, None]
        self.counts = total[-1] if len(u) else self.counts
        start = np.array(LEARNING)
        return BINS * (before + start) / (seen + BINS * start)
