"""Every recorded speed-up that has a prediction, in one table, in one direction and judged by one
rule.

The ratio is measured over predicted: below 1 the prediction promised too much. Plain decoding and
rows that were not timed are left out. Where a study has counted the tokens of its steps,
`tokens_per_step` and the predicted cost of a step, `step_cost`, are given: the time of its forward
passes in steps of plain decoding. `free` is Theorem 3.8 as printed, with v(n) = 1, where c and v
are recorded; `predicted` has the measured v(n):

bench_walltime     from alpha along sequences of the target alone, on the prompts that are timed and
                   others
recommendation     from alpha on other prompts
bench_regimes      from the tokens that were counted in the timed steps
drafters           from tokens counted on the timed prompts and others, and parts of the timed steps
drafter_choice     the same
rules_in_the_loop  from tokens counted on other prompts
beam_speeds        from levels counted in the timed searches
encoder_decoder_speeds  from alpha along the target's answers to the timed prompts

From `drafters` on whole calls are timed, the forward pass over the prompt included; the others time
steps.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from studies.files import read_table
from studies.study import is_clean, record_of

SETTINGS = {
    "bench_walltime": ["pair", "dtype", "compiled", "temperature", "gamma"],
    "recommendation": ["pair", "layout", "prompts", "gamma"],
    "bench_regimes": ["regime", "x", "dtype"],
    "drafters": ["text", "drafter"],
    "drafter_choice": ["target", "temperature", "drafter"],
    "rules_in_the_loop": ["temperature", "method"],
    "beam_speeds": ["u", "gamma"],
    "encoder_decoder_speeds": ["task", "temperature", "drafter"],
}
"""The columns that name a row of each table."""

WHOLE_CALLS = ("drafters", "drafter_choice", "rules_in_the_loop", "beam_speeds", "encoder_decoder_speeds")
RENAMED = {"levels_per_step": "tokens_per_step", "verify_cost": "v", "tokens_free": "free", "expected": "free"}
COLUMNS = ["table", "setting", "machine", "drafted", "tokens_per_step", "step_cost", "v", "free", "predicted"]
COLUMNS += ["measured", "measured_low", "measured_high", "ratio"]


def pooled(*tables: str) -> pd.DataFrame:
    """One row for each predicted and timed setting of all tables, or of `tables`, with the columns
    `COLUMNS`.

    `drafted` is the number of draft tokens (of nodes, of draft sequences times levels) that one
    forward pass verifies.

    >>> list(pooled("drafters").columns) == COLUMNS
    True
    """
    return pd.concat([_rows(name) for name in tables or SETTINGS], ignore_index=True)[COLUMNS]


def judged(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of tables that were made by committed code; on others no verdict rests."""
    return rows[[is_clean(name) for name in rows.table]]


def _rows(name: str) -> pd.DataFrame:
    table = read_table(f"results/{name}")
    table = table.rename(columns=lambda column: RENAMED.get(column, column.replace("speed_up", "measured")))
    table["drafted"] = table.nodes if "nodes" in table else table.gamma * table.get("u", 1)
    table = table[(table.drafted > 0) & table.measured.notna()].copy()
    table["setting"] = table[SETTINGS[name]].astype(str).agg(", ".join, axis=1)
    if "c" in table:
        table["step_cost"] = table.gamma * table.c + table.v
    elif "tokens_per_step" in table:
        table["step_cost"] = table.tokens_per_step / table.predicted
    if "predicted" not in table:
        table["predicted"] = table.tokens_per_step / table.step_cost
    if "free" not in table and "v" in table:
        table["free"] = table.predicted * table.step_cost / (table.step_cost - table.v + 1)
    if "machine" not in table:
        table["machine"] = record_of(name)["processor"]
    return table.assign(table=name, ratio=table.measured / table.predicted)


def within(ratio: ArrayLike, share: float = 0.10) -> NDArray[np.bool_]:
    """Whether measured over predicted differs from 1 by at most `share`.

    >>> within([0.89, 0.95, 1.11]).tolist()
    [False, True, False]
    """
    return np.asarray(np.abs(np.asarray(ratio, dtype=np.float64) - 1) <= share)


def summary(rows: pd.DataFrame | None = None, share: float = 0.10) -> pd.DataFrame:
    """For each table and for all rows: how many, how many `within`, the median ratio and the one
    furthest from 1."""
    rows = pooled() if rows is None else rows
    parts = [(name, rows[rows.table == name]) for name in SETTINGS] + [("all", rows)]
    return pd.DataFrame(
        {"table": name, "rows": len(part), "within": int(within(part.ratio, share).sum()),
         "median": part.ratio.median(), "worst": part.ratio[np.log(part.ratio).abs().idxmax()]}
        for name, part in parts if len(part)
    )  # fmt: skip
