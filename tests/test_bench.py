"""The tables of the bench: what they hold, and whose rows they replace. No time is judged here."""

import numpy as np
import pandas as pd
import pytest

from specnb import bench
from specnb.bench import GAMMA, curve, goal_row, keep, own_share, settings, trace, walltime_goals
from specnb.cost import Costs, Speeds
from specnb.dialled import Shape, dialled_pair
from specnb.estimate import Estimate

COLUMNS = ["name", "ratio", "low", "high", "goal", "machine", "threads", "dtype", "compiled"]


@pytest.fixture(scope="module")
def pair():
    return dialled_pair(0.7, Shape(1, 32, 32, 2), Shape(1, 16, 16, 1), vocab=64, context=64)


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))
    monkeypatch.setattr(bench, "machine", lambda: "this one")


def test_rows_of_this_machine_are_replaced_and_others_stay(here):
    keep("bench", pd.DataFrame({"machine": ["another"], "ratio": [1.0]}))
    for ratio in (2.0, 3.0):
        made = keep("bench", pd.DataFrame({"machine": ["this one"], "ratio": [ratio]}))
    assert made.to_dict("list") == {"machine": ["another", "this one"], "ratio": [1.0, 3.0]}


def test_a_row_of_the_bench_has_the_agreed_columns(pair):
    row = goal_row("a goal", Estimate(1.5, 1.4, 1.6, 7), 1.1, settings(pair, True))
    assert list(row) == COLUMNS
    assert row["compiled"] is True
    assert row["dtype"] == "float32"
    assert "cores" in row["machine"] or row["machine"]


def test_the_own_share_is_what_neither_model_accounts_for():
    costs = Costs(np.full(3, 1.0), np.tile([4.0, 5.0], (3, 1)), (1, 3))
    seconds = np.array([[[0.0, 4.0, 0.0], [1.25, 2.5, 0.25]]] * 3)  # per token; 2 tokens a step: a step takes 8
    speeds = Speeds((0, 2), seconds, np.tile([1.0, 2.0], (3, 1)))
    assert own_share(costs, speeds, 2) == pytest.approx(1 - (2 * 1.0 + 5.0) / 8.0)


def test_a_cost_curve_has_the_draft_and_every_length():
    costs = Costs(np.full(4, 1e-3), np.tile([4e-3, 5e-3], (4, 1)), (1, 3))
    rows = pd.DataFrame(curve(costs, {"pair": "x"}))
    assert rows[["model", "n", "ms"]].to_numpy().tolist() == [
        ["target", 1, pytest.approx(4)], ["target", 3, pytest.approx(5)], ["draft", 1, pytest.approx(1)],
    ]  # fmt: skip


def test_goals_of_walltime_are_measured_over_predicted(pair):
    table = pd.DataFrame(
        [
            {"pair": "dialled", "gamma": gamma, "predicted": 2.0, "measured": 1.8, "measured_low": 1.7,
             "measured_high": 1.9, "tokens_per_step": 2.4, "c": 0.0, "v": 1.0, "rest": 0.02,
             "own": 0.04} | settings(pair, False)
            for gamma in (1, GAMMA)
        ]
    )  # fmt: skip
    rows = {row["name"]: row for row in walltime_goals(table)}
    assert rows["dialled: measured over predicted, gamma 1"]["ratio"] == pytest.approx(0.9)
    assert rows["dialled: own share of a step, outside both models' parts"]["ratio"] == 0.02
    assert rows["dialled: own share of a step, outside both models' runs"]["ratio"] == 0.04
    assert rows["dialled: measured over predicted, gamma 1, tokens as counted"]["ratio"] == pytest.approx(0.75)
    assert len(rows) == 6


def test_a_trace_has_every_part_of_every_step(pair, monkeypatch):
    monkeypatch.setattr(bench, "prompts_for", lambda *_: [[1, 2, 3]])
    made = trace(pair, new_tokens=9)
    assert (made.groupby("gamma").emitted.sum() == 9).all()
    assert (made.seconds > 0).all()
    assert set(made.part) == {"draft", "target", "rest"}
