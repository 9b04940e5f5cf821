"""Every bet is fair: its expectation under p is at most 1, shown by summing over all tokens."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, examples
from hypothesis import given, settings
from hypothesis import strategies as st
from samplers import sample_row, tables, zipf_tables
from torch import Tensor

from specnb.distributions import normalise, sample
from specnb.rules import token_verification
from specnb_audit.alternatives import (
    ALTERNATIVES,
    CondensedDistributions,
    Frequencies,
    alternative_distributions,
    condense_distributions,
)
from specnb_audit.bets import Bets, Row, steps_between
from specnb_audit.uniforms import (
    CumulativeMass,
    Histogram,
    Interval,
    fixed_bets,
    same_uniform_ratio,
    transform,
    within_step_ratios,
)

KEYS = st.tuples(st.sampled_from(sorted(PAIRS)), st.integers(2, 9), st.integers(0, 10**6))
FULL = 64  # cells for every token


def pair(kind: str, vocab: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """p, q, and another p for the position before."""
    p, q = distribution_pair(kind, vocab, seed)
    return p(()), q(()), p((0,))


def for_every_token(p: Tensor, q: Tensor, before: Tensor, head: int, raw: bool = True) -> CondensedDistributions:
    """The same distributions with each token emitted in turn."""
    vocab = len(p)
    rows = [probs.expand(vocab, -1) for probs in (p, before, q, normalise(q.sqrt()))]
    return condense_distributions(torch.arange(vocab), rows[0], rows[1], rows[2], rows[3] if raw else None, likely=head)


def one_by_one(seen: CondensedDistributions, had: Tensor) -> list[tuple[str, Tensor]]:
    return [(kind, probs) for kind, distributions in alternative_distributions(seen, had) for probs in distributions]


@given(KEYS, st.integers(1, 9))
@examples
def test_cells_keep_all_mass(key: tuple[str, int, int], head: int) -> None:
    p, q, before = pair(*key)
    seen = for_every_token(p, q, before, head)
    for probs, cells in ((p, seen.p), (q, seen.q), (before, seen.previous_p)):
        assert cells is not None
        assert torch.allclose(cells.sum(dim=-1), torch.ones(len(p), dtype=torch.float64))
        # The tokens' own masses add up to those of the cells they are said to lie in.
        merge_rows = torch.zeros_like(cells[0]).scatter_add(0, seen.cell, probs)
        assert torch.allclose(merge_rows, cells[0], atol=1e-12)
    held = torch.bincount(seen.cell, minlength=seen.p.shape[1])
    assert torch.equal(held, seen.sizes[0])
    assert torch.equal(seen.previous_cell[1:], seen.cell[:-1])
    score = torch.stack([p, q, before, normalise(q.sqrt())]).amax(dim=0)
    assert torch.equal(score[seen.ids[0]].sort().values, score.sort().values[-min(head, len(p)) :])
    pooled = [token for token in range(len(p)) if token not in seen.ids[0]]
    assert all((seen.cell[token] == seen.p.shape[1] - 2) == bool(q[token] > p[token]) for token in pooled)


@given(KEYS, st.sampled_from([2, 5, FULL]), st.booleans())
@settings(examples, max_examples=60)
def test_every_alternative_is_a_fair_bet(key: tuple[str, int, int], head: int, raw: bool) -> None:
    """sum over x of p(x) r(x)/p(x) is 1 where p has no zeros that r fills, and less where it
    has."""
    p, q, before = pair(*key)
    seen = for_every_token(p, q, before, head, raw)
    had = torch.zeros_like(seen.p, dtype=torch.bool)
    had[:, :-2] = seen.ids % 2 == 0
    for kind, probs in one_by_one(seen, had):
        assert kind in ALTERNATIVES
        assert (probs >= 0).all(), kind
        assert torch.allclose(probs.sum(dim=-1), torch.ones(len(p), dtype=torch.float64)), kind
        possible = p > 0
        ratio = torch.where(possible, seen.at_token(probs) / seen.at_token(seen.p).where(possible, 1.0), 0.0)
        # Whose distributions differ from row to row: the token before is part of them.
        if kind not in ("repeats", "last-token"):
            mean = float((p * ratio).sum())
            assert mean <= 1 + 1e-9, kind
            reached = probs[0][seen.p[0] > 0].sum()
            assert mean == pytest.approx(float(reached), abs=1e-9), kind


@given(KEYS, st.integers(0, 6))
@examples
def test_bets_on_the_token_just_emitted_are_fair(key: tuple[str, int, int], last: int) -> None:
    """Over all next tokens after the same one; where that one has no cell of its own there is no
    bet."""
    p, q, before = pair(*key)
    last %= len(p)
    for head in (2, FULL):
        means = torch.zeros(5, dtype=torch.float64)
        for token in range(len(p)):
            rows = (torch.tensor([token]), p[None], before[None], q[None])
            seen = condense_distributions(*rows, previous_token=last, likely=head)
            had = torch.zeros_like(seen.p, dtype=torch.bool)
            (bets,) = (probs for kind, probs in alternative_distributions(seen, had) if kind == "last-token")
            if p[token] > 0:
                means += p[token] * (seen.at_token(bets) / seen.at_token(seen.p))[:, 0]
            if last not in seen.ids[0]:
                assert torch.allclose(bets[:, 0], seen.p[0].expand(5, -1))
        assert means.tolist() == pytest.approx([1.0] * 5, abs=1e-9)


def test_distributions_with_all_mass_in_pooled_cells_have_alternatives() -> None:
    """A flat q beside a p that is concentrated on the tokens with a cell: no alternative is NaN."""
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    q = torch.tensor([[0.0, 0.0, 0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    for first, second in ((p, q), (q, p)):
        condensed = condense_distributions(torch.tensor([0]), first, p, second, likely=2)
        for name, probs in one_by_one(condensed, torch.zeros_like(condensed.p, dtype=torch.bool)):
            assert float(probs.sum()) == pytest.approx(1), name


def test_no_bet_gains_where_one_token_is_certain() -> None:
    """At temperature 0 no bet gains on argmax tokens."""
    p = torch.eye(4, dtype=torch.float64)[:1]
    seen = condense_distributions(torch.tensor([0]), p, p, p, likely=4)
    for kind, probs in one_by_one(seen, torch.zeros_like(seen.p, dtype=torch.bool)):
        assert seen.at_token(probs) <= 1 + 1e-12, kind


# The uniform behind a token


def both(key: tuple[str, int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q, a row for every token of the vocabulary."""
    p, q = (probs(()) for probs in distribution_pair(*key))
    return p.expand(len(p), -1), q.expand(len(q), -1)


