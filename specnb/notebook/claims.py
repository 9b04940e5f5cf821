"""The claims: their table, the thresholds in it, and the names of the verdicts."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, where there is one


CLAIMS = ROOT / "data" / "claims.csv"


VERDICTS = ("holds", "refuted", "conditional", "open")


_COMPARED = re.compile(r"[<>]=? (\d[\d.]*(?:e[+-]?\d+)?)(%?)")


def all_claims() -> pd.DataFrame:
    """The claims in `data/claims.csv`, every column as text. Raises `RuntimeError` outside the project's checkout."""
    if not CLAIMS.exists():
        raise RuntimeError(
            f"{CLAIMS} does not exist: findings and verdicts need the project's checkout, and this specnb is installed "
            "without it. Clone the repository and install it there with `pip install -e .`"
        )
    return pd.read_csv(CLAIMS, dtype=str)


@cache
def thresholds(claim: str) -> tuple[float, ...]:
    """The numbers in the threshold of `claim`, in the order in which they are written there.

    Raises `KeyError` for a claim that is not in the table, `RuntimeError` outside the project's checkout.

    >>> thresholds("verify-is-free")
    (1.1, 0.75)
    """
    return compared(str(all_claims().set_index("id").threshold[claim]))


def compared(words: str) -> tuple[float, ...]:
    """The numbers after `<`, `>`, `<=` and `>=` in `words`, percentages as fractions.

    >>> compared("v(5) <= 1.1 in >= 75% of the settings; error < 1e-12")
    (1.1, 0.75, 1e-12)
    """
    found = _COMPARED.findall(words)
    return tuple(float(number) / 100 if percent else float(number) for number, percent in found)


def named(holds: bool | str | None, holds_if: bool = False) -> str:
    """The verdict for an answer, or for its own name.

    Raises `ValueError` for a name that is none of `VERDICTS` and for a name together with `holds_if`.

    >>> named(True), named(False, holds_if=True), named(False), named(None), named("refuted")
    ('holds', 'conditional', 'refuted', 'open', 'refuted')
    """
    if isinstance(holds, str) or holds is None:
        verdict = "open" if holds is None else holds
        if verdict not in VERDICTS or holds_if:
            condition = " together with holds_if" if holds_if else ""
            raise ValueError(f"the verdict is {holds!r}{condition}; give one of {VERDICTS}, or an answer and holds_if")
        return verdict
    return "holds" if holds else "conditional" if holds_if else "refuted"
