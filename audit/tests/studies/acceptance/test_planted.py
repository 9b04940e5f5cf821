"""Planted mistakes: logs of a few steps, with the columns of the committed table."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from studies.files import read_table
from studies.study import run


def test_a_small_run_has_the_columns_of_the_committed_table(tmp_path: Path) -> None:
    path = run("low_acceptance", small=True, out=tmp_path)
    assert path is not None
    made = pd.read_csv(path)
    assert list(made) == list(read_table("audit/results/low_acceptance"))
    assert made.planted[0] == "no mistake"
    assert made.right[0]


def test_the_right_mistake_is_named_in_nine_of_ten_logs_that_are_told_from_none() -> None:
    table = read_table("audit/results/low_acceptance")
    mistakes = table[(table.planted != "no mistake") & ~table.same]
    assert mistakes.right.mean() >= 0.9
    assert table[table.planted == "no mistake"].right.all()
