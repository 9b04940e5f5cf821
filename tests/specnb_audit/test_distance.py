"""The lower bound on the total variation: its interval is valid at any stopping time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specnb_audit.evidence import RATES, TotalVariationEstimate


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
    estimates = [estimated(generator, p, r, 1500).estimate() for _ in range(200)]
    too_high = sum(one.low > truth for one in estimates)
    assert too_high <= 10  # at most 2.5% of 200 are expected, 10 or more of them have a chance of 3%
    if mix == 0.5:
        assert np.mean([one.value for one in estimates]) == pytest.approx(truth, rel=0.15)
        assert np.mean([one.low > 0 for one in estimates]) > 0.9


def test_the_interval_narrows() -> None:
    generator = np.random.default_rng(0)
    p, r = np.full(4, 0.25), np.array([0.3, 0.3, 0.2, 0.2])
    short, long = (estimated(generator, p, r, n).estimate() for n in (500, 20_000))
    assert long.high - long.low < 0.3 * (short.high - short.low)
    assert long.low < 0.1 < long.high
    assert long.n == 20_000


def test_the_test_function_is_chosen_before_the_token_is_seen() -> None:
    distance = TotalVariationEstimate()
    first = distance.add(np.array([[-0.5, 0.5], [0.2, -0.1], [0.3, 0.4]]))
    assert first.tolist() == [-0.5, -0.1, 0.4]  # the first test function until the second one leads
    assert distance.add(np.array([[1.0, -1.0]])).tolist() == [-1.0]


def test_without_tokens_there_is_no_bound() -> None:
    assert TotalVariationEstimate().estimate() == (0.0, 0.0, 1.0, 0)


def test_the_interval_holds_whenever_one_stops() -> None:
    """Of fair coins looked at after every toss, at most the stated half ever see 0 outside an interval of level 0.5."""
    generator, outside = np.random.default_rng(4), 0
    for _ in range(100):
        distance, ever = TotalVariationEstimate(), False
        for toss in generator.choice([-0.5, 0.5], size=200):
            distance.add(np.array([[toss], [-toss]]).T)  # of two test functions, either may be used
            ever = ever or distance.estimate(level=0.5).low > 0
        outside += ever
    assert outside <= 36  # at most 25 of 100 are expected on one side; more than 36 have a chance of 0.6%


def test_the_interval_has_the_width_of_the_cited_bound() -> None:
    """Two sides and several rates share 1 - level: the least over rates of (penalty + threshold) / rate / n."""
    deviations = np.full((100, 1), 0.25)
    distance = TotalVariationEstimate()
    distance.add(deviations)
    widths = [
        ((-np.log(1 - rate) - rate) * 100 * 0.25**2 + np.log(2 * 11 / 0.1)) / rate / 100
        for rate in 0.5 ** np.arange(1, 12)
    ]
    found = distance.estimate(level=0.9)
    assert found.value == pytest.approx(0.25)
    assert found.high == pytest.approx(0.25 + min(widths))
    assert found.low == pytest.approx(max(0.25 - min(widths), 0.0))


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


def test_a_new_estimate_has_seen_nothing() -> None:
    distance = TotalVariationEstimate()
    assert (distance.n, distance.total, distance.squares) == (0, 0, 0)
    assert distance.estimate(level=0.5) == (0.0, 0.0, 1.0, 0)
    assert np.array_equal(RATES, [0.5**power for power in range(1, 12)])
    distance.add(np.array([[0.25]]))
    assert distance.estimate() == (0.25, 0.0, 1.0, 1)
