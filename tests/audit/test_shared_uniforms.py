"""Bets on uniforms that are used twice: they are fair, and have the distribution of their bug."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, examples
from hypothesis import given
from hypothesis import strategies as st

from specnb.audit.shared_uniforms import CumulativeMass, Interval, same_uniform_ratio, within_step_ratios
from specnb.sampling.distributions import sample
from specnb.sampling.verification import token_verification

KEYS = st.tuples(st.sampled_from(sorted(PAIRS)), st.integers(2, 8), st.integers(0, 10**6))


def both(key: tuple[str, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q, a row for every token of the vocabulary."""
    p, q = (probs(()) for probs in distribution_pair(*key))
    return p.expand(len(p), -1), q.expand(len(q), -1)


@given(KEYS)
@examples
def test_intervals_tile_the_unit_interval(key: tuple[str, int, int]) -> None:
    p, _ = both(key)
    laid = CumulativeMass(p).interval(torch.arange(len(p)))
    assert laid.low[0] == 0
    assert np.array_equal(laid.low[1:], laid.high[:-1])
    assert laid.high[-1] == 1
    assert np.allclose(laid.width, p[0].numpy(), atol=1e-12)


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


def test_a_uniform_used_twice_gives_what_the_bet_says() -> None:
    """Two distributions sampled with one uniform: the first token's interval implies the second one's distribution."""
    generator = np.random.default_rng(0)
    first, second = (torch.from_numpy(generator.dirichlet(np.ones(5))) for _ in range(2))
    u = torch.linspace(0, 1, 200_001, dtype=torch.float64)[:-1]
    tokens = torch.stack([sample(probs.expand(len(u), -1), u) for probs in (first, second)])
    everything = torch.arange(5)
    own = CumulativeMass(second.expand(5, -1)).interval(everything)
    for token in range(5):
        given_first = tokens[1][tokens[0] == token]
        seen = torch.bincount(given_first, minlength=5) / len(given_first)
        earlier = CumulativeMass(first[None]).interval(torch.tensor([token]))
        expected = same_uniform_ratio(own, Interval(*(np.repeat(x, 5) for x in earlier)), own) * own.width
        assert np.allclose(seen.numpy(), expected, atol=1e-3)


@given(KEYS)
@examples
def test_a_uniform_reused_in_a_step_is_a_fair_bet(key: tuple[str, int, int]) -> None:
    p, q = both(key)
    for ratio in within_step_ratios(p, q, torch.arange(len(p)), CumulativeMass(q)):
        mean = float((p[0].numpy() * ratio).sum())
        assert (ratio >= 0).all()
        assert mean == pytest.approx(1, abs=1e-9)  # both bugs emit only what p allows


@pytest.mark.parametrize("seed", range(3))
def test_a_uniform_reused_in_a_step_has_the_distribution_of_its_bug(seed: int) -> None:
    """Both bugs run on a fine grid of uniforms, and give the distribution that is bet on."""
    p, q = both(("dense", 5, seed))
    n = 1500
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    first, accept = (axis.flatten() for axis in torch.meshgrid(grid, grid, indexing="ij"))
    draft_tokens = sample(q[0].expand(len(first), -1), first)[:, None]
    # A step with one draft; the distribution behind it does not matter for the first token.
    distributions = torch.stack([p[0], p[0]]).expand(len(first), -1, -1)
    tests = (distributions, q[0].expand(len(first), 1, -1), draft_tokens, accept[:, None])
    for final, ratio in zip((accept, first), within_step_ratios(p, q, torch.arange(5), CumulativeMass(q)), strict=True):
        accepted, token = token_verification(*tests, final)
        emitted = torch.where(accepted > 0, draft_tokens[:, 0], token)
        seen = torch.bincount(emitted, minlength=5) / len(first)
        assert np.allclose(seen.numpy(), p[0].numpy() * ratio, atol=3e-3)
