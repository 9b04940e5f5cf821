"""The recommended gamma follows from the measured costs, and is 0 where no gamma helps."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from specnb.measure import recommend
from tiny import roomy_pair

from specnb.acceptance import Acceptance
from specnb.cost import Costs
from specnb.speedup import predicted_speedup, recommend_gamma
from specnb.statistics import Estimate
from specnb.theory import walltime_improvement


def costs(c: float, verify: Callable[[int], float]) -> Costs:
    """Times without noise; a target forward pass over n tokens takes verify(n)."""
    lengths = tuple(range(1, 10))
    return Costs(np.full((5, 1), c), np.tile([float(verify(n)) for n in lengths], (5, 1)), lengths)


@pytest.mark.parametrize("alpha", [0.7, 1.0])
@pytest.mark.parametrize("slope", [0.0, 0.2])
def test_without_noise_the_prediction_is_the_theorem(alpha: float, slope: float) -> None:
    beta = np.full((8, 10), alpha)

    def verify(n: Any) -> Any:
        return 1 + slope * (n - 1)

    for gamma in (1, 4, 8):
        made = predicted_speedup(beta, costs(0.1, verify), gamma)
        assert made[:3] == pytest.approx([float(walltime_improvement(alpha, gamma, 0.1, verify))] * 3)
        assert made.n == 80


def test_the_interval_covers_rows_that_differ() -> None:
    beta = np.random.default_rng(0).uniform(0.4, 0.9, size=(40, 1)).repeat(20, axis=1)
    made = predicted_speedup(beta, costs(0.1, lambda n: 1), 4)
    assert made.low < made.value < made.high
    assert 0.05 < made.high - made.low < 1


@pytest.mark.parametrize("c", [0.05, 5.0])
def test_a_draft_that_costs_more_than_its_target_is_not_recommended(c: float, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = roomy_pair()
    monkeypatch.setattr(recommend, "measure_costs", lambda *_, **__: costs(c, lambda n: 1))
    made = recommend_gamma(pair, [[token] for token in range(8)], new_tokens=16, progress=False)
    assert (made.gamma == 0) == (c > 1)
    assert set(made.predicted) == set(range(1, 9))
    assert str(made).startswith("do not speculate: the best, gamma = " if c > 1 else f"gamma = {made.gamma}: ")
    assert 0 < made.alpha.low <= made.alpha.value <= made.alpha.high < 1


@pytest.mark.parametrize(("low", "gamma"), [(0.9, 0), (1.0, 0), (1.1, 3)])
def test_a_gamma_is_recommended_only_if_its_whole_interval_is_above_1(
    low: float, gamma: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three gammas the last is predicted to be the fastest, 1.2 times plain decoding."""
    beta = np.full((8, 4), 0.5)
    overlaps = Acceptance([], beta, {"draft": beta}, {"draft": beta})
    monkeypatch.setattr(recommend, "measure_acceptance", lambda *_, **__: overlaps)
    monkeypatch.setattr(recommend, "measure_costs", lambda *_, **__: None)
    monkeypatch.setattr(
        recommend, "predicted_speedup", lambda beta, costs, gamma, seed: Estimate(0.9 + gamma / 10, low, 1.5, beta.size)
    )
    pair: Any = SimpleNamespace(target=None, draft=None)
    assert recommend_gamma(pair, [[1]] * 8, largest=3, progress=False).gamma == gamma


def test_too_little_to_measure_is_refused() -> None:
    for wrong in ({"prompts": [[1]] * 7}, {"largest": 0}, {"largest": 10**6}):
        with pytest.raises(ValueError, match="need at least 8, and from 1 to 64"):
            recommend_gamma(None, **{"prompts": [[1]] * 8, **wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="7 rows are too few"):
        predicted_speedup(np.full((7, 3), 0.5), costs(0.1, lambda n: 1), 4)
    with pytest.raises(ValueError, match=r"not over \[11\]"):
        predicted_speedup(np.full((8, 3), 0.5), costs(0.1, lambda n: 1), 10)
