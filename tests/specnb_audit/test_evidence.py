"""Test martingales: expectation 1 under p (enumerated), Ville's bound (simulated), growth under deviations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from distributions_for_tests import examples
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specnb_audit.evidence import STRENGTHS, Evidence, Moments, log_mean

NAMES = ["a", "b", "a", "c"]


def random_ratios(generator: np.random.Generator, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """A distribution and four fair bets on it, one with zeros: `(vocab,)` and `(vocab, 4)`."""
    p = generator.dirichlet(np.ones(vocab))
    distributions = generator.dirichlet(np.full(vocab, 0.3), size=4).T
    return p, distributions / p[:, None]


@given(st.integers(2, 4), st.integers(0, 2), st.integers(0, 10**6))
@examples
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


def test_log_mean_is_the_logarithm_of_the_mean() -> None:
    logs = np.log([[1.0, 3.0], [2.0, 1e-300]])
    assert np.exp(log_mean(logs)) == pytest.approx([2.0, 1.0])


def test_e_values_do_not_depend_on_pieces() -> None:
    generator = np.random.default_rng(0)
    ratios, masks = generator.exponential(size=(300, 4)), generator.random((300, 2)) < 0.5
    whole, pieces = Evidence(NAMES, 2), Evidence(NAMES, 2)
    parts = [pieces.add(a, b) for a, b in zip(np.split(ratios, [1, 140]), np.split(masks, [1, 140]), strict=True)]
    assert np.concatenate(parts) == pytest.approx(whole.add(ratios, masks))
    assert whole.add(ratios[:0], masks[:0]).shape == (0, 3)


def test_the_e_value_of_one_bet_is_the_mean_product() -> None:
    ratios = np.array([[2.0], [0.0], [3.0]])
    log_e = Evidence(["a"], 0).add(ratios, np.zeros((3, 0), dtype=bool))[-1, 0]
    products = [(1 + s) * (1 - s) * (1 + 2 * s) for s in STRENGTHS]
    assert np.exp(log_e) == pytest.approx(np.mean(products))


def test_evidence_hardly_ever_reaches_one_over_delta() -> None:
    """Ville: of many exact samplers looked at after every token, at most delta ever cross 1/delta."""
    generator, delta, crossed, runs = np.random.default_rng(1), 0.05, 0, 400
    p, bets = random_ratios(generator, 5)
    for _ in range(runs):
        tokens = generator.choice(5, p=p, size=400)
        log_e = log_mean(Evidence(NAMES, 0).add(bets[tokens], np.zeros((400, 0), dtype=bool)))
        crossed += log_e.max() >= -np.log(delta)
    assert stats.binomtest(crossed, runs, delta, alternative="greater").pvalue > 1e-6


def test_a_detectable_deviation_is_detected_with_the_stated_power() -> None:
    """A deviation as large as the audit says it would have found is found with power near 0.9."""
    generator, n, delta = np.random.default_rng(2), 2000, 1e-6
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
        for _ in range(200):
            tokens = generator.choice(6, p=(1 - share) * p + share * r, size=n)
            found += Evidence(["a"], 0).add(ratios[tokens], nowhere)[-1, 0] >= -np.log(delta)
        return found / 200

    assert 0.8 < power(share) <= 1
    assert power(share / 2) < 0.3


def test_a_lucky_sample_does_not_make_the_figure_too_small() -> None:
    """At the mean of the 8 smallest of 80 figures, 40 audits of other samples: 30 or fewer have a chance of 0.5%.

    Without the correction of the moments 19 find the deviation. A reader looks at the smallest figures.
    """
    generator, n, delta = np.random.default_rng(4), 600, 1e-6
    p = generator.dirichlet(np.ones(6))
    r = np.eye(6)[p.argmax()]
    ratios, nowhere = (r / p)[:, None], np.zeros((n, 0), dtype=bool)

    def audited(actual: np.ndarray) -> tuple[Evidence, np.ndarray]:
        evidence = Evidence(["a"], 0)
        return evidence, evidence.add(ratios[generator.choice(6, p=actual, size=n)], nowhere)

    figures = sorted(audited(p)[0].detectable(delta)["a"] for _ in range(80))
    share = float(np.mean(figures[:8])) / (1 - p.max())
    found = sum(audited((1 - share) * p + share * r)[1].max() >= -np.log(delta) for _ in range(40))
    assert found > 30


def test_too_few_tokens_detect_nothing() -> None:
    evidence = Evidence(["a"], 0)
    evidence.add(np.full((3, 1), 1.1), np.zeros((3, 0), dtype=bool))
    assert np.isnan(evidence.detectable(1e-6)["a"])


def test_an_alternative_among_k_is_detectable_as_one_alone_at_delta_over_k() -> None:
    """The e-value is the mean over K alternatives, so one of them has to reach K times as much."""
    generator = np.random.default_rng(3)
    p, bets = random_ratios(generator, 6)
    ratios = bets[generator.choice(6, p=p, size=2000)]
    nowhere = np.zeros((2000, 0), dtype=bool)
    alone, among = Evidence(["a"], 0), Evidence(["a", "b", "c", "d"], 0)
    alone.add(ratios[:, :1], nowhere)
    among.add(ratios, nowhere)
    assert among.detectable(1e-6)["a"] == pytest.approx(alone.detectable(1e-6 / 4)["a"])
    assert among.detectable(1e-6)["a"] > alone.detectable(1e-6)["a"]


def test_no_deviation_beyond_the_alternative_itself_is_called_detectable() -> None:
    """One alternative, 0.3 away in total variation, with two more tokens each time, as often the one as the other."""
    evidence, found = Evidence(["one"], 0), []
    for _ in range(100):
        evidence.add(np.array([[1.6], [0.4]]), np.zeros((2, 0), dtype=bool))
        found.append(evidence.detectable(delta=0.01)["one"])
    assert np.isnan(found[0])
    assert not np.isnan(found[-1])
    assert np.nanmax(found) <= 0.3 + 1e-12


def test_no_distribution_is_farther_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two distributions is 0.9 away, and would be found from 1.4 times as far on: there is none."""
    evidence = Evidence(["one", "one"], 0)
    found = np.array([0.5, 1.4]), np.array([0.5, 0.9])
    monkeypatch.setattr(evidence.moments, "detectable", lambda threshold, power: found)
    assert np.isnan(evidence.detectable(delta=1e-6)["one"])
    found[0][1] = 1.1
    assert evidence.detectable(delta=1e-6)["one"] == pytest.approx(0.99)


