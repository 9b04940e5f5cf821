"""All bets on a row are those of a reference that computes them token by token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from reference_bets import ReferenceBets
from samplers import sample_row, tables
from torch import Tensor

from specnb.distributions import sample
from specnb_audit.bets import Bets, Row, steps_between
from specnb_audit.frequencies import Frequencies


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize(("vocab", "seed"), [(7, 0), (7, 5), (200, 0)])
def test_all_bets_are_those_of_the_reference(drafted: bool, vocab: int, seed: int) -> None:
    """Sequences of several lengths, in pieces and whole, whose prompts come again; nothing is drafted in places.

    Of 200 tokens 72 have no cell of their own.
    """
    generator = np.random.default_rng(3)

    def random_probs(n: int) -> Tensor:
        return torch.from_numpy(generator.dirichlet(np.full(vocab, 0.8), size=n))

    def piece(n: int, continues: bool) -> Row:
        p, q = random_probs(n), random_probs(n)
        q[1::3] = 0
        p[0, 5] = p[0, 4]  # a tie
        p[0] /= p[0].sum()
        tokens = [int(sample(probs, torch.tensor(u))) for probs, u in zip(p, generator.random(n), strict=True)]
        if not drafted:
            return Row(tokens, p, continues=continues)
        return Row(tokens, p, q, random_probs(n), random_probs(n), continues=continues)

    bets, reference = Bets(seed), ReferenceBets(seed)
    texts = [([3], [5, 1, 4]), ([], [9]), ([3], [12]), ([3], [2, 6]), ([6, 0], [1]), ([], [10])]
    for prompt, sizes in texts:
        bets.begin(tuple(prompt))
        reference.begin(prompt)
        for number, n in enumerate(sizes):
            row = piece(n, continues=number > 0)
            found = bets.bets_on(row)
            expected, deviations = reference.bets_on(row)
            assert set(found.alternatives) == set(expected)
            for name, ratios in expected.items():
                columns = [at for at, own in enumerate(found.alternatives) if own == name]
                assert len(columns) == len(ratios), name
                for at, ratio in zip(columns, ratios, strict=True):
                    assert found.ratios[:, at] == pytest.approx(ratio, rel=1e-7, abs=1e-9), name
            assert found.deviations.shape == (n, len(deviations))
            assert found.deviations == pytest.approx(np.stack(deviations, axis=1), abs=1e-9)
            assert found.ratios.dtype == found.deviations.dtype == np.float64


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
    # Nor that the second comes after one of full length; of the first in a row, the step before is not known.
    assert masks[:, 5].tolist() == [at not in (0, 3, 30, 39) and place == 0 for at, place in enumerate(places.tolist())]
    bets.begin([])
    blind = bets.bets_on(replace(rows[1], steps=None))
    assert blind.masks.shape == (9, 2)
    assert blind.step_positions.tolist() == [-1] * 9


def test_a_token_that_float32_hardly_holds_is_no_overflow() -> None:
    """1 / 1e-45 is more than the largest float32."""
    p = torch.tensor([[1.0, 1e-45]])
    bets = Bets()
    bets.begin([])
    found = bets.bets_on(Row([1], p, p.flip(1), suspected=p.flip(1)))
    for name in ("suspected-model", "draft-leak"):
        assert found.ratios[0, found.alternatives.index(name)] == pytest.approx(1 / float(p[0, 1]), rel=1e-5)
    assert np.isfinite(found.ratios).all()


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


def test_the_prompts_seen_longest_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specnb_audit.bets.KEPT", 3)
    bets, kept = Bets(), []
    for prompt in (0, 1, 2, 0, 3, 4, 0):
        last = bets.sequence
        bets.begin([prompt])
        kept.append([one for (one,) in bets.last_with_prompt])
        assert bets.references[0] is last
        assert bets.references[1] is not bets.sequence
        assert bets.last_with_prompt[(prompt,)] is bets.sequence
    assert kept == [[0], [0, 1], [0, 1, 2], [1, 2, 0], [2, 0, 3], [0, 3, 4], [3, 4, 0]]


def test_a_sequence_is_compared_with_the_last_one_of_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specnb_audit.bets.KEPT", 2)
    bets = Bets()
    made = [bets.sequence]
    for batch, expected in (("a", 0), ("b", 1), ("a", 1), ("b", 2), (None, 4), ("c", 5), ("a", 6)):
        bets.begin([len(made)], batch)
        assert bets.references[0] is made[expected]  # of a batch seen long ago: the one before
        made.append(bets.sequence)


@pytest.mark.parametrize(
    ("steps", "start", "stop", "parts"),
    [
        ([3, 1, 4], 0, 8, [3, 1, 4]),
        ([3, 1, 4], 2, 6, [1, 1, 2]),
        ([3, 1, 4], 4, 7, [3]),
        ([3, 1, 4], 5, 5, []),
        ([], 0, 0, []),
    ],
)
def test_steps_between_two_tokens(steps: list[int], start: int, stop: int, parts: list[int]) -> None:
    found = steps_between(steps, start, stop)
    assert found == parts
    assert all(type(size) is int for size in found)


def test_bets_and_deviations_are_those_of_counts() -> None:
    """Four sequences, in float32 and float64: before each, the factors come from those before it alone."""
    random = np.random.default_rng(2)
    vocab, n = 6, 50
    bias = np.array([3.0, 1, 1, 1, 0.2, 1])
    for dtype, error in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        frequencies, seen, expected = Frequencies(), np.zeros(vocab), np.zeros(vocab)
        frequencies.begin()
        for _ in range(4):
            p = random.dirichlet(np.ones(vocab), size=n)
            actual = p * bias / (p * bias).sum(axis=1, keepdims=True)
            tokens = np.array([random.choice(vocab, p=line) for line in actual])
            p = torch.from_numpy(p).to(dtype).double().numpy()
            deviation = np.abs(seen - expected) / np.sqrt(expected + 1)
            wanted, tests = np.ones((2, n)), np.zeros((2, n))
            for bet, limit in enumerate((2.0, 3.0)):
                factor = np.where(deviation > limit, (seen + 1) / (expected + 1), 1.0)
                likelier = (factor > 1) * 1.0
                wanted[bet] = factor[tokens] / (p @ factor)
                tests[bet] = likelier[tokens] - p @ likelier
            ratios, deviations = [], []
            for part in (slice(0, 20), slice(20, n)):  # a sequence in pieces has begun once
                found = frequencies.bets(torch.from_numpy(p[part]).to(dtype), torch.from_numpy(tokens[part]))
                ratios.append(found[0])
                deviations.append(found[1])
            assert np.concatenate(ratios, axis=1) == pytest.approx(wanted, rel=error, abs=error)
            assert np.concatenate(deviations, axis=1) == pytest.approx(tests, abs=error)
            assert all(one.dtype == np.float64 for one in found)
            seen += np.bincount(tokens, minlength=vocab)
            expected += p.sum(axis=0)
            frequencies.begin()
        assert frequencies.counts is not None
        assert frequencies.counts.dtype == torch.float64
        assert frequencies.counts.numpy() == pytest.approx(np.stack([seen, expected]), rel=1e-12)
        assert np.abs(wanted - 1).max() > 0.1


@pytest.mark.parametrize(
    ("seen", "expected", "factors"),
    [
        (14.0, 8.0, [1.0, 1.0]),  # exactly 2 are not more than 2
        (15.0, 8.0, [16 / 9, 1.0]),
        (17.0, 8.0, [2.0, 1.0]),  # exactly 3
        (18.0, 8.0, [19 / 9, 19 / 9]),
        (1.0, 8.0, [2 / 9, 1.0]),
        (0.0, 15.0, [1 / 16, 1 / 16]),
    ],
)
def test_a_token_is_bet_on_beyond_two_or_three_standard_deviations(
    seen: float, expected: float, factors: list[float]
) -> None:
    counts = torch.tensor([[seen, 4.0], [expected, 4.0]], dtype=torch.float64)
    found = Frequencies._factors(*counts)
    assert found.shape == (2, 2)
    assert found[0].tolist() == pytest.approx(factors)
    assert found[1].tolist() == [1.0, 1.0]
