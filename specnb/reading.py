"""Results as a text needs them: looked up by name, and printed the same way everywhere."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pandas as pd


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
