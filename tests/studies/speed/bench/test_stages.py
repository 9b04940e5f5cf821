"""The tables of the stages on a CPU. No test asserts a time."""

import numpy as np
import pandas as pd
import pytest

from specnb.measure.cost import Costs
from specnb.measure.speed import Speeds
from specnb.models.loading import Pair
from studies.speed.bench import stages
from studies.speed.bench.stages import GAMMA, overhead_fraction, trace, walltime_goals
from studies.speed.bench.tables import settings


def test_the_overhead_is_the_time_beyond_both_models_forward_passes() -> None:
    costs = Costs(np.full((3, 1), 1.0), np.tile([4.0, 5.0], (3, 1)), (1, 3))
    seconds = np.array([[[0.0, 4.0, 0.0], [1.25, 2.5, 0.25]]] * 3)  # per token; 2 tokens a step: a step takes 8
    speeds = Speeds((0, 2), seconds, np.tile([1.0, 2.0], (3, 1)))
    assert overhead_fraction(costs, speeds, 2) == pytest.approx(1 - (2 * 1.0 + 5.0) / 8.0)


def test_goals_of_walltime_are_measured_over_predicted(pair: Pair) -> None:
    table = pd.DataFrame(
        [
            {"pair": "synthetic", "gamma": gamma, "predicted": 2.0, "measured": 1.8, "measured_low": 1.7,
             "measured_high": 1.9, "tokens_per_step": 2.4, "c": 0.0, "v": 1.0, "rest": 0.02,
             "own": 0.04} | settings(pair, False)
            for gamma in (1, GAMMA)
        ]
    )  # fmt: skip
    rows = {row["name"]: row for row in walltime_goals(table)}
    assert rows["synthetic: measured over predicted, gamma 1"]["ratio"] == pytest.approx(0.9)
    assert rows["synthetic: own share of a step, outside both models' parts"]["ratio"] == 0.02
    assert rows["synthetic: own share of a step, outside both models' runs"]["ratio"] == 0.04
    assert rows["synthetic: measured over predicted, gamma 1, tokens as counted"]["ratio"] == pytest.approx(0.75)
    assert len(rows) == 6


def test_a_trace_has_every_part_of_every_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "prompts_for", lambda *_: [[1, 2, 3]])
    made = trace(pair, new_tokens=9)
    assert (made.groupby("gamma").emitted.sum() == 9).all()
    assert (made.seconds > 0).all()
    assert set(made.part) == {"draft", "target", "rest"}
