"""The same code as on a GPU, on tiny shapes: what is written, what is taken up again, what does not fit."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from specnb.experiments.bench import gpu
from specnb.experiments.bench.gpu import Bench, goals, main
from specnb.experiments.bench.plan import LARGE, LLAMA, small_plan

BENCH = ["name", "ratio", "low", "high", "goal", "machine", "threads", "dtype", "compiled"]


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))
    monkeypatch.setattr(gpu, "machine", lambda device: "A Device 9 (tm)")
    return tmp_path / "build" / "gpu"


def begun(anew=False):
    bench = Bench(torch.device("cpu"), torch.float32, small=True)
    bench.begin(anew)
    return bench


def quick(bench, **found):
    """Tasks that measure nothing: a row with what is given."""
    bench.rows = lambda task: [{"key": task.key, "pair": task.pair, "rows": task.how.rows} | found]
    return bench


@pytest.mark.filterwarnings("ignore")  # transformers warns of its own settings
def test_tiny_shapes_go_all_the_way(here, monkeypatch, capsys):
    few = [task for task in small_plan() if task.how.rows == 1 and task.pair != "trained"][:4]
    table2 = [task for task in small_plan() if task.table == "table2"][:1]
    monkeypatch.setattr(gpu, "small_plan", lambda: few + table2)
    monkeypatch.setattr(gpu, "PEER_GAMMAS", (2,))
    main(["--device", "cpu", "--small"])
    assert "0 left" in capsys.readouterr().out
    stamp = json.loads((here / "a-device-9-tm.json").read_text())
    assert stamp["done"] == [task.key for task in few + table2]
    tables = {name: pd.read_csv(here / f"a-device-9-tm_{name}.csv") for name in ("batch", "peers", "table2", "goals")}
    assert set(tables["batch"].pair) == {LARGE, LLAMA}
    assert {"predicted", "measured_low", "over_predicted", "floor_step_ms", "peak_gb"} <= set(tables["batch"])
    assert {"paper_measured", "paper_predicted", "task"} <= set(tables["table2"])
    assert {"transformers", "transformers assisted", "target only", "speculative"} <= set(tables["peers"].sampler)
    assert list(tables["goals"].columns) == BENCH
    assert any("measured over predicted" in name for name in tables["goals"].name)


def test_a_second_run_goes_on_where_the_first_stopped(here):
    tasks = small_plan()
    first = quick(begun(), ratio=1.0)
    assert first.run(tasks, minutes=0) == [task.key for task in tasks]
    done = tasks[:2]
    first.run(done, minutes=1)
    second = quick(begun(), ratio=2.0)
    assert second.done == [task.key for task in done]
    assert second.run(tasks, minutes=1) == []
    ratios = pd.concat([second.table(name) for name in ("batch", "peers", "table2")]).set_index("key").ratio
    assert [ratios[task.key] for task in tasks] == [1.0, 1.0] + [2.0] * (len(tasks) - 2)


def test_an_interrupted_task_is_done_again_and_its_row_replaced(here):
    task = small_plan()[1]
    bench = quick(begun(), ratio=1.0)
    bench.keep(task, bench.rows(task))
    again = quick(begun(), ratio=2.0)
    again.run([task], minutes=1)
    assert list(again.table(task.table).ratio) == [2.0]


@pytest.mark.parametrize("change", ["code", "driver", None])
def test_what_was_measured_otherwise_is_measured_anew(here, change):
    task = small_plan()[1]
    quick(begun(), ratio=1.0).run([task], minutes=1)
    other = here / "another_batch.csv"
    other.write_text("ratio\n1\n")
    if change:
        path = here / "a-device-9-tm.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {change: "another"}))
    bench = begun(anew=change is None)
    assert bench.done == []
    assert bench.table(task.table).empty
    assert other.exists()


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GB are too many\n..."), MemoryError("a batch of 3 fits")])
def test_what_does_not_fit_is_recorded_and_the_bench_goes_on(here, monkeypatch, error):
    tasks = [task for task in small_plan() if task.pair == LLAMA]

    def too_large(who, how, rate):
        if how.rows == 1:
            raise error
        return {"pair": who.name, "rows": how.rows, "predicted": 1.0, "machine": "x"}

    monkeypatch.setattr(gpu, "measure_cell", too_large)
    bench = begun()
    bench.subject = lambda task: type("Who", (), {"name": task.pair})
    monkeypatch.setattr(gpu, "goals", lambda *_: [])
    assert bench.run(tasks, minutes=1) == []
    table = bench.table("batch").set_index("rows")
    assert table.note[1] == f"out of memory: {str(error).splitlines()[0]}"
    assert np.isnan(table.predicted[1])
    assert table.predicted[2] == 1.0


def test_goals_are_ratios_that_should_be_large():
    under = {"machine": "x", "threads": 1, "dtype": "bfloat16", "compiled": "graph"}
    figures = {"predicted": 2.0, "counted": 1.6, "measured": 1.8, "measured_low": 1.7, "measured_high": 1.9,
               "calls": 1.7, "calls_low": 1.6, "calls_high": 1.8, "floor_plain_ms": 4.0, "plain_ms": 5.0,
               "plain_ms_low": 4.5, "plain_ms_high": 8.0, "gamma": 4}  # fmt: skip
    batch = pd.DataFrame(
        [{"pair": pair, "rows": rows} | figures | under for pair in (LARGE, LLAMA, "trained") for rows in (1, 2)]
        + [{"pair": LARGE, "rows": 1, "note": "out of memory"} | under]
    )
    against_transformers = pd.DataFrame(
        {"pair": "trained", "sampler": sampler, "over_assisted": ratio, "over_assisted_low": ratio - 1,
         "over_assisted_high": ratio + 1} | under
        for sampler, ratio in (("speculative", 6.0), ("speculative", 7.0), ("target only", 9.0))
    )  # fmt: skip
    rows = goals(batch, against_transformers)
    assert all(list(row) == BENCH for row in rows)
    with_intervals = [row for row in rows if not np.isnan(row["low"])]
    assert [[row[name] for name in ("ratio", "low", "high", "goal")] for row in with_intervals] == [
        pytest.approx(expected)
        for expected in ((0.9, 0.85, 0.95, 0.85), (0.85, 0.8, 0.9, 0.85), (0.8, 0.5, 4 / 4.5, 1 / 1.3), (7, 6, 8, 5))
    ]
    assert [row["ratio"] for row in rows if "as counted" in row["name"]] == [pytest.approx(1.8 / 1.6)]


def test_the_pair_is_kept_for_tasks_that_share_it(here):
    bench = begun()
    one, other = (task for task in small_plan() if task.pair == LLAMA)
    first = bench.subject(one)
    assert bench.subject(other) is first
    assert bench.subject(replace(one, alpha=0.5)) is not first


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    with pytest.raises(SystemExit, match="finds no CUDA device"):
        main([])
    with pytest.raises(SystemExit, match="add --small"):
        main(["--device", "cpu"])
