"""Test martingales and the bound on the total variation: expectation 1 under p, and the formulas written down."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from distributions_for_tests import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specnb_audit.evidence import STRENGTHS, Evidence, Moments, TotalVariationEstimate, log_mean

NAMES = ["a", "b", "a", "c"]


def random_ratios(generator: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A distribution and four fair bets on it, one with zeros: `(vocab,)` and `(vocab, 4)`."""
    p = generator.dirichlet(np.ones(vocab))
    distributions = generator.dirichlet(np.full(vocab, 0.3), size=4).T
    return p, distributions / p[:, None]


@given(st.integers(2, 4), st.integers(0, 2), st.integers(0, 10**6))
@settings(examples, max_examples=25)
def test_the_expected_e_value_of_every_alternative_is_one(vocab: int, places: int, seed: int) -> None:
    """Over all sequences of three tokens, whose distributions and subsets depend on the tokens before."""

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


@pytest.mark.parametrize("subsets", [0, 1, 3])
def test_e_values_are_weighted_means_of_products(subsets: int) -> None:
    """Half of an alternative's weight is on all tokens, the rest on the subsets; its bets and strengths share it."""
    generator = np.random.default_rng(7)
    n = 200
    ratios = np.array(generator.exponential(size=(n, 4)) ** 0.5)
    masks = generator.random((n, subsets)) < 0.4
    evidence = Evidence(NAMES, subsets)
    pieces = zip(np.split(ratios, [1, 140]), np.split(masks, [1, 140]), strict=True)
    found = np.concatenate([evidence.add(*piece) for piece in pieces])
    assert found.shape == (n, 3)
    assert found.dtype == np.float64
    for column, name in enumerate(["a", "b", "c"]):
        expected = np.zeros(n)
        bets = [at for at, own in enumerate(NAMES) if own == name]
        for bet in bets:
            for strength in STRENGTHS:
                factors = 1 + strength * (ratios[:, bet] - 1)
                on_all = factors.cumprod()
                on_subsets = [np.where(mask, factors, 1.0).cumprod() for mask in masks.T]
                gained = 0.5 * on_all + 0.5 * np.mean(on_subsets, axis=0) if subsets else on_all
                expected += gained / len(bets) / len(STRENGTHS)
        assert np.exp(found[:, column]) == pytest.approx(expected, rel=1e-5)


def test_evidence_hardly_ever_reaches_one_over_delta() -> None:
    """Ville: of many exact samplers looked at after every token, at most delta ever cross 1/delta."""
    generator, delta, crossed, runs = np.random.default_rng(1), 0.05, 0, 150
    p, bets = random_ratios(generator, 5)
    for _ in range(runs):
        tokens = generator.choice(5, p=p, size=200)
        log_e = log_mean(Evidence(NAMES, 0).add(bets[tokens], np.zeros((200, 0), dtype=bool)))
        crossed += log_e.max() >= -np.log(delta)
    assert stats.binomtest(crossed, runs, delta, alternative="greater").pvalue > 1e-6


def test_e_values_beyond_the_range_of_floats_are_kept_as_logarithms() -> None:
    """Of 5,000 tokens each of which doubles what is staked on it, or takes it."""
    nowhere = np.zeros((5000, 0), dtype=bool)
    rising = Evidence(["a"], 0).add(np.full((5000, 1), 2.0), nowhere)[:, 0]
    assert rising[-1] == pytest.approx(5000 * np.log(1.9) - np.log(5), rel=1e-9)
    falling = Evidence(["a", "b"], 0).add(np.tile([0.0, 2.0], (5000, 1)), nowhere)
    assert falling[-1] == pytest.approx([5000 * np.log(0.98) - np.log(5), rising[-1]], rel=1e-6)
    assert np.exp(log_mean(np.array([[1000.0, 1000.0 + np.log(3)]])) - 1000) == pytest.approx([2.0])
    assert log_mean(np.zeros((2, 3, 4))).shape == (2, 3)


# What would have been detected


