"""Every speed-up over plain decoding that our studies timed, beside its prediction: all rows of all tables.

The ratio is measured over predicted, so below 1 the prediction promised too much. `predicted` is tokens per step over
the cost of a step with the measured v(n), and `free` the same with v(n) = 1, where c and v are recorded. Left out are
plain decoding, other engines, and eager speculation that is timed against replayed plain decoding. What the tables
count tokens on, and what they time:

bench_walltime          alpha along sequences of the target alone, on the timed prompts and others; steps
recommendation          alpha on other prompts; steps
bench_regimes           tokens of the timed steps; steps
drafters                tokens on the timed prompts and others; whole calls, the pass over the prompt included
pair_speeds             tokens of the timed calls; whole calls
rules_in_the_loop       tokens on other prompts; whole calls
beam_speeds             levels of the timed searches; whole calls
encoder_decoder_speeds  alpha along the target's answers to the timed prompts; whole calls
workloads               tokens of the timed calls; whole calls
gpu                     tokens of the timed calls; whole calls, of several rows until the slowest ends (`slowest_row`)

`costs` says whether c and v were timed with the row. If not, they come from other rows and tables (`BORROWED`), which
were chosen after the row was measured. A compiled step is then longer than a compiled plain pass by as many
milliseconds as an eager step is longer than an eager plain pass; only a draft model, which is compiled like its target,
keeps its c.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from specnb.theory import count_distribution, solve_alpha
from studies.drafters.tree_counts import head_costs
from studies.files import read_table
from studies.study import made_on, record_of

SETTINGS = {
    "bench_walltime": ["pair", "dtype", "compiled", "temperature", "gamma"],
    "recommendation": ["pair", "layout", "prompts", "gamma"],
    "bench_regimes": ["regime", "x", "dtype"],
    "drafters": ["text", "drafter"],
    "pair_speeds": ["drafter", "prompts", "temperature", "compiled"],
    "rules_in_the_loop": ["temperature", "method"],
    "beam_speeds": ["u", "gamma"],
    "encoder_decoder_speeds": ["task", "temperature", "drafter"],
    "workloads": ["kind", "temperature", "way"],
    "gpu": ["models", "prompts", "temperature", "rows", "way"],
}
"""The columns that name a row of each table; of two rows with one name the later counts."""

RENAMED = {"levels_per_step": "tokens_per_step", "verify_cost": "v", "tokens_free": "free", "expected": "free"}
COLUMNS = ["table", "setting", "costs", "free", "predicted", "measured", "measured_low", "measured_high", "ratio"]
TIMED, ELSEWHERE = "timed with it", "from elsewhere"


def recorded(name: str) -> pd.DataFrame:
    """The table of a study; prints on what, when and by which code it was measured."""
    print(made_on(name))
    return read_table(f"results/{name}")


def pooled(*tables: str) -> pd.DataFrame:
    """One row for each timed setting of all tables, or of `tables`, with the columns `COLUMNS`.

    >>> list(pooled("drafters").columns) == COLUMNS
    True
    """
    return pd.concat([_rows(name) for name in tables or SETTINGS], ignore_index=True)


def _rows(name: str) -> pd.DataFrame:
    table = read_table(f"results/{name}")
    borrowed = BORROWED[name](table) if name in BORROWED else pd.DataFrame(index=table.index)
    known = table.reindex(columns=borrowed.columns).notna()
    table["costs"] = np.where((borrowed.notna() & ~known).any(axis=1), ELSEWHERE, TIMED)
    table = table.combine_first(borrowed)
    table = table.rename(columns=lambda column: RENAMED.get(column, column.replace("speed_up", "measured")))
    if "c" in table and "v" in table:
        cost = table.gamma * table.c + table.v
    elif "tokens_per_step" in table and "predicted" in table:
        cost = table.tokens_per_step / table.predicted
    if "predicted" not in table:
        table["predicted"] = table.tokens_per_step / cost
    if name == "gpu":
        table["predicted"] /= slowest_row(table)
    if "free" not in table:
        table["free"] = table.predicted * cost / (cost - table.v + 1) if "v" in table else np.nan
    plain = table.get("gamma", table.get("nodes", pd.Series(1, table.index))) == 0
    plain |= table.get("way", pd.Series("", table.index)).str.startswith("plain")
    table = table[~plain.to_numpy() & table.predicted.notna() & table.measured.notna()]
    table = table.drop_duplicates(SETTINGS[name], keep="last")
    setting = table[SETTINGS[name]].astype(str).agg(", ".join, axis=1)
    return table.assign(table=name, setting=setting, ratio=table.measured / table.predicted)[COLUMNS]


def _of_pair_speeds(table: pd.DataFrame) -> pd.DataFrame:
    """c and v from `drafters`, which timed the same pair, eager, at gamma 4 on a processor of the same kind; between
    them v grows linearly."""
    timed = read_table("results/drafters")
    timed = timed[(timed.gamma == 4) & timed.drafter.isin(table.drafter)]
    c, step = (timed.draft_cost / 4).groupby(timed.drafter).median(), (timed.v.median() - 1) / 4
    plain = table[table.drafter == "none"].set_index(["prompts", "temperature", "compiled"]).ms
    found = []
    for row in table.itertuples():
        longer = plain[row.prompts, row.temperature, False] / plain[row.prompts, row.temperature, row.compiled]
        of_model = row.drafter.endswith("draft model")  # the distilled one has the shape of the other
        own = c["draft model"] if of_model else c.get(row.drafter, np.nan) * longer
        found.append((own, 1 + row.gamma * step * longer))
    return pd.DataFrame(found, table.index, ["c", "v"])


def _of_gpu(table: pd.DataFrame) -> pd.DataFrame:
    """Predictions of heads, replayed as graphs: v(n) of the passes timed alone, and c of the head on a processor, in
    passes that read 16 bits."""
    passes = table.query("kind == 'pass' and model == 'target' and way == 'graph' and rows == 1")
    v = passes.set_index(["models", "n"]).cost
    c = head_costs(*(read_table(f"results/{name}") for name in ("workloads", "real_passes")))["H200"]
    gamma = table.way.str.extract(r"^head (\d+), graph$")[0].astype(float)
    cost = [v.get((models, n + 1), np.nan) + n * c for models, n in zip(table.models, gamma, strict=True)]
    return pd.DataFrame({"predicted": table.tokens_per_step / cost})


def slowest_row(table: pd.DataFrame) -> pd.Series:
    """For each line of `gpu`, how many times as many steps the slowest of its sequences makes as the mean one, until
    each has all its new tokens: all begin together, steps are taken to be independent, and Equation 1 gives the tokens
    per step."""
    found, new_tokens = pd.Series(1.0, table.index), record_of("gpu")["settings"]["new_tokens"]
    gamma = table.way.str.extract(r"(\d+), graph$")[0].astype(float)
    for row in table[(table.rows > 1) & gamma.notna() & (table.tokens_per_step > 1)].itertuples():
        drafted = int(gamma[row.Index])
        emitted = count_distribution(solve_alpha(row.tokens_per_step, drafted), drafted)
        so_far, going = np.eye(new_tokens)[0], list[float]()  # probabilities of the tokens so far, and of another step
        while so_far.sum() > 1e-12:
            going.append(so_far.sum())
            so_far = np.convolve(so_far, [0.0, *emitted])[:new_tokens]
        found[row.Index] = (1 - (1 - np.array(going)) ** row.rows).sum() / sum(going)
    return found


BORROWED = {"pair_speeds": _of_pair_speeds, "gpu": _of_gpu}
"""What a table lacks for its predictions, from other rows and tables."""


def within(ratio: ArrayLike, tolerance: float = 0.10) -> NDArray[np.bool_]:
    """Whether measured over predicted differs from 1 by at most `tolerance`.

    >>> within([0.89, 0.95, 2.2 / 2.0, 1.11]).tolist()
    [False, True, True, False]
    """
    return np.asarray(np.abs(np.asarray(ratio, dtype=np.float64) - 1) <= tolerance + 1e-9)


def rivals(rows: pd.DataFrame) -> pd.DataFrame:
    """What else could be said of each row: `one`, that nothing is gained; `of_study`, the median of the other speed-ups
    of its table; `scaled`, the prediction times the median ratio of the other tables."""
    of_table = rows.groupby("table", sort=False)
    of_study = of_table.measured.transform(lambda one: [one.drop(at).median() for at in one.index])
    factor = rows.table.map({name: rows.ratio[rows.table != name].median() for name in rows.table.unique()})
    return pd.DataFrame({"one": 1.0, "of_study": of_study, "scaled": rows.predicted * factor}, rows.index)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """For each table and for all rows: how many, how many `within`, above and below that, the median ratio and the
    one furthest from 1; of how many the costs are from `elsewhere`; of the `costed` rows, whose v is known apart, how
    many are within with it and with v = 1 (`free`); `error`, the median of |measured / predicted - 1|; and both of
    `rivals`."""
    of_rival = pd.DataFrame({name: rows.measured / one for name, one in rivals(rows).items()})
    parts = [*rows.groupby("table", sort=False).groups.items(), ("all", rows.index)]
    lines = []
    for name, index in parts:
        part, known, rival = rows.loc[index], rows.loc[index].dropna(subset="free"), of_rival.loc[index]
        line = {
            "table": name, "rows": len(part), "within": int(within(part.ratio).sum()),
            "slower": int((part.ratio < 0.9).sum()), "faster": int((part.ratio > 1.1).sum()),
            "median": part.ratio.median(), "worst": part.ratio[np.log(part.ratio).abs().idxmax()],
            "elsewhere": int((part.costs != TIMED).sum()), "costed": len(known),
            "costed_within": int(within(known.ratio).sum()),
            "free_within": int(within(known.measured / known.free).sum()),
        }  # fmt: skip
        line |= {f"within_{name}": int(within(ratio).sum()) for name, ratio in rival.items()}
        line["error"] = (part.ratio - 1).abs().median()
        lines.append(line | {f"error_{name}": (ratio - 1).abs().median() for name, ratio in rival.items()})
    return pd.DataFrame(lines)
