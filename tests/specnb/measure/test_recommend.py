"""The recommended gamma follows from the measured costs, and is 0 where no gamma helps."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specnb.measure.cost import Costs
from specnb.measure.recommend import predict, recommend_gamma
from specnb.measure.statistics import Estimate
from specnb.models.shapes import Shape
from specnb.theory import walltime_improvement
from studies.speed.synthetic import synthetic_pair


def costs(c: float, verify: Callable[[int], float]) -> Costs:
    """Times without noise; a target forward pass over n tokens takes verify(n)."""
    lengths = tuple(range(1, 10))
    return Costs(np.full((5, 1), c), np.tile([float(verify(n)) for n in lengths], (5, 1)), lengths)


def test_without_noise_the_prediction_is_the_theorem() -> None:
    beta = np.full((8, 10), 0.7)
    for gamma in (1, 4, 8):
        made = predict(beta, costs(0.1, lambda n: 1), gamma)
        assert made[:3] == pytest.approx([float(walltime_improvement(0.7, gamma, 0.1))] * 3)
        assert made.n == 80


def test_verify_cost_counts() -> None:
    beta = np.full((8, 10), 0.7)
    growing = costs(0.1, lambda n: 1 + 0.2 * (n - 1))
    expected = float(walltime_improvement(0.7, 4, 0.1, lambda n: 1 + 0.2 * (n - 1)))
    assert predict(beta, growing, 4)[:3] == pytest.approx([expected] * 3)


def test_the_interval_covers_rows_that_differ() -> None:
    beta = np.random.default_rng(0).uniform(0.4, 0.9, size=(40, 1)).repeat(20, axis=1)
    made = predict(beta, costs(0.1, lambda n: 1), 4)
    assert made.low < made.value < made.high
    assert 0.05 < made.high - made.low < 1


def test_an_alpha_of_one_is_predicted() -> None:
    assert predict(np.ones((8, 10)), costs(0.5, lambda n: 1), 2).value == pytest.approx(3 / 2)


PAIRS = {
    "helps": (0.9, Shape(6, 256, 512, 4), Shape(1, 16, 16, 1), False),
    "never": (0.1, Shape(1, 32, 32, 1), Shape(4, 64, 64, 1), True),
}


@pytest.mark.parametrize("case", PAIRS)
def test_a_draft_that_costs_more_than_its_target_is_not_recommended(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    alpha, target, draft, useless = PAIRS[case]
    pair = synthetic_pair(alpha, target, draft, vocab=256, context=64)
    times = costs(2.0, lambda n: 1) if useless else costs(0.05, lambda n: 1)
    monkeypatch.setattr("specnb.measure.recommend.measure_costs", lambda *_, **__: times)
    made = recommend_gamma(pair, [[token] for token in range(8)], new_tokens=16, progress=False)
    assert (made.gamma == 0) == useless
    assert set(made.predicted) == set(range(1, 9))
    assert str(made).startswith("do not speculate: the best, gamma = " if useless else f"gamma = {made.gamma}: ")


@pytest.mark.parametrize(("low", "gamma"), [(0.9, 0), (1.0, 0), (1.1, 3)])
def test_a_gamma_is_recommended_only_if_its_whole_interval_is_above_1(
    low: float, gamma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three gammas the last is predicted to be the fastest, 1.2 times plain decoding."""
    overlaps = SimpleNamespace(beta={"draft": np.full((8, 4), 0.5)})
    monkeypatch.setattr("specnb.measure.recommend.measure_acceptance", lambda *_, **__: overlaps)
    monkeypatch.setattr("specnb.measure.recommend.measure_costs", lambda *_, **__: None)
    monkeypatch.setattr(
        "specnb.measure.recommend.predict",
        lambda beta, costs, gamma, seed: Estimate(0.9 + gamma / 10, low, 1.5, beta.size),
    )
    pair: Any = SimpleNamespace(target=None, draft=None)
    made = recommend_gamma(pair, [[1]] * 8, largest=3, progress=False)
    assert made.gamma == gamma


def test_a_tiny_pair_gets_a_recommendation() -> None:
    pair = synthetic_pair(0.8, Shape(2, 64, 64, 2), Shape(1, 16, 16, 1), vocab=256, context=64)
    made = recommend_gamma(pair, [[1]] * 8, largest=2, new_tokens=8, repetitions=3, progress=False)
    assert made.gamma in (0, 1, 2)
    assert 0 < made.alpha.low <= made.alpha.value <= made.alpha.high < 1


@pytest.mark.parametrize("wrong", [{"prompts": [[1]] * 7}, {"largest": 0}])
def test_too_little_to_measure_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="need at least 8 and 1"):
        recommend_gamma(None, **{"prompts": [[1]] * 8, **wrong})  # type: ignore[arg-type]


def test_a_gamma_that_was_not_timed_is_refused() -> None:
    with pytest.raises(ValueError, match=r"not over \[11\]"):
        predict(np.full((8, 3), 0.5), costs(0.1, lambda n: 1), 10)
