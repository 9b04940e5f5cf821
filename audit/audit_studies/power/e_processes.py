"""Two simple tests that may stop at any token, to compare the audit with: e-processes.

    surprise  one score of the tokens, such as -log p. A bet on a larger or smaller mean multiplies
              by exp(l s) / E_p exp(l s); p is known, so the factor has expectation 1 under p. Its
              mean over the slopes l of `SLOPES`.
    pit       the probability integral transform: a randomised transform of each token is uniform
              and independent of those before. A bet on the density estimated from the transforms so
              far, as Arnold, Henzi and Ziegel (arXiv:2109.11761) test forecasts: the mean of one
              with a beta density and one with a histogram, where they have a kernel estimate.

Each rejects at level a when its e-value has reached 1/a: with probability at most a under an exact
sampler, whenever one stops (Ville). With the draft model each has two halves, one along p and one
along q/p.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from specnb_audit.bets import Row
from specnb_audit.uniforms import transform

Array = NDArray[np.float64]

SLOPES = np.array([sign * 2.0**-power for sign in (1, -1) for power in range(1, 8)])
SEEN = 20  # uniform values that the beta density takes to have been seen before the first
BINS, SEEN_IN_BIN = 10, 10  # of the histogram, and so many values in each
STAKE = 0.9  # part of the martingale that is bet on an estimated density, which can be 0


class Read(NamedTuple):
    """What the two tests read of n tokens along one order of the vocabulary.

    u     (n,) the transform of each token
    bets  (n, slopes) the logarithm of each factor
    """

    u: Array
    bets: Array


def read(row: Row, noise: Array, aimed: bool) -> Read:
    """What the tests read of a row: along p, or, if `aimed` at the draft model's errors, along q/p.

    `noise` `(n,)` are uniforms of the transform's own.
    """
    tokens, p = torch.as_tensor(list(row.tokens), device=row.p.device), row.p.double()
    positive = p.clamp_min(1e-300)
    if aimed:
        assert row.q is not None
        order = row.q.double() / positive
        score = ((1 + order) / 2).log()
    else:
        order, score = p, -positive.log()
    u = transform(p, order, tokens, noise)
    return Read(np.asarray(u), tilted(p, score, tokens))


def tilted(p: Tensor, score: Tensor, tokens: Tensor) -> Array:
    """The logarithm of exp(l s) / E_p exp(l s) of each token, `(n, slopes)`, for a score
    `(n, vocab)`.

    >>> p, tokens = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([1])
    >>> np.exp(tilted(p, torch.tensor([[0.0, 1.0]]), tokens)).round(3)[0, [0, 7]].tolist()
    [1.245, 0.755]
    """
    log_p, own = p.log(), score.gather(-1, tokens[:, None])[:, 0]
    bets = [slope * own - (log_p + slope * score).logsumexp(dim=-1) for slope in SLOPES.tolist()]
    return torch.stack(bets, dim=-1).numpy(force=True)


def surprise(bets: Array) -> Array:
    """The logarithm of the e-value after each of n tokens."""
    logs: Array = np.logaddexp.reduce(bets.cumsum(axis=0), axis=1) - np.log(bets.shape[1])
    return logs


def pit(u: Array) -> Array:
    """The logarithm of the e-value after each of n transforms.

    >>> bool(pit(np.random.default_rng(0).random(2000)).max() < 3), bool(pit(np.full(100, 0.9))[-1] > 50)
    (True, True)
    """
    factors = np.stack([_beta(u), _histogram(u)])
    halves = np.log1p(STAKE * (factors - 1)).cumsum(axis=1)
    logs: Array = np.logaddexp.reduce(halves, axis=0) - np.log(2)
    return logs


def _beta(u: Array) -> Array:
    """The density at each value of the beta distribution with mean and variance of those before."""
    so_far = np.arange(len(u)) + SEEN
    mean, square = ((np.cumsum(x) - x + SEEN * moment) / so_far for x, moment in ((u, 1 / 2), (u**2, 1 / 3)))
    strength = mean * (1 - mean) / (square - mean**2) - 1
    density: Array = stats.beta.pdf(u.clip(1e-12, 1 - 1e-12), mean * strength, (1 - mean) * strength)
    return density


def _histogram(u: Array) -> Array:
    bins = np.minimum((u * BINS).astype(int), BINS - 1)
    counts = np.eye(BINS)[bins].cumsum(axis=0)[np.arange(len(u)), bins] - 1
    density: Array = BINS * (counts + SEEN_IN_BIN) / (np.arange(len(u)) + BINS * SEEN_IN_BIN)
    return density


def both(reads: list[Read]) -> dict[str, Array]:
    """The logarithm of each test's e-value after each token, over one order or the mean over
    several."""
    made = {"surprise": [surprise(one.bets) for one in reads], "pit": [pit(one.u) for one in reads]}
    return {name: np.logaddexp.reduce(np.stack(logs), axis=0) - np.log(len(logs)) for name, logs in made.items()}
