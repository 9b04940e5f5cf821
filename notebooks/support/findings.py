"""Numbers and verdicts of notebooks: how they are written, and how the verdicts of all notebooks
become one table."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from studies.files import ROOT, out, write

CLAIMS = ROOT / "data" / "claims.yml"
VERDICTS = ("holds", "refuted", "conditional", "open")
UNCHECKED = "not checked by this run"
# What a claim may be about that nothing measures on two cores.
ELSEWHERE = ("accelerators", "large models")
DIGITS = 6  # significant digits in tables; the last bits of a sum differ between processors

Number = bool | int | float | str | dict[str, "Number"]
"""A value in a file of numbers: a scalar, or an estimate as
`{"value": ..., "low": ..., "high": ..., "n": ...}`."""


def all_claims() -> dict[str, dict[str, Any]]:
    """The claims in `data/claims.yml` by their names, in its order."""
    claims: dict[str, dict[str, Any]] = yaml.safe_load(CLAIMS.read_text(encoding="utf-8"))
    return claims


def written(value: float) -> str:
    """`value` with `DIGITS` significant digits; a whole number below 10^15 with all of its digits.

    >>> written(2 / 3), written(1234567.0), written(1234567.8)
    ('0.666667', '1234567', '1.23457e+06')
    """
    # Processors add in different orders, so the last bits of a tie such as 0.1234565 differ between
    # them. Rounding to 12 digits first gives all of them the same tie.
    value = float(f"{value:.12g}")
    whole = value.is_integer() and abs(value) < 1e15
    return f"{value:.0f}" if whole else f"{value:.{DIGITS}g}"


def as_number(value: object, name: str) -> Number:
    """`value` as it is stored: floats rounded as in tables, an estimate as a dictionary.

    Raises `TypeError` for what is neither a scalar nor an estimate, and `ValueError` for NaN and
    infinities; `name` says which number it was.

    >>> as_number(2 / 3, "alpha"), as_number(Fraction(1, 4), "bound")
    (0.666667, 0.25)
    """
    if hasattr(value, "value") and hasattr(value, "low") and hasattr(value, "high"):
        parts = {part: getattr(value, part) for part in ("value", "low", "high", "n") if hasattr(value, part)}
        return {part: as_number(number, f"{name}, {part}") for part, number in parts.items()}
    value = value.item() if hasattr(value, "item") and math.prod(getattr(value, "shape", (2,))) == 1 else value
    if isinstance(value, bool | int | str):
        return value
    if not isinstance(value, float | Fraction):
        raise TypeError(f"{name} is a {type(value).__name__}; give a number, a string or an estimate with an interval")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; numbers must be finite")
    return float(written(float(value)))


def shown(number: Number) -> str:
    """A number as a reader wants it: three digits, and its interval.

    >>> shown(0.03125), shown(7056), shown({"value": 1.23456, "low": 1.2, "high": 1.25, "n": 9})
    ('0.0312', '7,056', '1.23 [1.2, 1.25]')
    """
    if isinstance(number, dict):
        return f"{shown(number['value'])} [{shown(number['low'])}, {shown(number['high'])}]"
    if isinstance(number, bool | str):
        return str(number)
    return f"{number:,}" if isinstance(number, int) else written(float(f"{number:.3g}"))


def collect(files: Sequence[str | Path]) -> pd.DataFrame:
    """One row for every claim in `data/claims.yml`, in its order; a claim without a verdict in
    `files` is `open`."""
    found = {row["id"]: row for file in files for row in pd.read_csv(file, dtype=str).to_dict("records")}
    unchecked = {"verdict": "open", "evidence": UNCHECKED}
    rows = [{"id": name, **claim, **unchecked, **found.get(name, {})} for name, claim in all_claims().items()]
    return pd.DataFrame(
        rows, columns=["id", "source", "place", "about", "statement", "verdict", "evidence", "notebook"]
    )


def main() -> None:
    """Collects the verdicts in the files named into `data/results/claims.csv`, and prints how many
    are of each kind."""
    table = collect(sys.argv[1:])
    write(out() / "data" / "results" / "claims.csv", table.to_csv(index=False, lineterminator="\n"))
    counts = table.verdict.value_counts()
    print(f"{len(table)} claims: {', '.join(f'{counts.get(verdict, 0)} {verdict}' for verdict in VERDICTS)}")


if __name__ == "__main__":
    main()
