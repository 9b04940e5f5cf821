"""Every recorded speed-up that was predicted, in one table: all rows of all tables of studies.

The ratio is measured over predicted, so below 1 the prediction promised too much. Plain decoding and settings that
were not timed are left out. `predicted` is tokens per step over the cost of a step with the measured v(n), and
`free` the same with v(n) = 1, where c and v are recorded. What the tables count tokens on, and what they time:

bench_walltime          alpha along sequences of the target alone, on the timed prompts and others; steps
recommendation          alpha on other prompts; steps
bench_regimes           tokens of the timed steps; steps
drafters                tokens on the timed prompts and others; whole calls, the pass over the prompt included
rules_in_the_loop       tokens on other prompts; whole calls
beam_speeds             levels of the timed searches; whole calls
encoder_decoder_speeds  alpha along the target's answers to the timed prompts; whole calls
workloads               tokens of the timed calls; whole calls
gpu                     tokens of the timed calls; whole calls
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from studies.files import read_table
from studies.study import made_on

SETTINGS = {
    "bench_walltime": ["pair", "dtype", "compiled", "temperature", "gamma"],
    "recommendation": ["pair", "layout", "prompts", "gamma"],
    "bench_regimes": ["regime", "x", "dtype"],
    "drafters": ["text", "drafter"],
    "rules_in_the_loop": ["temperature", "method"],
    "beam_speeds": ["u", "gamma"],
    "encoder_decoder_speeds": ["task", "temperature", "drafter"],
    "workloads": ["kind", "temperature", "way"],
    "gpu": ["kind", "models", "prompts", "temperature", "rows", "way"],
}
"""The columns that name a row of each table."""

RENAMED = {"levels_per_step": "tokens_per_step", "verify_cost": "v", "tokens_free": "free", "expected": "free"}
COLUMNS = ["table", "setting", "free", "predicted", "measured", "measured_low", "measured_high", "ratio"]


def recorded(name: str) -> pd.DataFrame:
    """The table of a study; prints on what, when and by which code it was measured."""
    print(made_on(name))
    return read_table(f"results/{name}")


def pooled(*tables: str) -> pd.DataFrame:
    """One row for each predicted and timed setting of all tables, or of `tables`, with the columns
    `COLUMNS`.

    >>> list(pooled("drafters").columns) == COLUMNS
    True
    """
    return pd.concat([_rows(name) for name in tables or SETTINGS], ignore_index=True)


def _rows(name: str) -> pd.DataFrame:
    table = read_table(f"results/{name}")
    table = table.rename(columns=lambda column: RENAMED.get(column, column.replace("speed_up", "measured")))
    if "c" in table and "v" in table:
        cost = table.gamma * table.c + table.v
    elif "tokens_per_step" in table and "predicted" in table:
        cost = table.tokens_per_step / table.predicted
    if "predicted" not in table:
        table["predicted"] = table.tokens_per_step / cost
    if "free" not in table:
        table["free"] = table.predicted * cost / (cost - table.v + 1) if "v" in table else np.nan
    plain = table.get("gamma", table.get("nodes", pd.Series(1, table.index))) == 0
    plain |= table.get("way", pd.Series("", table.index)).str.startswith("plain")
    table = table[~plain.to_numpy() & table.predicted.notna() & table.measured.notna()]
    setting = table[SETTINGS[name]].astype(str).agg(", ".join, axis=1)
    return table.assign(table=name, setting=setting, ratio=table.measured / table.predicted)[COLUMNS]


def within(ratio: ArrayLike, tolerance: float = 0.10) -> NDArray[np.bool_]:
    """Whether measured over predicted differs from 1 by at most `tolerance`.

    >>> within([0.89, 0.95, 1.11]).tolist()
    [False, True, False]
    """
    return np.asarray(np.abs(np.asarray(ratio, dtype=np.float64) - 1) <= tolerance)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """For each table and for all rows: how many, how many `within`, above and below that, the median ratio and the
    one furthest from 1."""
    parts = [*rows.groupby("table", sort=False), ("all", rows)]
    return pd.DataFrame(
        {"table": name, "rows": len(part), "within": int(within(part.ratio).sum()),
         "slower": int((part.ratio < 0.9).sum()), "faster": int((part.ratio > 1.1).sum()),
         "median": part.ratio.median(), "worst": part.ratio[np.log(part.ratio).abs().idxmax()]}
        for name, part in parts
    )  # fmt: skip
