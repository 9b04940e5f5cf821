"""Tokens that are biased everywhere, and filters that nobody claimed: found and diagnosed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chains import audit_of, sampled_rows, zipf_tables
from torch import Tensor

from specnb.distributions import Sampling, standardise
from specnb_audit.alternatives import MIN_P, TOP_P, alternative_distributions, condense_distributions
from specnb_audit.bugs.distributions import biased, suppressed
from specnb_audit.claimed import Claimed, claimed_probs
from specnb_audit.frequencies import Frequencies

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


@pytest.mark.parametrize("rare", [0.25, 0.001])
def test_a_factor_is_seen_over_expected_with_one_added_to_both(rare: float) -> None:
    """40 tokens, all of them the second one; less than one of these is expected if it is very rare."""
    p, frequencies = torch.tensor([[1 - rare, rare]], dtype=torch.float64), Frequencies()
    frequencies.bets(p.expand(40, -1), torch.ones(40, dtype=torch.int64))
    frequencies.begin()
    factors = np.array([1 / (40 * (1 - rare) + 1), 41 / (40 * rare + 1)])
    ratios, _ = frequencies.bets(p, torch.tensor([1]))
    assert ratios[:, 0] == pytest.approx([factors[1] / (p[0].numpy() @ factors)] * 2)


@pytest.mark.parametrize(
    ("actual", "kind", "within"),
    [
        pytest.param(suppressed(P), "token-bias", 2000, id="suppressed token"),
        pytest.param(biased(P), "token-bias", 6000, id="logit bias"),
        pytest.param(standardise(P.log(), Sampling(top_p=0.98)), "tail-cut", 2500, id="top-p 0.98"),
        pytest.param(claimed_probs(P.log(), Claimed(min_p=0.02)), "tail-cut", 2500, id="min-p 0.02"),
        pytest.param(standardise(P.log(), Sampling(top_k=40)), "tail-cut", 6000, id="top-k 40"),
    ],
)
def test_what_nobody_claimed_is_found(actual: Tensor, kind: str, within: int) -> None:
    report = audit_of(sampled_rows(actual, P, None, within // 250, 250, seed=1))
    print(report.found_after, list(report.by_alternative.items())[:3])
    assert report.rejected
    assert report.diagnosis == kind


def test_the_cuts_that_are_bet_on_are_those_of_the_filters() -> None:
    condensed = condense_distributions(torch.zeros(len(P), dtype=torch.int64), P, P)
    cuts = [probs for name, probs in alternative_distributions(condensed, condensed.p > 2) if name == "tail-cut"]
    for distributions, wanted in (
        (cuts[1], [Sampling(top_p=value) for value in TOP_P]),
        (cuts[2], [Claimed(min_p=value) for value in MIN_P]),
    ):
        for probs, sampling in zip(distributions, wanted, strict=True):
            expected = claimed_probs(P.log(), sampling).gather(-1, condensed.ids)
            assert torch.allclose(probs[:, :-2], expected, atol=1e-12)


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
        (13.0, 8.0, [1.0, 1.0]),  # 5 / sqrt(9) = 1.67 standard deviations
        (14.0, 8.0, [1.0, 1.0]),  # exactly 2 are not more than 2
        (15.0, 8.0, [16 / 9, 1.0]),
        (17.0, 8.0, [2.0, 1.0]),  # exactly 3
        (18.0, 8.0, [19 / 9, 19 / 9]),
        (2.0, 8.0, [1.0, 1.0]),
        (1.0, 8.0, [2 / 9, 1.0]),
        (0.0, 15.0, [1 / 16, 1 / 16]),
        (0.0, 0.0, [1.0, 1.0]),
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


def test_before_the_second_sequence_nothing_is_known() -> None:
    frequencies, p = Frequencies(), torch.full((3, 2), 0.5)
    frequencies.begin()
    for _ in range(2):
        ratios, deviations = frequencies.bets(p, torch.zeros(3, dtype=torch.int64))
        assert ratios.tolist() == [[1.0] * 3] * 2
        assert deviations.tolist() == [[0.0] * 3] * 2


def test_probabilities_that_carry_gradients_are_counted_as_any_others() -> None:
    frequencies, p = Frequencies(), torch.full((40, 2), 0.5, requires_grad=True)
    frequencies.bets(p, torch.zeros(40, dtype=torch.int64))
    frequencies.begin()
    ratios, deviations = frequencies.bets(p, torch.zeros(40, dtype=torch.int64))
    factors = 41 / 21, 1 / 21
    assert ratios == pytest.approx(np.full((2, 40), factors[0] / (sum(factors) / 2)))
    assert deviations == pytest.approx(np.full((2, 40), 0.5))