def test_a_detectable_deviation_is_detected_with_the_stated_power() -> None:
    """A deviation as large as the audit says it would have found is found with power near 0.9."""
    generator, n, delta = np.random.default_rng(2), 1000, 1e-6
    p, r = generator.dirichlet(np.ones(6)), generator.dirichlet(np.ones(6))
    ratios = (r / p)[:, None]
    nowhere = np.zeros((n, 0), dtype=bool)
    quiet = Evidence(["a"], 0)
    quiet.add(ratios[generator.choice(6, p=p, size=n)], nowhere)
    distance = quiet.detectable(delta)["a"]
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


class ReferenceMoments:
    """What `Moments.detectable` computes, for one bet at one strength, from the ratios of all tokens."""

    def __init__(self, ratios: np.ndarray, strength: float) -> None:
        x, g = ratios - 1, np.log(1 + strength * (ratios - 1))
        self.n = len(ratios)
        under_p, under_r = (self.corrected(x, values) for values in (g, ratios * g))
        self.mean, self.error = (under_p[0], under_r[0]), (under_p[1], under_r[1])
        self.square = np.mean(g**2), np.mean(ratios * g**2)

    @staticmethod
    def corrected(x: np.ndarray, values: np.ndarray) -> tuple[float, float]:
        """The regression's value at x = 0, and the spread about the line."""
        slope, at_zero = np.polyfit(x, values, 1) if np.ptp(x) > 0 else (0.0, values.mean())
        return at_zero, float(np.sqrt(np.mean((values - slope * x - at_zero) ** 2)))

    def excess(self, share: float, threshold: float, power: float) -> float:
        mean, square = ((1 - share) * a + share * b for a, b in (self.mean, self.square))
        unsure = abs(1 - share) * self.error[0] + share * self.error[1]
        variance = max(square - mean**2, 0.0) + unsure**2
        return float(self.n * mean - stats.norm.ppf(power) * np.sqrt(self.n * variance) - threshold)


def reference_shares(ratios: np.ndarray, threshold: np.ndarray, power: float) -> list[float]:
    """The least share of each bet that is detected at any strength, to 1e-9, by bisection; NaN above 2."""
    found = []
    for bet, own in enumerate(ratios.T):
        moments = [ReferenceMoments(own, strength) for strength in STRENGTHS]

        def excess(share: float, moments: list[ReferenceMoments] = moments, bet: int = bet) -> float:
            return max(one.excess(share, threshold[at, bet], power) for at, one in enumerate(moments))

        above = [share for share in (1.0, 2.0) if excess(share) > 0]
        low, high = 0.0, above[0] if above else float("nan")
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if excess(middle) > 0 else (middle, high)
        found.append(high)
    return found


@pytest.mark.parametrize("power", [0.5, 0.9])
def test_the_share_that_is_detected_is_that_of_the_normal_approximation(power: float) -> None:
    """Of bets that are weaker and weaker: the shares go from below 1 to above, and the last are not detected."""
    generator = np.random.default_rng(11)
    strengths = np.array([0.9, 0.5, 0.3, 0.2, 0.15, 0.12, 0.1, 0.05])
    n = 400
    ratios = 1 + strengths * generator.choice([-1.0, 0.25, 1.0], size=(n, len(strengths)))
    threshold = np.log(1e4) + np.arange(40.0).reshape(5, 8) / 10
    moments = Moments(len(strengths))
    for part in np.split(ratios, [100, 130]):
        moments.add(part, np.log1p(np.array(STRENGTHS)[:, None] * (part[:, None] - 1)))
    shares, distances = moments.detectable(threshold, power)
    expected = reference_shares(ratios, threshold, power)
    assert shares == pytest.approx(expected, abs=1e-7, nan_ok=True)
    assert distances == pytest.approx(np.maximum(0, 1 - ratios).mean(axis=0))
    assert (np.array(expected) < 1).sum() >= 2
    assert ((np.array(expected) > 1) & (np.array(expected) < 2)).any()
    assert np.isnan(expected).any()


