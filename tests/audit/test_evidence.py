"""Test martingales: expectation 1 under p (enumerated), Ville's bound (simulated), growth under deviations."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from distributions_for_tests import examples
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specnb.audit.evidence import STRENGTHS, Evidence, log_mean

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
