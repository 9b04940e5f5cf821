"""The transform is uniform, bets on it have mean 1, and a uniform used twice gives what the bet says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, examples
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from specnb_audit.uniforms import (
    LEARNING,
    CumulativeMass,
    Histogram,
    Interval,
    fixed_bets,
    same_uniform_ratio,
    transform,
    within_step_ratios,
)

KEYS = st.tuples(st.sampled_from(sorted(PAIRS)), st.integers(2, 8), st.integers(0, 10**6))


def both(key: tuple[str, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q, a row for every token of the vocabulary."""
    p, q = (probs(()) for probs in distribution_pair(*key))
    return p.expand(len(p), -1), q.expand(len(q), -1)


GRID = np.linspace(0.0, 1.0, 41)


def chance_below(edge: float, p: torch.Tensor, score: torch.Tensor) -> float:
    """P(U < edge), exactly: for each token U is uniform between what w = 0 and w = 1 give."""
    vocab = len(p)
    rows, scores, cells = p.expand(vocab, -1), score.expand(vocab, -1), torch.arange(vocab)
    low, high = (transform(rows, scores, cells, np.full(vocab, w)) for w in (0.0, 1.0))
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


def test_fixed_bets_are_those_of_the_formulas() -> None:
    """At an edge itself U is above it."""
    u = np.array([0.0, 0.03, 0.05, 0.2, 0.5, 0.77, 0.9, 1.0])
    bets = fixed_bets(u)
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
    histogram = Histogram()
    found = np.concatenate([histogram.bets(part) for part in np.split(u, [20])])
    assert found.shape == (54, 3)
    bins = [min(int(16 * one), 15) for one in u]
    for at, own in enumerate(bins):
        seen = bins[:at].count(own)
        assert found[at] == pytest.approx([16 * (seen + first) / (at + 16 * first) for first in LEARNING])
    assert histogram.counts.tolist() == [bins.count(one) for one in range(16)]
    assert found[0].tolist() == [1, 1, 1]


def test_the_transform_stays_between_0_and_1() -> None:
    """Whatever p adds up to: as allowed, by a thousandth more than 1."""
    p = torch.tensor([[0.5, 0.501]])
    high = transform(p, p, torch.tensor([0]), np.array([1.0]))
    assert high.tolist() == pytest.approx([1.0], abs=1e-12)
    assert high[0] <= 1
    assert transform(p, p, torch.tensor([1]), np.array([0.0])).tolist() == [0.0]


# Uniforms used twice


@given(st.sampled_from([63, 64, 65, 200]), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 10**6))
@examples
def test_blocks_make_no_difference(vocab: int, dtype: torch.dtype, seed: int) -> None:
    """Intervals tile across the borders of blocks, and every uniform finds the token in whose interval it lies."""
    mass = torch.rand(vocab, generator=torch.Generator().manual_seed(seed), dtype=dtype) ** 8
    mass[torch.arange(vocab) % 7 == 0] = 0
    cumulated = CumulativeMass(mass.expand(vocab, -1))
    low, high = cumulated.ends(torch.arange(vocab))
    assert low[0] == 0
    assert torch.equal(low[1:], high[:-1])
    assert torch.allclose(high, mass.double().cumsum(0), rtol=1e-12)
    middle = (low + high) / 2
    possible = (middle > low) & (middle < high)
    assert torch.equal(cumulated.find(middle)[possible], torch.arange(vocab)[possible])
    assert cumulated.find(high[-1:].expand(vocab) * 2)[0] == vocab - 1


@given(KEYS, st.floats(0, 1), st.floats(0, 1), st.booleans())
@examples
def test_a_uniform_used_twice_is_a_fair_bet(key: tuple[str, int, int], low: float, width: float, drafted: bool) -> None:
    p, q = both(key)
    tokens = torch.arange(len(p))
    own, probs = CumulativeMass(p).interval(tokens), CumulativeMass(q if drafted else p).interval(tokens)
    earlier = Interval(np.full(len(p), low), np.full(len(p), min(low + width, 1.0)))
    ratio = same_uniform_ratio(own, earlier, probs)
    mean = float((own.width * ratio).sum())
    assert (ratio >= 0).all()
    assert mean <= 1 + 1e-9
    if bool((p > 0).all()):
        assert mean == pytest.approx(1)