EDGES_TRIED = np.linspace(0.0, 1.0, 41)


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
    # Rounding makes ties.
    score = p.round(decimals=1) if by_p else torch.where(p > 0, q / p, torch.inf)
    for edge in EDGES_TRIED:
        assert abs(chance_below(edge, p, score) - edge) < 1e-9


def test_bets_on_the_transform_are_densities() -> None:
    """The fixed ones, and after any past those of the histogram: their mean is 1."""
    middles = (np.arange(16_000) + 0.5) / 16_000
    fixed = fixed_bets(middles)
    assert (fixed >= 0).all()
    assert np.allclose(fixed.mean(axis=0), 1, atol=1e-3)
    assert np.isfinite(fixed_bets(np.array([0.0, 1.0]))).all()
    past = np.random.default_rng(0).random(60) ** 2
    for known in (0, 17, 60):
        bets = []
        for u in (np.arange(16) + 0.5) / 16:
            histogram = Histogram()
            histogram.bets(past[:known])
            bets.append(histogram.bets(np.array([u]))[0])
        assert np.allclose(np.mean(bets, axis=0), 1)


@given(st.sampled_from([63, 64, 65, 200]), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 10**6))
@examples
def test_blocks_make_no_difference(vocab: int, dtype: torch.dtype, seed: int) -> None:
    """Intervals tile across the borders of blocks, and every uniform finds the token in whose
    interval it lies."""
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


@given(KEYS)
@examples
def test_a_uniform_reused_in_a_step_is_a_fair_bet(key: tuple[str, int, int]) -> None:
    p, q = both(key)
    for number, ratio in enumerate(within_step_ratios(p, q, torch.arange(len(p)), CumulativeMass(q))):
        mean = float((p[0].numpy() * ratio).sum())
        assert (ratio >= 0).all()
        # The first two emit only what p allows; a sum that no uniform is below gives any token.
        assert mean == pytest.approx(1, abs=1e-9) if number < 2 or bool((p > 0).all()) else mean <= 1 + 1e-9


@pytest.mark.parametrize("seed", range(2))
def test_a_uniform_reused_in_a_step_has_the_distribution_of_its_bug(seed: int) -> None:
    """All bugs run on a fine grid of uniforms, and give the distribution that is bet on."""
    p, q = both(("dense", 5, seed))
    n = 500
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    first, accept = (axis.flatten() for axis in torch.meshgrid(grid, grid, indexing="ij"))
    draft_tokens = sample(q[0].expand(len(first), -1), first)[:, None]
    # A step with one draft; the distribution behind it does not matter for the first token.
    distributions = torch.stack([p[0], p[0]]).expand(len(first), -1, -1)
    tests = (distributions, q[0].expand(len(first), 1, -1), draft_tokens, accept[:, None])
    fresh = torch.from_numpy(np.random.default_rng(seed).random(len(first)))
    *summed, below = (p - q)[0].cumsum(0), fresh[:, None] * (p - q)[0].clamp_min(0).sum()
    exceeds = summed[0] > below
    found = exceeds.any(dim=-1)
    ways = [token_verification(*tests, final)[:2] for final in (accept, first)]
    ways += [(ways[0][0], torch.where(found, exceeds.int().argmax(dim=-1), other)) for other in (4, 0)]
    for (accepted, token), ratio in zip(
        ways, within_step_ratios(p, q, torch.arange(5), CumulativeMass(q)), strict=True
    ):
        emitted = torch.where(accepted > 0, draft_tokens[:, 0], token)
        seen = torch.bincount(emitted, minlength=5) / len(first)
        assert np.allclose(seen.numpy(), p[0].numpy() * ratio, atol=8e-3)


