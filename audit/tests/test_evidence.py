"""Test martingales and the bound on the total variation: expectation 1 under p, power."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from distributions_for_tests import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb_audit.evidence import Evidence, TotalVariationEstimate, log_mean

NAMES = ["a", "b", "a", "c"]


def random_ratios(generator: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A distribution and four fair bets on it, one with zeros: `(vocab,)` and `(vocab, 4)`."""
    p = generator.dirichlet(np.ones(vocab))
    distributions = generator.dirichlet(np.full(vocab, 0.3), size=4).T
    return p, distributions / p[:, None]


@given(st.integers(2, 4), st.integers(0, 2), st.integers(0, 10**6))
@settings(examples, max_examples=25)
def test_the_expected_e_value_of_every_alternative_is_one(vocab: int, places: int, seed: int) -> None:
    """Over all sequences of three tokens, whose distributions and subsets depend on the tokens
    before."""

    def sampled(context: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        generator = np.random.default_rng([seed, len(context), *context])
        p, ratios = random_ratios(generator, vocab)
        return p, ratios, generator.random(places) < 0.5

    expected = np.zeros(3)
    for text in product(range(vocab), repeat=3):
        seen = [sampled(text[:at]) for at in range(3)]
        chance = np.prod([probs[token] for (probs, _, _), token in zip(seen, text, strict=True)])
        evidence = Evidence(NAMES, places)
        ratios = np.stack([bets[token] for (_, bets, _), token in zip(seen, text, strict=True)])
        log_e = evidence.add(ratios, np.stack([mask for _, _, mask in seen]))
        expected += chance * np.exp(log_e[-1])
    assert expected == pytest.approx(np.ones(3))


def test_e_values_do_not_depend_on_pieces() -> None:
    generator = np.random.default_rng(0)
    ratios, masks = generator.exponential(size=(300, 4)), generator.random((300, 2)) < 0.5
    whole, pieces = Evidence(NAMES, 2), Evidence(NAMES, 2)
    parts = [pieces.add(a, b) for a, b in zip(np.split(ratios, [1, 140]), np.split(masks, [1, 140]), strict=True)]
    assert np.concatenate(parts) == pytest.approx(whole.add(ratios, masks))


def test_e_values_beyond_the_range_of_floats_are_kept_as_logarithms() -> None:
    """Of 5,000 tokens each of which doubles what is staked on it, or takes it."""
    nowhere = np.zeros((5000, 0), dtype=bool)
    rising = Evidence(["a"], 0).add(np.full((5000, 1), 2.0), nowhere)[:, 0]
    assert rising[-1] == pytest.approx(5000 * np.log(1.9) - np.log(5), rel=1e-9)
    falling = Evidence(["a", "b"], 0).add(np.tile([0.0, 2.0], (5000, 1)), nowhere)
    assert falling[-1] == pytest.approx([5000 * np.log(0.98) - np.log(5), rising[-1]], rel=1e-6)
    assert np.exp(log_mean(np.array([[1000.0, 1000.0 + np.log(3)]])) - 1000) == pytest.approx([2.0])
    assert log_mean(np.zeros((2, 3, 4))).shape == (2, 3)


def test_a_detectable_deviation_is_detected_with_the_stated_power() -> None:
    """A deviation as large as the audit says it would have found is found with power near 0.9."""
    generator, n, delta = np.random.default_rng(2), 1000, 1e-6
    p, r = generator.dirichlet(np.ones(6)), generator.dirichlet(np.ones(6))
    ratios = (r / p)[:, None]
    nowhere = np.zeros((n, 0), dtype=bool)
    quiet = Evidence(["a"], 0)
    quiet.add(ratios[generator.choice(6, p=p, size=n)], nowhere)
    distance = quiet.detectable(-math.log(delta))["a"]
    share = distance / (np.abs(p - r).sum() / 2)
    assert 0 < share < 1

    def power(share: float) -> float:
        found = 0
        for _ in range(50):
            tokens = generator.choice(6, p=(1 - share) * p + share * r, size=n)
            found += Evidence(["a"], 0).add(ratios[tokens], nowhere)[-1, 0] >= -np.log(delta)
        return found / 50

    assert 0.8 < power(share) <= 1
    assert power(share / 2) < 0.3


def test_an_alternative_among_k_is_detectable_as_one_alone_at_delta_over_k() -> None:
    """The e-value is the mean over K alternatives, so one of them has to reach K times as much."""
    generator = np.random.default_rng(3)
    p, bets = random_ratios(generator, 6)
    ratios = bets[generator.choice(6, p=p, size=2000)]
    nowhere = np.zeros((2000, 0), dtype=bool)
    alone, among = Evidence(["a"], 0), Evidence(["a", "b", "c", "d"], 0)
    alone.add(ratios[:, :1], nowhere)
    among.add(ratios, nowhere)
    assert among.detectable(math.log(1e6))["a"] == pytest.approx(alone.detectable(math.log(4e6))["a"])
    assert among.detectable(math.log(1e6))["a"] > alone.detectable(math.log(1e6))["a"]


def test_no_deviation_beyond_the_alternative_itself_is_called_detectable() -> None:
    """One alternative, 0.3 away in total variation, with two more tokens each time, as often the
    one as the other."""
    evidence, found = Evidence(["one"], 0), []
    for _ in range(100):
        evidence.add(np.array([[1.6], [0.4]]), np.zeros((2, 0), dtype=bool))
        found.append(evidence.detectable(math.log(100))["one"])
    assert np.isnan(found[0])
    assert not np.isnan(found[-1])
    assert np.nanmax(found) <= 0.3 + 1e-12


def estimated(generator: np.random.Generator, p: np.ndarray, r: np.ndarray, n: int) -> TotalVariationEstimate:
    """Test functions: single tokens, and the tokens likelier under r; on n samples from r."""
    tokens = generator.choice(len(p), p=r, size=n)
    sets = np.concatenate([np.eye(len(p)), [(r > p).astype(float)]])
    distance = TotalVariationEstimate()
    for part in np.array_split(tokens, 5):
        distance.add(sets[:, part].T - sets @ p)
    return distance


@pytest.mark.parametrize("mix", [0.0, 0.1, 0.5])
def test_the_lower_end_stays_below_the_total_variation(mix: float) -> None:
    generator = np.random.default_rng(0)
    p = generator.dirichlet(np.ones(6))
    r = (1 - mix) * p + mix * generator.dirichlet(np.ones(6))
    truth = np.abs(p - r).sum() / 2
    estimates = [estimated(generator, p, r, 800).estimate() for _ in range(60)]
    too_high = sum(one.low > truth for one in estimates)
    assert too_high <= 6  # at most 2.5% of 60 are expected
    if mix == 0.5:
        assert np.mean([one.value for one in estimates]) == pytest.approx(truth, rel=0.15)
        assert np.mean([one.low > 0 for one in estimates]) > 0.9


def test_the_test_function_is_chosen_before_the_token_is_seen() -> None:
    distance = TotalVariationEstimate()
    first = distance.add(np.array([[-0.5, 0.5], [0.2, -0.1], [0.3, 0.4]]))
    assert first.tolist() == [-0.5, -0.1, 0.4]  # the first test function until the second one leads
    assert distance.add(np.array([[1.0, -1.0]])).tolist() == [-1.0]
