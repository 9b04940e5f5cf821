"""The tables about time: their columns, and whose rows they replace."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from specnb.measure.cost import Costs
from specnb.measure.statistics import Estimate
from specnb.models.loading import Pair
from studies.speed.bench import tables
from studies.speed.bench.tables import curve, goal_row, keep, keep_goals, settings

COLUMNS = ["name", "ratio", "low", "high", "goal", "machine", "threads", "dtype", "compiled"]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))
    monkeypatch.setattr(tables, "machine", lambda: "this one")
    return tmp_path


def test_rows_of_this_machine_are_replaced_and_others_stay(here: Path) -> None:
    keep("bench", pd.DataFrame({"machine": ["another"], "ratio": [1.0]}))
    for ratio in (2.0, 3.0):
        made = keep("bench", pd.DataFrame({"machine": ["this one"], "ratio": [ratio]}))
    assert made.to_dict("list") == {"machine": ["another", "this one"], "ratio": [1.0, 3.0]}


def test_stages_replace_their_own_rows_only(here: Path) -> None:
    keep_goals([{"machine": "this one", "name": name, "compiled": False, "ratio": 1.0} for name in ("a", "b")])
    keep_goals([{"machine": "this one", "name": "b", "compiled": compiled, "ratio": 2.0} for compiled in (True, False)])
    made = pd.read_csv(here / "data" / "results" / "bench.csv")
    assert list(zip(made.name, made.compiled, made.ratio, strict=True)) == [
        ("a", False, 1),
        ("b", True, 2),
        ("b", False, 2),
    ]


def test_a_number_is_the_same_in_a_file_and_out_of_it(here: Path) -> None:
    for temperature, ratio in ((1.0, 1.0), (0.0, 2.0), (1.0, 3.0), (0.25, 4.0), (0.0, 5.0)):
        row = {"machine": "this one", "temperature": temperature, "ratio": ratio}
        made = keep("bench_walltime", pd.DataFrame([row]), ("machine", "temperature"))
    assert made[["temperature", "ratio"]].to_numpy().tolist() == [[1, 3], [0.25, 4], [0, 5]]


def test_a_row_of_the_bench_has_the_agreed_columns(pair: Pair) -> None:
    row = goal_row("a goal", Estimate(1.5, 1.4, 1.6, 7), 1.1, settings(pair, True))
    assert list(row) == COLUMNS
    assert row["compiled"] is True
    assert row["dtype"] == "float32"
    assert "cores" in row["machine"] or row["machine"]


def test_a_cost_curve_has_the_draft_and_every_length() -> None:
    costs = Costs(np.full((4, 1), 1e-3), np.tile([4e-3, 5e-3], (4, 1)), (1, 3))
    rows = pd.DataFrame(curve(costs, {"pair": "x"}))
    assert rows[["model", "n", "ms"]].to_numpy().tolist() == [
        ["target", 1, pytest.approx(4)], ["target", 3, pytest.approx(5)], ["draft", 1, pytest.approx(1)],
    ]  # fmt: skip
