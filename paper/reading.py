"""Results looked up by name, and formatted the same way everywhere."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from studies.audit_power.bug_suite import BUG_SUITE, summary


class Missing(LookupError):  # noqa: N818 - read as "raises Missing"
    """A result that the paper needs is missing or stale."""


class Results:
    """The tables, verdicts and numbers in one folder. Raises `Missing` with the name of what is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = cache(self._table)

    def _table(self, name: str) -> pd.DataFrame:
        path = self.folder / f"{name}.csv"
        if not path.exists():
            raise Missing(f"data/results/{path.name} is missing; `make reproduce` or `make bench` writes it")
        return pd.read_csv(path)

    def record(self, name: str) -> dict[str, Any]:
        """What the table `name` was made with."""
        path = self.folder / f"{name}.record.json"
        if not path.exists():
            raise Missing(f"data/results/{path.name} is missing; `make studies ONLY={name}` writes it")
        record: dict[str, Any] = json.loads(path.read_text("utf-8"))
        return record

    def claims(self) -> pd.DataFrame:
        return self.table("claims").astype(str).set_index("id")

    def numbers(self) -> dict[str, dict[str, Any]]:
        """The numbers that notebooks stored with their verdicts, by claim and name."""
        files = sorted(self.folder.glob("[0-9][0-9].numbers.json"))
        return {claim: named for file in files for claim, named in json.loads(file.read_text("utf-8")).items()}

    def number(self, claim: str, name: str) -> float:
        """One number of a verdict."""
        return float(self._number(claim, name))

    def estimate(self, claim: str, name: str) -> dict[str, float]:
        """One estimate of a verdict: `value`, `low` and `high`."""
        found = self._number(claim, name)
        if not isinstance(found, dict):
            raise Missing(f"{name!r} of {claim} is {found!r}, and not an estimate with an interval")
        return found

    def _number(self, claim: str, name: str) -> Any:
        named = self.numbers().get(claim, {})
        if name not in named:
            raise Missing(
                f"the verdict on {claim} stores no number {name!r}, only {sorted(named)}; "
                "pass it as `numbers` to `findings.verdict` in the notebook and run that again"
            )
        return named[name]


def with_minus(text: str) -> str:
    """`text` with a minus sign for every hyphen before a number, exponents excepted."""
    return re.sub(r"(?<![\w.])-(?=\d)", "\N{MINUS SIGN}", text)


def count(number: float) -> str:
    return f"{number:,.0f}"


def share(part: float, digits: int = 0) -> str:
    return f"{100 * part:.{digits}f}%"


def interval(
    row: Mapping[str, float] | pd.Series, name: str = "value", low: str = "low", high: str = "high", digits: int = 2
) -> str:
    return f"{row[name]:.{digits}f} [{row[low]:.{digits}f}, {row[high]:.{digits}f}]"


def one_machine(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the machine that was measured first; a table may hold several machines."""
    return table[table.machine == table.machine.iloc[0]].reset_index(drop=True)


def single_runs(results: Results) -> pd.Series:
    """Milliseconds of one target forward pass in float32 by pair, weight layout and tokens, at one context length."""
    costs = one_machine(results.table("bench_costs"))
    curves = costs[(costs.model == "target") & (costs.dtype == "float32")]
    curves = curves[curves.context == costs.context[costs.layout == "compiled"].iloc[0]]
    return curves.set_index(["pair", "layout", "n"]).ms.sort_index()


def per_token(results: Results, pair: str) -> pd.Series:
    """Milliseconds per token of every sampler that was timed on `pair`."""
    against_transformers = one_machine(results.table("bench_against_transformers"))
    return against_transformers[against_transformers.pair == pair].set_index("sampler").ms_per_token


def known_bugs(results: Results) -> pd.DataFrame:
    """Every harmful bug of the bug suite: the tokens the audit needs, and how often the engines' tests pass."""
    runs, checks = results.table("bug_suite"), results.table("engine_checks")
    harmful = [name for name in runs.bug.unique() if not BUG_SUITE[name].lossless]
    shares = checks.assign(share=checks.passed / checks.runs).pivot_table("share", "bug", "check")
    return summary(runs).set_index("bug").loc[harmful].join(shares).sort_values(["median", "90%", "tv"])
