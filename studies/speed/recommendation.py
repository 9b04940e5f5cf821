"""Compare the choice of `recommend_gamma` with timed decoding: `python -m studies.speed.recommendation`.

Plain decoding and gamma 1 to `largest` are timed in turn on prompts that the recommendation did not see: held-out files
of the corpus, and files of Python's standard library, which is not in the corpus (the synthetic pair: random tokens).
Both pairs are measured with weights as saved and in the layout chosen for this machine, which must do nothing else.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pandas as pd

from specnb.measure.recommend import recommend_gamma
from specnb.measure.speed import measure_speeds
from specnb.measure.statistics import Estimate
from specnb.models.loading import Pair
from studies import run
from studies.speed.bench.generators import pair_named, prompts_for
from studies.speed.bench.tables import columns, settings

LAYOUTS = {"saved": False, "chosen": True}
PROMPTS = {"trained": ("held-out", "stdlib"), "synthetic": ("random",)}
MODULES = (
    "argparse", "ast", "asyncio.base_events", "bisect", "calendar", "cmd", "codecs", "collections", "configparser",
    "contextlib", "copy", "csv", "datetime", "decimal", "difflib", "dis", "doctest", "email.message", "enum",
    "fractions", "functools", "gettext", "glob", "gzip", "heapq", "html.parser", "http.client", "inspect",
    "json.decoder", "locale", "logging", "mailbox", "optparse", "os", "pathlib", "pdb", "pickle", "platform",
    "plistlib", "random", "shelve", "shutil", "smtplib", "socketserver", "statistics", "string",
)  # fmt: skip

TABLE = "recommendation"
SETTINGS: dict[str, Any] = {"largest": 6, "advised_on": 16, "repetitions": 11, "prompt_tokens": 32, "new_tokens": 64}
SMOKE: dict[str, Any] = {"largest": 2, "advised_on": 8, "repetitions": 3, "prompt_tokens": 8, "new_tokens": 8}


def items(**_: Any) -> list[str]:
    """Pair, layout and prompts, as in "trained-saved-stdlib"."""
    return [f"{pair}-{layout}-{prompts}" for pair, kinds in PROMPTS.items() for layout in LAYOUTS for prompts in kinds]


def measure(
    item: str, largest: int, advised_on: int, repetitions: int, prompt_tokens: int, new_tokens: int
) -> pd.DataFrame:
    """One line per gamma from 0: predicted and measured improvement over plain decoding, and speed over the best gamma.

    The first `advised_on` prompts are for the recommendation, the `repetitions` that follow are timed.
    """
    name, layout, kind = item.split("-", maxsplit=2)
    pair = pair_named(name, packed=LAYOUTS[layout])
    prompts = prompts_of(pair, kind, advised_on + repetitions, prompt_tokens)
    advice = recommend_gamma(
        pair, prompts[:advised_on], largest=largest, new_tokens=new_tokens, repetitions=max(repetitions, 3)
    )
    speeds = measure_speeds(pair, prompts[advised_on:], range(largest + 1), max_new_tokens=new_tokens)
    measured = {gamma: speeds.improvement(gamma) for gamma in range(largest + 1)}
    best = max(measured, key=lambda gamma: measured[gamma].value)
    predicted = {0: Estimate(1.0, 1.0, 1.0, 0)} | advice.predicted
    return pd.DataFrame(
        {"pair": name, "layout": layout, "prompts": kind} | settings(pair, False)
        | {"gamma": gamma, "recommended": gamma == advice.gamma, "best": gamma == best}
        | columns("predicted", predicted[gamma]) | columns("measured", measured[gamma])
        | columns("over_best", speeds.improvement(gamma, over=best)) | {"repetitions": repetitions}
        for gamma in measured
    )  # fmt: skip


def gather(parts: pd.DataFrame) -> pd.DataFrame:
    """The table: all pairs, layouts and prompts."""
    return parts


def prompts_of(pair: Pair, kind: str, count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens. Raises `ValueError` where there are not so many."""
    if kind != "stdlib":
        return prompts_for(pair, "trained" if kind == "held-out" else "synthetic", count, length)
    if count > len(MODULES):
        raise ValueError(f"there are {len(MODULES)} {kind} prompts, fewer than {count}; ask for fewer repetitions")
    sources = [inspect.getsource(import_module(name)) for name in MODULES[:count]]
    return [pair.encode(source[:4000])[:length] for source in sources]


def main() -> None:
    """Measures everything and writes `data/results/recommendation.csv` with its record."""
    for name, path in zip(items(), run.parts("recommendation"), strict=True):
        if not path.exists():
            run.run_item("recommendation", name, path)
    table = pd.read_csv(run.gather("recommendation"))
    print(table[table.recommended | table.best].drop(columns="machine").round(3).to_string(index=False))


if __name__ == "__main__":
    main()
