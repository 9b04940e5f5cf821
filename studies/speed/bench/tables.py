"""Tables of the bench: columns, goals, and which rows a new measurement replaces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from specnb.measure.cost import Costs
from specnb.measure.statistics import Estimate
from specnb.measure.timing import machine
from specnb.models.loading import Pair
from specnb.notebook.findings import out, write
from specnb.theory import step_cost

Row = dict[str, Any]
Rows = list[Row]
NEW_TOKENS = 128  # of a timed sequence


def settings(pair: Pair, compiled: bool | str) -> dict[str, Any]:
    """The columns with the conditions of a measurement."""
    threads = torch.get_num_threads()
    dtype = str(pair.target.dtype).removeprefix("torch.")
    return {"machine": machine(pair.target.device), "threads": threads, "dtype": dtype, "compiled": compiled}


def columns(name: str, estimate: Estimate) -> dict[str, float]:
    """An estimate as three columns."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def goal_row(name: str, ratio: Estimate, goal: float, under: dict[str, Any]) -> dict[str, Any]:
    """One row of `bench.csv`."""
    return {"name": name, "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "goal": goal} | under


def counted(rows: Any) -> Any:
    """The prediction from the counted tokens per step instead of alpha, for a row or a table with the columns
    tokens_per_step, gamma, c and v."""
    return rows["tokens_per_step"] / step_cost(rows["gamma"], rows["c"], lambda _: rows["v"])


def curve(costs: Costs, labels: dict[str, Any]) -> Rows:
    """One row for each length of a target forward pass, and one for the draft model."""
    runs = [("target", n, times) for n, times in zip(costs.lengths, costs.target.T, strict=True)]
    rows: Rows = []
    for model, n, times in [*runs, ("draft", 1, costs.draft[:, 0])]:
        low, middle, high = 1e3 * np.quantile(times, [0.25, 0.5, 0.75])
        rows.append(labels | {"model": model, "n": n, "ms": middle, "ms_low": low, "ms_high": high})
    return rows


def keep(name: str, table: pd.DataFrame, same: Sequence[str] = ("machine",)) -> pd.DataFrame:
    """Writes `data/results/<name>.csv`: these rows, and the earlier ones that differ in a column of `same`."""
    before = recorded(name)
    if len(before):
        new = set(_keys(table, same))
        old = [key not in new for key in _keys(before, same)]
        table = pd.concat([before[old], table], ignore_index=True)
    write(_path(name), table.to_csv(index=False, lineterminator="\n", float_format="%.5g"))
    return table


def recorded(name: str) -> pd.DataFrame:
    """`data/results/<name>.csv` under the output folder; empty if there is none."""
    return pd.read_csv(_path(name)) if _path(name).exists() else pd.DataFrame()


def _path(name: str) -> Path:
    return out() / "data" / "results" / f"{name}.csv"


def _keys(table: pd.DataFrame, same: Sequence[str]) -> list[tuple[str, ...]]:
    """The columns `same` as strings that are equal for a number and for what is read back from a file (1.0 and 1)."""
    rows = table[list(same)].astype(object).to_numpy()
    return [tuple(f"{x:.5g}" if type(x) in (float, int) else str(x) for x in row) for row in rows]


def keep_curves(curves: Iterable[pd.DataFrame]) -> None:
    """Adds cost curves to `bench_costs.csv`."""
    keep("bench_costs", pd.concat(curves, ignore_index=True), ("machine", "pair", "layout", "dtype"))


def keep_goals(rows: Rows) -> None:
    """Adds goals to `bench.csv`."""
    keep("bench", pd.DataFrame(rows), ("machine", "name", "compiled"))
