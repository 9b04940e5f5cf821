"""The bench of a GPU on tiny shapes: what is written, what is resumed, what does not fit. No test asserts a time."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from studies.speed.bench import __main__, against_transformers, published_sizes
from studies.speed.bench.__main__ import main
from studies.speed.bench.plan import LARGE, LLAMA, small_plan
from studies.speed.bench.published_sizes import GpuBench, goals
from studies.speed.bench.setting import Setting, Workload

BENCH = ["name", "ratio", "low", "high", "goal", "machine", "threads", "dtype", "compiled"]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))
    return tmp_path


def bench_with(**found: Any) -> Any:
    """A bench that measures nothing: each task has one row with what is given."""
    bench: Any = GpuBench(torch.device("cpu"), torch.float32, small=True)
    if found:
        bench.rows = lambda task: [{"pair": task.pair, "rows": task.setting.rows} | found]
    return bench


def ratios(bench: GpuBench) -> pd.Series:
    tables = [bench.table(name) for name in published_sizes.TABLES]
    return pd.concat([table for table in tables if len(table)]).set_index("key").ratio


@pytest.mark.filterwarnings("ignore")  # transformers warns of its own settings
def test_all_kinds_of_tasks_run_on_tiny_shapes(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [task for task in small_plan() if task.setting.rows == 1 and task.pair != "trained"][:4]
    table2 = [task for task in small_plan() if task.table == "table2"][:1]
    monkeypatch.setattr(__main__, "small_plan", lambda: few + table2)
    monkeypatch.setattr(against_transformers, "ASSISTED_GAMMAS", (2,))
    main(["--device", "cpu", "--small"])
    assert "0 tasks left" in capsys.readouterr().out
    folder = here / "build" / "small" / "data" / "results" / "gpu"
    tables = {name: pd.read_csv(folder / f"{name}.csv") for name in (*published_sizes.TABLES, "goals")}
    done = pd.concat([tables[name].key for name in published_sizes.TABLES])
    assert set(done) == {task.key for task in few + table2}
    assert set(tables["batch"].pair) == {LARGE, LLAMA}
    assert {"predicted", "measured_low", "over_predicted", "bound_step_ms", "peak_gb", "code"} <= set(tables["batch"])
    assert {"paper_measured", "paper_predicted", "task"} <= set(tables["table2"])
    assert {"transformers", "transformers assisted", "target only", "speculative"} <= set(tables["peers"].sampler)
    assert list(tables["goals"].columns) == BENCH
    assert any("measured over predicted" in name for name in tables["goals"].name)


def test_a_second_run_continues_where_the_first_stopped(here: Path) -> None:
    tasks = small_plan()
    first = bench_with(ratio=1.0)
    assert first.run(tasks, minutes=0) == [task.key for task in tasks]
    first.run(tasks[:2], minutes=1)
    second = bench_with(ratio=2.0)
    assert second.run(tasks, minutes=1) == []
    found = ratios(second)
    assert [found[task.key] for task in tasks] == [1.0, 1.0] + [2.0] * (len(tasks) - 2)


@pytest.mark.parametrize("change", ["code", "driver", None])
def test_under_other_conditions_a_task_is_measured_again(here: Path, change: str | None) -> None:
    task = small_plan()[1]
    bench_with(ratio=1.0).run([task], minutes=1)
    bench = bench_with(ratio=2.0)
    if change:
        bench.conditions[change] = "another"
    assert bench.run([task], minutes=1, anew=change is None) == []
    assert ratios(bench).tolist() == [2.0]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GB are too many\n..."), MemoryError("a batch of 3 fits")])
def test_running_out_of_memory_is_recorded_and_the_bench_continues(
    here: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    tasks = [task for task in small_plan() if task.pair == LLAMA]

    def too_large(load: Workload, setting: Setting, bandwidth: float) -> dict[str, Any]:
        if setting.rows == 1:
            raise error
        return {"pair": load.name, "rows": setting.rows, "predicted": 1.0}

    monkeypatch.setattr(published_sizes, "measure_setting", too_large)
    bench = bench_with()
    bench.workload = lambda task: type("Load", (), {"name": task.pair})
    monkeypatch.setattr(published_sizes, "goals", lambda *_: [])
    assert bench.run(tasks, minutes=1) == []
    table = bench.table("batch").set_index("rows")
    assert table.note[1] == f"out of memory: {str(error).splitlines()[0]}"
    assert np.isnan(table.predicted[1])
    assert table.predicted[2] == 1.0


def test_goals_are_ratios_that_should_be_large() -> None:
    under = {"machine": "x", "threads": 1, "dtype": "bfloat16", "compiled": "graph"}
    figures = {"predicted": 2.0, "counted": 1.6, "measured": 1.8, "measured_low": 1.7, "measured_high": 1.9,
               "calls": 1.7, "calls_low": 1.6, "calls_high": 1.8, "bound_plain_ms": 4.0, "plain_ms": 5.0,
               "plain_ms_low": 4.5, "plain_ms_high": 8.0, "gamma": 4}  # fmt: skip
    batch = pd.DataFrame(
        [{"pair": pair, "rows": rows} | figures | under for pair in (LARGE, LLAMA, "trained") for rows in (1, 2)]
        + [{"pair": LARGE, "rows": 1, "note": "out of memory"} | under]
    )
    compared = pd.DataFrame(
        {"pair": "trained", "sampler": sampler, "over_assisted": ratio, "over_assisted_low": ratio - 1,
         "over_assisted_high": ratio + 1} | under
        for sampler, ratio in (("speculative", 6.0), ("speculative", 7.0), ("target only", 9.0))
    )  # fmt: skip
    rows = goals(batch, compared)
    assert all(list(row) == BENCH for row in rows)
    with_intervals = [row for row in rows if not np.isnan(row["low"])]
    assert [[row[name] for name in ("ratio", "low", "high", "goal")] for row in with_intervals] == [
        pytest.approx(expected)
        for expected in ((0.9, 0.85, 0.95, 0.85), (0.85, 0.8, 0.9, 0.85), (0.8, 0.5, 4 / 4.5, 1 / 1.3), (7, 6, 8, 5))
    ]
    assert [row["ratio"] for row in rows if "as counted" in row["name"]] == [pytest.approx(1.8 / 1.6)]


def test_the_pair_stays_loaded_for_tasks_that_share_it(here: Path) -> None:
    bench = bench_with()
    one, other = (task for task in small_plan() if task.pair == LLAMA)
    first = bench.workload(one)
    assert bench.workload(other) is first
    assert bench.workload(replace(one, alpha=0.5)) is not first


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_error_says_so() -> None:
    with pytest.raises(SystemExit, match="finds no CUDA device"):
        main(["--device", "cuda"])