# What is carried from sequence to sequence


P, _ = zipf_tables()


def test_frequencies_are_a_fair_bet_that_knows_earlier_sequences_alone() -> None:
    frequencies, random = Frequencies(), np.random.default_rng(0)
    tokens = torch.from_numpy(random.integers(3, size=60))
    frequencies.bets(P[tokens], tokens)
    frequencies.begin()
    before = [frequencies.bets(P[:1], torch.tensor([token]))[0][:, 0] for token in range(len(P))]
    assert P[0].numpy() @ np.stack(before) == pytest.approx(np.ones(2))
    again = [frequencies.bets(P[:1], torch.tensor([token]))[0][:, 0] for token in range(len(P))]
    assert np.stack(again) == pytest.approx(np.stack(before))


def test_tokens_are_first_inner_and_last_of_a_step_early_and_late() -> None:
    """Steps of 3 tokens, in a sequence in pieces of 30 and 9 tokens and in one of its own."""
    p, bets = torch.full((30, 2), 0.5), Bets()
    bets.begin([])
    rows = [Row([0] * n, p[:n], steps=[3] * (n // 3)) for n in (30, 9)]
    found = [bets.bets_on(row) for row in rows]
    bets.begin([])
    found.append(bets.bets_on(rows[1]))
    masks = np.concatenate([one.masks for one in found])
    assert masks.dtype == bool
    offsets = np.array([*range(39), *range(9)])
    assert masks[:, 0].tolist() == (offsets < 4).tolist()
    assert masks[:, 1].tolist() == (offsets >= 32).tolist()
    places = np.array([0, 1, 2] * 16)
    assert np.concatenate([one.step_positions for one in found]).tolist() == places.tolist()
    assert masks[:, 2].tolist() == (places == 0).tolist()
    # In the first step it is not known yet that steps have more than one token.
    assert masks[:, 3].tolist() == [at > 2 and place == 1 for at, place in enumerate(places)]
    assert masks[:, 4].tolist() == [at > 2 and place == 2 for at, place in enumerate(places)]
    # Nor that the second comes after one of full length; of the first in a row, the step before is
    # not known.
    assert masks[:, 5].tolist() == [at not in (0, 3, 30, 39) and place == 0 for at, place in enumerate(places.tolist())]
    bets.begin([])
    blind = bets.bets_on(replace(rows[1], steps=None))
    assert blind.masks.shape == (9, 2)
    assert blind.step_positions.tolist() == [-1] * 9


def test_where_p_is_zero_bets_on_distributions_stay_at_one() -> None:
    p, q = torch.tensor([[0.6, 0.4, 0.0]], dtype=torch.float64), torch.tensor([[0.2, 0.2, 0.6]], dtype=torch.float64)
    bets = Bets()
    bets.begin([])
    found = bets.bets_on(Row([2], p, q, q.sqrt(), q))
    kept = {"argmax", "sharper", "draft-leak", "wrong-q", "suspected-model", "noise-of-steps", "one-uniform"}
    assert {found.ratios[0, at] for at, name in enumerate(found.alternatives) if name in kept} == {1.0}
    assert np.isfinite(found.ratios).all()
    bets.begin([])
    again = bets.bets_on(Row([2], p, q, q.sqrt(), q))
    kept |= {"noise-of-texts", "same-tokens"}
    assert {again.ratios[0, at] for at, name in enumerate(again.alternatives) if name in kept} == {1.0}


def test_where_nothing_is_drafted_q_is_p() -> None:
    """In all positions or in some: no bet is on a draft's distribution there."""
    p, q = tables()
    row = sample_row(p, q, 6, 0)
    assert row.q is not None
    for drafted in ([], [1, 4]):
        given, meant = torch.zeros_like(row.q), row.p.clone()
        given[drafted], meant[drafted] = row.q[drafted], row.q[drafted]
        found = []
        for q_of_row in (given, meant):
            bets = Bets()
            bets.begin(row.prompt)
            found.append(bets.bets_on(replace(row, q=q_of_row)).ratios)
        assert found[0].tolist() == found[1].tolist()


def test_a_sequence_is_compared_with_the_last_one_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specnb_audit.bets.KEPT", 2)
    bets = Bets()
    made = [bets.sequence]
    for batch, expected in (("a", 0), ("b", 1), ("a", 1), ("b", 2), (None, 4), ("c", 5), ("a", 6)):
        bets.begin([len(made)], batch)
        assert bets.references[0] is made[expected]  # of a batch seen long ago: the one before
        made.append(bets.sequence)


def test_steps_between_two_tokens() -> None:
    """All borders: the parts add up, and the steps of two pieces are those of the whole, a divided
    one twice."""
    steps = [3, 1, 4]
    for start, stop in combinations_with_replacement(range(9), 2):
        parts = steps_between(steps, start, stop)
        owner = [number for number, size in enumerate(steps) for _ in range(size)]
        assert parts == [owner[start:stop].count(number) for number in sorted(set(owner[start:stop]))]