def test_a_row_without_mass_has_empty_intervals() -> None:
    mass = torch.tensor([[0.0, 0.0], [1.0, 3.0], [0.0, 0.0]])
    found = CumulativeMass(mass).interval(torch.tensor([0, 1, 1]))
    assert (found.low.tolist(), found.high.tolist()) == ([0, 0.25, 0], [0, 1, 0])
    assert found.width.tolist() == [0, 0.75, 0]


@pytest.mark.parametrize(
    ("p_width", "earlier", "interval", "ratio"),
    [
        (0.5, (0.0, 0.5), (0.0, 0.5), 2.0),  # the same token again
        (0.5, (0.25, 0.5), (0.0, 0.5), 2.0),
        (0.5, (0.25, 0.75), (0.0, 0.5), 1.0),
        (0.25, (0.0, 0.5), (0.0, 0.25), 2.0),
        (0.5, (0.0, 0.5), (0.5, 1.0), 0.0),  # side by side
        (0.5, (0.6, 0.8), (0.0, 0.5), 0.0),
        (0.2, (0.0, 1.0), (0.2, 0.6), 2.0),  # another cumulative distribution than that of p
        (0.5, (0.3, 0.3), (0.0, 0.5), 1.0),  # no earlier sample
        (0.0, (0.3, 0.5), (0.0, 0.5), 1.0),  # a token that p makes impossible
        (1e-200, (0.0, 1e-200), (0.0, 1e-200), 1e200),
    ],
)
def test_the_ratio_of_a_uniform_used_twice(
    p_width: float, earlier: tuple[float, float], interval: tuple[float, float], ratio: float
) -> None:
    each = [Interval(np.array([low]), np.array([high])) for low, high in ((0.0, p_width), earlier, interval)]
    assert same_uniform_ratio(*each) == pytest.approx([ratio])
    several = [Interval(*(np.repeat(end, 3) for end in one)) for one in each]
    assert same_uniform_ratio(*several).shape == (3,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["dense", "zeros in p", "zeros in q", "disjoint", "equal"])
def test_reuse_in_a_step_has_the_ratios_of_the_integrals(kind: str, dtype: torch.dtype) -> None:
    """One row for each of three positions of its own and each token, beside sums over all draft tokens."""
    for seed in range(3):
        p, q = (torch.stack([probs((at,)) for at in range(3)]).to(dtype) for probs in distribution_pair(kind, 6, seed))
        rows, tokens = torch.arange(3).repeat_interleave(6), torch.arange(6).repeat(3)
        found = within_step_ratios(p[rows], q[rows], tokens, CumulativeMass(q[rows]))
        for at, (row, token) in enumerate(zip(rows.tolist(), tokens.tolist(), strict=True)):
            expected = reused_in_a_step(p[row].double().numpy(), q[row].double().numpy(), token)
            for ratio, own in zip(found, expected, strict=True):
                error = 1e-6 if dtype == torch.float32 else 1e-12
                assert ratio[at] * float(p[row, token]) == pytest.approx(own * float(p[row, token]), abs=error)
                assert p[row, token] > 0 or ratio[at] == 1
        assert all(ratio.shape == (18,) and ratio.dtype == np.float64 for ratio in found)


def reused_in_a_step(p: np.ndarray, q: np.ndarray, token: int) -> tuple[float, float]:
    """r(token)/p(token): accepted, or recovered by the uniform of the test or by that of the draft token."""
    if p[token] == 0:
        return 1.0, 1.0
    accepted, excess = np.minimum(p, q), np.maximum(p - q, 0)
    recovered = [0.0, 0.0]
    if excess[token] > 1e-12:
        ends = np.concatenate([[0.0], (excess / excess.sum()).cumsum()])
        low, high = ends[token], ends[token + 1]
        starts = np.concatenate([[0.0], q.cumsum()])
        for draft_token, chance in enumerate(q):
            if chance > 0:
                rejects_from = accepted[draft_token] / chance  # uniforms above it reject the draft token
                recovered[0] += chance * max(0.0, high - max(low, rejects_from))
                inside = min(high, starts[draft_token + 1]) - max(low, starts[draft_token])
                recovered[1] += max(0.0, inside) * (1 - rejects_from)
    return (accepted[token] + recovered[0]) / p[token], (accepted[token] + recovered[1]) / p[token]
