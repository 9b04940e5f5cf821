"""Bets on uniforms that are used twice: they are fair, and have the distribution of their bug."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, examples
from hypothesis import given
from hypothesis import strategies as st

from specnb.distributions import sample
from specnb.rules import token_verification
from specnb_audit.uniforms import CumulativeMass, Interval, same_uniform_ratio, within_step_ratios

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


# Against calculations of their own


def masses(rows: int, vocab: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Few tokens have most of the mass, and every fifth has none; rows add up to different numbers."""
    mass = torch.rand(rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 6
    mass[:, 1::5] = 0
    return mass.to(dtype)


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ends_and_intervals_are_those_of_the_cumulative_sums(vocab: int, dtype: torch.dtype) -> None:
    """Each row has its own distribution and token; the sums are in float64 whatever the dtype."""
    mass = masses(40, vocab, seed=vocab, dtype=dtype)
    tokens = torch.arange(40) * 7 % vocab
    cumulated = CumulativeMass(mass)
    sums = mass.double().numpy().cumsum(axis=1)
    rows = np.arange(40)
    after = sums[rows, tokens]
    before = np.where(tokens > 0, sums[rows, tokens - 1], 0.0)
    low, high = cumulated.ends(tokens)
    assert low.dtype == high.dtype == torch.float64
    assert low.numpy() == pytest.approx(before, rel=1e-12, abs=1e-14)
    assert high.numpy() == pytest.approx(after, rel=1e-12, abs=1e-14)
    assert cumulated.total.numpy() == pytest.approx(sums[:, -1], rel=1e-12)
    found = cumulated.interval(tokens)
    assert found.low == pytest.approx(before / sums[:, -1], rel=1e-12, abs=1e-14)
    assert found.high == pytest.approx(after / sums[:, -1], rel=1e-12, abs=1e-14)
    assert found.width == pytest.approx((after - before) / sums[:, -1], abs=1e-12)
    assert cumulated.interval(torch.full((40,), vocab - 1)).high.tolist() == [1.0] * 40


@pytest.mark.parametrize("vocab", [5, 64, 65, 130])
def test_every_mass_is_found_in_the_token_whose_interval_it_is_in(vocab: int) -> None:
    """A mass at the border of two intervals is in the second, as `sample` has it; one beyond the end in the last."""
    mass = masses(30, vocab, seed=1)
    sums = mass.numpy().cumsum(axis=1)
    u = np.random.default_rng(0).random(30) * sums[:, -1]
    expected = [int(np.searchsorted(line, one, side="right")) for line, one in zip(sums, u, strict=True)]
    assert CumulativeMass(mass).find(torch.from_numpy(u)).tolist() == expected
    assert CumulativeMass(mass).find(torch.full((30,), 1e9, dtype=torch.float64)).tolist() == [vocab - 1] * 30
    quarters = torch.zeros(4, vocab, dtype=torch.float64)
    quarters[:, [0, 1, 3, 4]] = 0.25
    found = CumulativeMass(quarters).find(torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64))
    assert found.tolist() == [0, 1, 3, 4]


def test_at_the_border_of_two_blocks_a_mass_is_found_in_the_second() -> None:
    mass = torch.zeros(2, 130, dtype=torch.float64)
    mass[:, [0, 64, 128]] = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    assert CumulativeMass(mass).find(torch.tensor([0.5, 0.75], dtype=torch.float64)).tolist() == [64, 128]


def test_a_row_without_mass_has_empty_intervals() -> None:
    mass = torch.tensor([[0.0, 0.0], [1.0, 3.0], [0.0, 0.0]])
    found = CumulativeMass(mass).interval(torch.tensor([0, 1, 1]))
    assert (found.low.tolist(), found.high.tolist()) == ([0, 0.25, 0], [0, 1, 0])
    assert found.width.tolist() == [0, 0.75, 0]


def test_masses_that_carry_gradients_have_the_same_intervals() -> None:
    p = torch.tensor([[0.25, 0.75], [0.5, 0.5]], requires_grad=True)
    q = torch.tensor([[0.5, 0.5], [0.25, 0.75]], requires_grad=True)
    tokens = torch.tensor([1, 0])
    found = CumulativeMass(p).interval(tokens)
    assert (found.low.tolist(), found.high.tolist()) == ([0.25, 0], [1, 0.5])
    plain = within_step_ratios(p.detach(), q.detach(), tokens, CumulativeMass(q.detach()))
    for ratio, expected in zip(within_step_ratios(p, q, tokens, CumulativeMass(q)), plain, strict=True):
        assert ratio.tolist() == expected.tolist()


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
