"""Results as a text needs them: looked up by name, and printed the same way everywhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pandas as pd

from specnb.experiments.detection import BUG_SUITE, summary


class Missing(LookupError):  # noqa: N818 - it reads as what it says
    """A result that the paper needs is not there, or is not what it was."""


class Results:
    """The tables and verdicts in one folder. Raises `Missing` with the name of what is not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table = cache(self._table)

    def _table(self, name: str) -> pd.DataFrame:
        path = self.folder / f"{name}.csv"
        if not path.exists():
            raise Missing(f"data/results/{path.name} is missing; `make reproduce` or `make bench` writes it")
        return pd.read_csv(path)

    def claims(self) -> pd.DataFrame:
        return self.table("claims").astype(str).set_index("id")

    def quote(self, claim: str, pattern: str) -> str:
        """The group of `pattern` in the evidence for `claim`, as it stands there."""
        evidence = self.claims().evidence[claim]
        found = re.search(pattern, evidence)
        if not found:
            raise Missing(f"the evidence for {claim} says nothing like {pattern!r} any more: {evidence}")
        return found.group(1)


def with_minus(text: str) -> str:
    """A hyphen before a number becomes a minus; one in an exponent stays."""
    return re.sub(r"(?<![\w.])-(?=\d)", "\N{MINUS SIGN}", text)


def count(number: float) -> str:
    return f"{number:,.0f}"


def share(part: float, digits: int = 0) -> str:
    return f"{100 * part:.{digits}f}%"


def interval(row: pd.Series, name: str = "value", low: str = "low", high: str = "high", digits: int = 2) -> str:
    return f"{row[name]:.{digits}f} [{row[low]:.{digits}f}, {row[high]:.{digits}f}]"


def parsed(words: str) -> tuple[float, float, float]:
    """Value and limits of an estimate as it is printed: `0.13 [0.11, 0.15]`."""
    value, low, high = map(float, re.findall(r"[-+]?\d*\.?\d+", words)[:3])
    return value, low, high


def one_machine(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the machine that was measured first; others may have been added."""
    return table[table.machine == table.machine.iloc[0]].reset_index(drop=True)


def single_runs(results: Results) -> pd.Series:
    """Milliseconds of one target run in float32, by pair, layout of the weights and tokens; one context for all."""
    costs = one_machine(results.table("bench_costs"))
    curves = costs[(costs.model == "target") & (costs.dtype == "float32")]
    curves = curves[curves.context == costs.context[costs.layout == "compiled"].iloc[0]]
    return curves.set_index(["pair", "layout", "n"]).ms.sort_index()


def per_token(results: Results, pair: str) -> pd.Series:
    """Milliseconds a token of every sampler that was timed on `pair`."""
    against_transformers = one_machine(results.table("bench_against_transformers"))
    return against_transformers[against_transformers.pair == pair].set_index("sampler").ms_per_token


def known_bugs(results: Results) -> pd.DataFrame:
    """Every harmful bug of the bug suite: what the audit needs to find it, and how often the engines' tests pass."""
    runs, checks = results.table("bug_suite"), results.table("engine_checks")
    harmful = [name for name in runs.bug.unique() if not BUG_SUITE[name].lossless]
    shares = checks.assign(share=checks.passed / checks.runs).pivot_table("share", "bug", "check")
    return summary(runs).set_index("bug").loc[harmful].join(shares).sort_values(["median", "90%", "tv"])
