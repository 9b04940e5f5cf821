"""The transform is uniform, whatever the distribution and the order; bets on it have mean 1."""

from __future__ import annotations

import numpy as np
import torch
from distributions_for_tests import PAIRS, distribution_pair, examples
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specnb.audit import pit

GRID = np.linspace(0.0, 1.0, 41)


def chance_below(edge: float, p: torch.Tensor, score: torch.Tensor) -> float:
    """P(U < edge), exactly: for each token U is uniform between what w = 0 and w = 1 give."""
    vocab = len(p)
    rows, scores, cells = p.expand(vocab, -1), score.expand(vocab, -1), torch.arange(vocab)
    low, high = (pit.transform(rows, scores, cells, np.full(vocab, w)) for w in (0.0, 1.0))
    width = high - low
    share = np.where(width > 0, np.clip((edge - low) / np.where(width > 0, width, 1), 0, 1), low < edge)
    return float((p.numpy() * share).sum())


@given(st.sampled_from(sorted(PAIRS)), st.integers(2, 7), st.integers(0, 10**6), st.booleans())
@examples
def test_the_transform_is_uniform(kind: str, vocab: int, seed: int, by_p: bool) -> None:
    p, q = (probs(()) for probs in distribution_pair(kind, vocab, seed))
    score = p.round(decimals=1) if by_p else torch.where(p > 0, q / p, torch.inf)  # rounding makes ties
    for edge in GRID:
        assert abs(chance_below(edge, p, score) - edge) < 1e-9


def test_fixed_bets_are_densities() -> None:
    u = (np.arange(200_000) + 0.5) / 200_000
    bets = pit.fixed_bets(u)
    assert (bets >= 0).all()
    assert np.allclose(bets.mean(axis=0), 1, atol=1e-4)
    assert np.isfinite(pit.fixed_bets(np.array([0.0, 1.0]))).all()


def test_the_polynomials_are_those_of_legendre() -> None:
    """They are orthogonal, so each finds what the others miss, and 1 at the end, so that a bet can double."""
    u = (np.arange(200_000) + 0.5) / 200_000
    above, below = np.split(pit.fixed_bets(u)[:, 2 * len(pit.EDGES) :] - 1, 2, axis=1)
    assert np.allclose(above, -below)
    assert np.allclose(above.T @ above / len(u), np.diag(1 / (2 * np.arange(1, 4) + 1)), atol=1e-4)
    assert pit.fixed_bets(np.array([1.0]))[0, -6:].tolist() == [2, 2, 2, 0, 0, 0]


def test_the_histogram_knows_nothing_of_the_token_it_bets_on() -> None:
    """Before each token its bet is a density: the mean over all bins is 1."""
    past = np.random.default_rng(0).random(60) ** 2
    middles = (np.arange(pit.BINS) + 0.5) / pit.BINS
    for known in (0, 1, 17, 60):
        bets = []
        for u in middles:
            histogram = pit.Histogram()
            histogram.bets(past[:known])
            bets.append(histogram.bets(np.array([u]))[0])
        assert np.allclose(np.mean(bets, axis=0), 1)


def test_the_histogram_is_the_same_in_pieces() -> None:
    u = np.random.default_rng(1).random(100)
    whole, pieces = pit.Histogram(), pit.Histogram()
    parts = [pieces.bets(part) for part in np.split(u, [1, 40, 41])]
    assert np.allclose(whole.bets(u), np.concatenate(parts))
    assert pit.Histogram().bets(np.empty(0)).shape == (0, len(pit.LEARNING))


def test_the_histogram_learns() -> None:
    u = np.random.default_rng(2).random(2000) ** 1.5
    learned = np.log(pit.Histogram().bets(u)).sum(axis=0)
    assert learned.max() > 50
    assert stats.kstest(u, "uniform").pvalue < 1e-6