# Against calculations of their own


@pytest.mark.parametrize("subsets", [0, 1, 3])
def test_e_values_are_weighted_means_of_products(subsets: int) -> None:
    """Half of an alternative's weight is on all tokens, the rest on the subsets; its bets and strengths share it."""
    generator = np.random.default_rng(7)
    n = 200
    ratios = np.array(generator.exponential(size=(n, 4)) ** 0.5)
    masks = generator.random((n, subsets)) < 0.4
    found = Evidence(NAMES, subsets).add(ratios, masks)
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


def test_e_values_beyond_the_range_of_floats_are_kept_as_logarithms() -> None:
    """Of 5,000 tokens each of which doubles what is staked on it, or takes it."""
    nowhere = np.zeros((5000, 0), dtype=bool)
    rising = Evidence(["a"], 0).add(np.full((5000, 1), 2.0), nowhere)[:, 0]
    assert rising[-1] == pytest.approx(5000 * np.log(1.9) - np.log(5), rel=1e-9)
    falling = Evidence(["a", "b"], 0).add(np.tile([0.0, 2.0], (5000, 1)), nowhere)
    assert falling[-1] == pytest.approx([5000 * np.log(0.98) - np.log(5), rising[-1]], rel=1e-6)
    assert np.exp(log_mean(np.array([[1000.0, 1000.0 + np.log(3)]])) - 1000) == pytest.approx([2.0])
    assert log_mean(np.zeros((2, 3, 4))).shape == (2, 3)


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


