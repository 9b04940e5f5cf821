"""What a study is, and how one is run: rows item by item, then the committed table and the record
beside it.

A study is a module with the name of its table and a `STUDY`. The table is
`data/results/<name>.csv`, in `audit` for the modules of `audit_studies`; `<name>.record.json` says
by which commit, when, with which settings and on what it was measured. Rows of finished items are
kept under `build/studies/<name>/<commit>`, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from specnb.loading import Pair
from specnb.record import now
from specnb.statistics import Estimate, Job, machine, ratio_of_sums, time_round
from studies.files import ROOT, located, write

PACKAGES = ("numpy", "scipy", "pandas", "torch", "transformers", "tokenizers")
CODE = ("specnb", "audit/specnb_audit", "audit/audit_studies", "studies")
Rows: TypeAlias = pd.DataFrame | Iterable[Mapping[str, Any]]


@dataclass(frozen=True)
class Study:
    """A committed table.

    rows      the rows of one item: `rows(item, **settings)`
    settings  of the committed table
    small     those that try the code in seconds, with `small_items`, or all items
    items     what is measured apart, in the order of the table: letters, digits, "-", "_" and "."
    finish    the table, made from the rows of all items; None for the rows themselves
    """

    rows: Callable[..., Rows]
    settings: Mapping[str, Any]
    small: Mapping[str, Any]
    items: Sequence[str] = ("all",)
    small_items: Sequence[str] = ()
    finish: Callable[[pd.DataFrame], pd.DataFrame] | None = None


def names() -> list[str]:
    """The names of all studies: modules in the folders of `studies` and `audit_studies` that define
    `STUDY`."""
    return sorted(_modules())


def _modules() -> dict[str, str]:
    files = [file for package in ("studies", "audit/audit_studies") for file in (ROOT / package).glob("*/*.py")]
    found = [file for file in files if "\nSTUDY = " in file.read_text(encoding="utf-8")]
    return {file.stem: ".".join(file.with_suffix("").parts[-3:]) for file in found}


def table_of(name: str) -> str:
    """Where the table of a study is committed.

    >>> table_of("drafters"), table_of("bug_suite")
    ('data/results/drafters.csv', 'audit/data/results/bug_suite.csv')
    """
    product = "audit/" if _modules().get(name, "").startswith("audit_studies.") else ""
    return located("data/results", f"{product}{name}.csv")


def find(name: str) -> Study:
    """The study of the table `name`. Raises `ValueError` where there is none.

    >>> find("rules_in_the_loop").items
    ('0', '0-5', '1')
    """
    modules = _modules()
    if name not in modules:
        raise ValueError(f"no study is called {name!r}; there are {', '.join(sorted(modules))}")
    study: Study = import_module(modules[name]).STUDY
    return study


def run(name: str, items: Sequence[str] = (), *, small: bool = False, out: Path = ROOT) -> Path | None:
    """Measures what is missing of `items` (all by default), and writes table and record where every
    item is there.

    Returns the table's path, or None. `small` tries the code and writes below `out`/build/small.
    Raises `ValueError` for an unknown study or item.
    """
    study = find(name)
    settings, every = (study.small, study.small_items or study.items) if small else (study.settings, study.items)
    if unknown := sorted({*items} - {*every}):
        raise ValueError(f"{name} has no item {', '.join(unknown)}; it has {', '.join(every)}")
    by = commit()
    place = out / "build" / "studies" / name / ("small" if small else by)
    parts = {item: place / f"{item}.csv" for item in every}
    again = small or by == "unknown" or by.endswith("-dirty")  # what differs from the commit is not known
    missing = [item for item in items or every if again or not parts[item].exists()]
    for item in (bar := tqdm(missing, desc=name, unit="item")):
        bar.set_postfix_str(item)
        write(parts[item], pd.DataFrame(study.rows(item, **settings)).to_csv(index=False, lineterminator="\n"))
    if (again and len(missing) < len(parts)) or not all(part.exists() for part in parts.values()):
        return None
    table = pd.concat([pd.read_csv(part) for part in parts.values()], ignore_index=True)
    table = study.finish(table) if study.finish else table
    path = out / (f"build/small/{name}.csv" if small else table_of(name))
    write(path, table.to_csv(index=False, lineterminator="\n", float_format="%.6g"))
    write(path.with_suffix(".record.json"), json.dumps(record(name, by, settings), indent=1) + "\n")
    return path


def record(name: str, by: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a table was made with: commit, date, settings, machine and versions."""
    made: dict[str, Any] = {"study": name, "commit": by, "date": date.today().isoformat(), "settings": settings}
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    made |= {"processor": machine(), "threads": torch.get_num_threads(), "device": device}
    made |= {"system": f"{platform.system()} {platform.machine()}", "python": platform.python_version()}
    return made | {"packages": {package: metadata.version(package) for package in PACKAGES}}


def record_of(name: str) -> dict[str, Any]:
    """The record beside the committed table `name`."""
    found: dict[str, Any] = json.loads((ROOT / table_of(name)).with_suffix(".record.json").read_text(encoding="utf-8"))
    return found


def made_on(name: str) -> str:
    """On what, when and by which code the table `name` was measured."""
    found = record_of(name)
    return f"{name}: {found['processor']}, {found['threads']} thread(s), {found['date']}, commit {found['commit']}"


def commit() -> str:
    """The commit of the code; with "-dirty" if files of the code differ from it.

    Outside a repository, as in a copy on another machine, `$SPECNB_COMMIT`, or "unknown".
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + "-dirty" * bool(git("status", "--porcelain", "--", *CODE))
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("SPECNB_COMMIT", "unknown")


def columns(name: str, estimate: Estimate) -> dict[str, float]:
    """An estimate as three columns."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def conditions(pair: Pair, compiled: bool | str = False) -> dict[str, Any]:
    """The columns with the conditions of a measurement."""
    dtype = str(pair.target.dtype).removeprefix("torch.")
    where = machine(pair.target.device)
    return {"machine": where, "threads": torch.get_num_threads(), "dtype": dtype, "compiled": compiled}


def faster(before: NDArray[np.float64], this: NDArray[np.float64]) -> Estimate:
    """All seconds `(prompts,)` of one way over all of another, with an interval over prompts."""
    return ratio_of_sums(before, this, 2000, least=3)._replace(n=len(before))


def timed_in_turn(
    call: Callable[[Any, Any, int], object], choices: Sequence[Any], prompts: Sequence[Any], device: str = "cpu"
) -> NDArray[np.float64]:
    """Seconds `(prompts, choices)` of `call(choice, prompt, number)`, number being that of the
    prompt.

    All choices take turns on each prompt, in a new random order, after a round with the first
    prompt that warms up.
    """
    numbered = [(prompts[0], 0), *zip(prompts, range(len(prompts)), strict=True)]
    rounds = [[Job(partial(call, choice, *one)) for choice in choices] for one in numbered]
    clock, order = partial(now, torch.device(device)), np.random.default_rng(0)
    bar = tqdm(rounds, desc="timing", delay=3, leave=False)
    return np.stack([time_round(jobs, clock, order) for jobs in bar])[1:]
