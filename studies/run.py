"""Run one item of an experiment, or gather all of its items into the committed table; the steps of `experiments.smk`.

    python -m studies.run item detection no-residual part.csv
    python -m studies.run gather detection
    python -m studies.run stale             the committed tables that other code has made

An experiment is a module of this package that has the attributes of `Experiment`. Parts are stored by the digest of the
experiment's code, so that parts of other code are never gathered. Beside each table, `data/results/<table>.record.json`
states the code, settings, versions and machine that it came from.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import pandas as pd

from specnb.measure.timing import machine
from specnb.notebook.findings import ROOT, out, stamp, write
from specnb.notebook.source_digest import module_digest

NAMES = (
    "audit_cost", "beam_speeds", "block_against_token", "comparison", "detection", "distillation", "drafters",
    "engine_checks", "engines", "false_alarms", "feature_drafts", "layout_speeds", "pair_speeds", "recommendation",
    "rules_in_the_loop", "stopping_rules", "transformers_audit", "verification_rules",
)  # fmt: skip
BEFORE_RECORDS = "recorded before digests were kept"

Settings = dict[str, Any]


class Experiment(Protocol):
    """What a module of an experiment has.

    TABLE            the table is `data/results/<TABLE>.csv`
    SETTINGS, SMOKE  arguments of `measure`: those of the committed table, and small ones that try the code in seconds
    items            the names of the items with some settings: letters, digits and "-"
    measure          the table of one item
    gather           the committed table, from the concatenated tables of all items, in their order
    """

    TABLE: str
    SETTINGS: Settings
    SMOKE: Settings

    def items(self, **settings: Any) -> list[str]:
        """The names of the items."""

    def measure(self, item: str, **settings: Any) -> pd.DataFrame:
        """The table of one item."""

    def gather(self, parts: pd.DataFrame) -> pd.DataFrame:
        """The committed table."""


def experiment(name: str) -> Experiment:
    """The module of an experiment. Raises `ValueError` for a name that is not in `NAMES`."""
    if name not in NAMES:
        raise ValueError(f"no experiment is called {name!r}; there are {', '.join(NAMES)}")
    return cast(Experiment, import_module(f"studies.{name}"))


def code(name: str) -> str:
    """The digest of an experiment and of every module that it imports."""
    return module_digest(ROOT, f"studies.{name}")


def settings_of(name: str, smoke: bool) -> Settings:
    """The settings of the committed table, or those that try the code."""
    module = experiment(name)
    return module.SMOKE if smoke else module.SETTINGS


def parts(name: str, smoke: bool = False) -> list[Path]:
    """The files of all items, in order: `build/experiments/<code>/<name>/<item>.csv` under the output folder."""
    folder = out() / "build" / "experiments" / code(name) / name
    return [folder / f"{item}.csv" for item in experiment(name).items(**settings_of(name, smoke))]


def run_item(name: str, item: str, path: Path, smoke: bool = False) -> None:
    """Measures one item and writes its table."""
    table = experiment(name).measure(item, **settings_of(name, smoke))
    write(path, table.to_csv(index=False, lineterminator="\n"))


def gather(name: str, smoke: bool = False) -> Path:
    """Writes the table of an experiment and its record; returns the table's path."""
    module = experiment(name)
    table = module.gather(pd.concat([pd.read_csv(path) for path in parts(name, smoke)], ignore_index=True))
    path = out() / "data" / "results" / f"{module.TABLE}.csv"
    write(path, table.to_csv(index=False, lineterminator="\n", float_format="%.6g"))
    settings = settings_of(name, smoke)
    record = {"experiment": name, "code": code(name), "settings": settings, "processor": machine()} | stamp({})
    write(path.with_suffix(".record.json"), json.dumps(record, indent=1) + "\n")
    return path


def stale(folder: Path = ROOT) -> list[str]:
    """One sentence for each committed table under `folder` that other code has made than is there now."""
    found = []
    for name in NAMES:
        path = folder / "data" / "results" / f"{experiment(name).TABLE}.record.json"
        if not path.exists():
            continue
        made = json.loads(path.read_text(encoding="utf-8"))["code"]
        if made != code(name):
            why = made if made == BEFORE_RECORDS else f"made by code {made}, now {code(name)}"
            found.append(f"{path.name}: {why}; `make experiments ONLY={name}` makes it again")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs an item or gathers a table."""
    parser = argparse.ArgumentParser("python -m studies.run", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("stale")
    for command in ("item", "gather"):
        options = commands.add_parser(command)
        options.add_argument("experiment", choices=NAMES)
        if command == "item":
            options.add_argument("item")
            options.add_argument("path", type=Path)
        options.add_argument("--smoke", action="store_true", help="small settings, to try the code")
    asked = parser.parse_args(arguments)
    if asked.command == "stale":
        print("\n".join(stale()) or "every table was made by the code that is here")
    elif asked.command == "item":
        run_item(asked.experiment, asked.item, asked.path, asked.smoke)
    else:
        print(gather(asked.experiment, asked.smoke))


if __name__ == "__main__":
    main()