@pytest.mark.parametrize("by", [-0.5, 0.5])
def test_a_share_is_detected_by_however_little_the_threshold_is_passed(by: float) -> None:
    """The threshold is `by` above what no share, the share 1, and the farthest share that is tried come to."""
    generator = np.random.default_rng(5)
    ratios = 1 + 0.3 * generator.choice([-1.0, 0.25, 1.0], size=(300, 1))
    moments = Moments(1)
    moments.add(ratios, np.log1p(np.array(STRENGTHS)[:, None] * (ratios[:, None] - 1)))
    reached = [max(ReferenceMoments(ratios[:, 0], s).excess(share, 0.0, 0.9) for s in STRENGTHS) for share in (0, 1, 2)]
    assert reached == sorted(reached)
    found = [float(moments.detectable(np.full((5, 1), one + by), 0.9)[0][0]) for one in reached]
    if by < 0:
        assert found[0] == 0
        assert 0.9 < found[1] < 1
        assert 1.9 < found[2] < 2
    else:
        assert 0 < found[0] < 0.5
        assert 1 < found[1] < 1.1
        assert np.isnan(found[2])


def test_the_distance_is_the_mean_over_tokens_one_token_included() -> None:
    moments = Moments(2)
    for ratios, distances in (([0.25, 1.5], [0.75, 0.0]), ([1.75, 0.5], [0.375, 0.25])):
        moments.add(np.array([ratios]), np.log1p(np.array(STRENGTHS)[:, None] * (np.array([ratios]) - 1)[:, None]))
        assert moments.detectable(np.full((5, 2), 3.0), 0.9)[1].tolist() == distances


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
        ([0.5, 0.2], [0.6, 0.6], 0.3),
        ([0.5, 0.9], [0.6, 0.2], 0.3),
        ([1.0, 0.5], [0.4, 0.2], 0.4),
        ([1.0, 1.0], [1.0, 0.5], 1.0),
        ([0.5, 1.5], [0.6, 0.3], 0.45),
        ([0.0, 0.0], [0.6, 0.3], 0.0),
        # One that is not detected counts unless it is nearer than the figure.
        ([0.5, np.nan], [0.6, 0.2], 0.3),
        ([0.5, np.nan], [0.6, 0.3], 0.3),
        ([0.5, np.nan], [0.6, 0.31], np.nan),
        ([np.nan, np.nan], [0.6, 0.3], np.nan),
        # At least one alternative itself has to be detected, and none is farther than 1.
        ([1.01, np.nan], [0.6, 0.3], np.nan),
        ([1.01, 1.5], [0.6, 0.3], np.nan),
        ([0.5, 1.7], [0.6, 0.6], np.nan),
    ],
)
def test_the_figure_of_an_alternative_is_that_of_its_farthest_distribution(
    shares: list[float], distances: list[float], figure: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two alternatives of two bets each, one after the other and mixed up; the other one would be found at 0.1."""
    asked = []
    for names, order in ((["one", "one", "two", "two"], [0, 1, 2, 3]), (["one", "two", "one", "two"], [0, 2, 1, 3])):
        evidence = Evidence(names, 3)
        both = np.array([*shares, 0.5, 0.5]), np.array([*distances, 0.2, 0.2])
        assert [names[at] for at in evidence.order] == ["one", "one", "two", "two"]
        assert evidence.order.tolist() == order
        monkeypatch.setattr(
            evidence.moments, "detectable", lambda threshold, power, both=both: asked.append((threshold, power)) or both
        )
        found = evidence.detectable(delta=1e-3)
        assert list(found) == ["one", "two"]
        assert found == pytest.approx({"one": figure, "two": 0.1}, nan_ok=True)
        assert all(type(value) is float for value in found.values())
    # Bets on every token have half of the weight, shared by two bets at five strengths; so do alternatives, of two.
    for threshold, power in asked:
        assert threshold == pytest.approx(np.full((5, 4), np.log(1e3 * 2 * 2 * 2 * 5)))
        assert power == 0.9
    assert np.isnan(evidence.detectable(1e-6, power=0.8)["one"]) == np.isnan(figure)
    assert asked[-1][1] == 0.8
