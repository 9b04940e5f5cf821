"""The transform is uniform, whatever the distribution and the order; bets on it have mean 1."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, examples
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from specnb_audit import uniforms as pit

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


def test_the_transform_adds_up_the_cells_before_and_a_share_of_those_that_tie() -> None:
    """Beside a sum over cells, for scores that are finite, tied and infinite; the shape is that of the tokens."""
    random = np.random.default_rng(0)
    p = torch.from_numpy(random.dirichlet(np.ones(6), size=40))
    score = torch.from_numpy(random.integers(3, size=(40, 6)).astype(float))
    score[::5, 2] = torch.inf
    cell, w = torch.from_numpy(random.integers(6, size=40)), random.random(40)
    found = pit.transform(p, score, cell, w)
    for at in range(40):
        own = score[at, cell[at]]
        before = sum(float(p[at, one]) for one in range(6) if score[at, one] > own)
        tied = sum(float(p[at, one]) for one in range(6) if score[at, one] == own)
        assert found[at] == pytest.approx(before + w[at] * tied)
    assert found.shape == (40,)
    assert pit.transform(p.float(), score, cell, w) == pytest.approx(found, abs=1e-6)
    assert pit.transform(p.clone().requires_grad_(), score, cell, w) == pytest.approx(found)
    assert pit.transform(p[:0], score[:0], cell[:0], w[:0]).shape == (0,)


def test_the_transform_stays_between_0_and_1() -> None:
    """Whatever p adds up to: as allowed, by a thousandth more than 1."""
    p = torch.tensor([[0.5, 0.501]])
    high = pit.transform(p, p, torch.tensor([0]), np.array([1.0]))
    assert high.tolist() == pytest.approx([1.0], abs=1e-12)
    assert high[0] <= 1
    assert pit.transform(p, p, torch.tensor([1]), np.array([0.0])).tolist() == [0.0]


def test_fixed_bets_are_those_of_the_formulas() -> None:
    """At an edge itself U is above it."""
    u = np.array([0.0, 0.03, 0.05, 0.2, 0.5, 0.77, 0.9, 1.0])
    bets = pit.fixed_bets(u)
    edges = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)
    assert bets.shape == (8, 20)
    for at, one in enumerate(u):
        below = [1 / edge if one < edge else 0.0 for edge in edges]
        above = [0.0 if one < edge else 1 / (1 - edge) for edge in edges]
        legendre = [special.eval_legendre(degree, 2 * one - 1) for degree in (1, 2, 3)]
        expected = [*below, *above, *(1 + value for value in legendre), *(1 - value for value in legendre)]
        assert bets[at] == pytest.approx(expected, abs=1e-12)


def test_the_histogram_bets_by_counts_and_initial_counts() -> None:
    """Three initial counts for each of 16 bins; a value of 1 is in the last bin."""
    u = np.concatenate([np.random.default_rng(5).random(50) ** 2, [1.0, 0.0, 1 / 16, 1.0]])
    histogram = pit.Histogram()
    found = np.concatenate([histogram.bets(part) for part in np.split(u, [20])])
    assert found.shape == (54, 3)
    bins = [min(int(16 * one), 15) for one in u]
    for at, own in enumerate(bins):
        seen = bins[:at].count(own)
        assert found[at] == pytest.approx([16 * (seen + first) / (at + 16 * first) for first in pit.LEARNING])
    assert histogram.counts.tolist() == [bins.count(one) for one in range(16)]
    assert found[0].tolist() == [1, 1, 1]