def test_bets_that_say_nothing_detect_nothing() -> None:
    """Without tokens; without any difference from p; and with a ratio that is always the same."""
    moments = Moments(2)
    shares, distances = moments.detectable(np.full((5, 2), 3.0), 0.9)
    assert np.isnan(shares).all()
    assert distances.tolist() == [0, 0]
    ratios = np.tile([1.0, 0.5], (50, 1))
    moments.add(ratios, np.log1p(np.array(STRENGTHS)[:, None] * (ratios[:, None] - 1)))
    shares, distances = moments.detectable(np.full((5, 2), 3.0), 0.9)
    assert np.isnan(shares).all()
    assert distances.tolist() == [0, 0.5]
    assert moments.detectable(np.full((5, 2), 100.0), 0.9)[0] == pytest.approx([np.nan] * 2, nan_ok=True)
    # A threshold that even p itself passes: any share is detected.
    assert moments.detectable(np.full((5, 2), -100.0), 0.9)[0] == pytest.approx([np.nan, 0.0], nan_ok=True)


@pytest.mark.parametrize(
    ("shares", "distances", "figure"),
    [
        ([0.5, 0.9], [0.6, 0.2], 0.3),
        ([0.5, 1.5], [0.6, 0.3], 0.45),
        ([1.0, 1.0], [1.0, 0.5], 1.0),
        # One that is not detected counts unless it is nearer than the figure.
        ([0.5, np.nan], [0.6, 0.3], 0.3),
        ([0.5, np.nan], [0.6, 0.31], np.nan),
        # At least one alternative itself has to be detected, and none is farther than 1.
        ([1.01, 1.5], [0.6, 0.3], np.nan),
        ([0.5, 1.7], [0.6, 0.6], np.nan),
    ],
)
def test_the_figure_of_an_alternative_is_that_of_its_farthest_distribution(
    shares: list[float], distances: list[float], figure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two alternatives of two bets each; the other one would be found at 0.1."""
    asked = []
    evidence = Evidence(["one", "two", "one", "two"], 3)
    both = np.array([*shares, 0.5, 0.5]), np.array([*distances, 0.2, 0.2])  # in the order of the alternatives
    monkeypatch.setattr(evidence.moments, "detectable", lambda *given: asked.append(given) or both)
    assert evidence.detectable(delta=1e-3) == pytest.approx({"one": figure, "two": 0.1}, nan_ok=True)
    # Bets on every token have half of the weight, shared by two bets at five strengths; so do alternatives, of two.
    assert asked[0][0] == pytest.approx(np.full((5, 4), np.log(1e3 * 2 * 2 * 2 * 5)))
    assert asked[0][1] == 0.9


# The lower bound on the total variation


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


def test_the_deviations_used_and_the_estimate_are_those_of_a_loop() -> None:
    """Three test functions at 60 tokens, in pieces; the interval has the level 0.95 unless another is asked for."""
    deviations = np.random.default_rng(8).uniform(-0.6, 0.9, size=(60, 3))
    distance, sums, chosen = TotalVariationEstimate(), np.zeros(3), []
    for one in deviations:
        chosen.append(one[int(np.argmax(sums))])
        sums = sums + one
    used = [distance.add(part) for part in np.split(deviations, [1, 1, 30])]
    assert np.concatenate(used) == pytest.approx(np.array(chosen))
    assert distance.sums == pytest.approx(sums)
    squares = float(np.square(chosen).sum())
    assert distance.n == 60
    assert (distance.total, distance.squares) == pytest.approx((sum(chosen), squares))
    for level in (0.5, 0.95):
        rates = [2.0**-power for power in range(1, 12)]
        width = min(
            ((math.log(1 / (1 - rate)) - rate) * squares + math.log(22 / (1 - level))) / rate / 60 for rate in rates
        )
        found = distance.estimate(level) if level == 0.5 else distance.estimate()
        mean = sum(chosen) / 60
        assert found == pytest.approx((mean, max(mean - width, 0.0), min(mean + width, 1.0), 60))
        assert type(found.value) is type(found.low) is type(found.high) is float


@pytest.mark.parametrize(("deviation", "value"), [(-0.3, 0.0), (0.0, 0.0), (0.7, 0.7), (1.0, 1.0)])
def test_the_estimate_is_between_0_and_1(deviation: float, value: float) -> None:
    distance = TotalVariationEstimate()
    distance.add(np.full((2000, 1), deviation))
    found = distance.estimate()
    assert found.value == pytest.approx(value)
    assert 0 <= found.low <= found.value <= found.high <= 1
    assert (found.low > 0.5) == (deviation > 0.6)
