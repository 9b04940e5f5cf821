"""The plan has everything that is promised, each thing once, the goals first."""

import pandas as pd

from specnb.notebook.findings import ROOT
from studies.speed.bench.plan import BATCHES, LARGE, LLAMA, SIZES, plan, small_plan, table2
from studies.speed.bench.setting import Setting
from studies.speed.shapes import size


def test_every_task_is_there_once() -> None:
    keys = [task.key for task in plan()]
    assert len(keys) == len(set(keys))
    for pair in ("trained", LARGE, LLAMA):
        rows = [
            task.setting.rows
            for task in plan()
            if (task.table, task.pair, task.setting.compile) == ("batch", pair, "graph")
        ]
        assert sorted(rows) == list(BATCHES)


def test_the_goals_come_first_and_table_2_next() -> None:
    first = [(task.table, task.pair, task.setting.rows) for task in plan()[:4]]
    assert first == [("peers", "trained", 1), ("batch", "trained", 1), ("batch", LARGE, 1), ("batch", LLAMA, 1)]
    assert {task.table for task in plan()[4:16]} == {"table2"}


def test_table_2_is_the_papers() -> None:
    printed = pd.read_csv(ROOT / "data" / "reference" / "table2_and_4_walltime.csv")
    tasks = table2(Setting())
    assert [task.alpha for task in tasks] == list(printed.alpha)
    assert [task.setting.gamma for task in tasks] == list(printed.gamma)
    assert [task.temperature for task in tasks] == list(printed.temperature)
    assert [task.printed["paper_measured"] for task in tasks] == list(printed.measured)
    assert [task.pair.split()[3] for task in tasks] == list(printed.draft)
    assert all(task.pair in SIZES for task in tasks)


def test_the_large_pair_is_the_papers_in_weights() -> None:
    target, draft, vocab = SIZES[LARGE]
    assert round(size(target, vocab).held / 1e9) == 11
    assert round(size(draft, vocab).held / 1e6) == 77


def test_the_small_plan_has_some_of_every_kind() -> None:
    tasks = small_plan()
    assert {task.table for task in tasks} == {"peers", "batch", "table2"}
    assert {task.temperature for task in tasks} == {0.0, 1.0}
    assert {task.setting.rows for task in tasks} == {1, 2}
    assert not any(task.setting.compile for task in tasks)
