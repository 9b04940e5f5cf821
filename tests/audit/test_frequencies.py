"""Tokens that are biased everywhere, and filters that nobody claimed: found and diagnosed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chains import audit_of, sampled_rows, zipf_tables
from torch import Tensor

from specnb.audit.alternatives import MIN_P, TOP_P, alternative_distributions
from specnb.audit.bugs.latest import biased, suppressed
from specnb.audit.claimed import Claimed, claimed_probs
from specnb.audit.condensed import condense_distributions
from specnb.audit.frequencies import Frequencies
from specnb.sampling.distributions import Sampling, standardise

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
