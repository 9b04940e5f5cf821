"""Where notebooks read their data, and where results are written and collected.

They are written under `out()`: the pipeline's `build`, or `build/own` for a reader's run, never over what is committed.
Claims, data and notebooks are in the project's checkout, not in the installed package.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, where there is one
CLAIMS = ROOT / "data" / "claims.csv"
VERDICTS = ("holds", "refuted", "conditional", "open")
UNCHECKED = "no check has been run"  # the evidence for a claim whose notebook is still to come
DIGITS = 6  # significant digits in tables; the last bits of a sum differ between processors

Number = bool | int | float | str | dict[str, "Number"]
"""A value in a file of numbers: a scalar, or an estimate as `{"value": ..., "low": ..., "high": ..., "n": ...}`."""


def out() -> Path:
    """The folder under which `data/results` and `figures` are written.

    `SPECNB_OUT` if it is set; otherwise `build/own` of the checkout, or of the working directory outside a checkout.
    """
    return Path(os.environ.get("SPECNB_OUT") or (ROOT if CLAIMS.exists() else Path.cwd()) / "build" / "own")


def data_file(name: str) -> Path:
    """The file `data/<name>`; of a notebook's table the one under `out()`, if this run has made it.

    >>> data_file("reference/table3_alpha.csv").relative_to(ROOT).as_posix()
    'data/reference/table3_alpha.csv'
    """
    made = out() / "data" / name
    return made if made.name[:2].isdigit() and made.exists() else ROOT / "data" / name


def read_table(name: str, **how: Any) -> pd.DataFrame:
    """The table `data/<name>.csv`, where `data_file` finds it; `how` goes to `pandas.read_csv`."""
    table: pd.DataFrame = pd.read_csv(data_file(f"{name}.csv"), **how)
    return table


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file under a temporary name, moves it into place and returns `path`; readers never see half a file.

    Raises `OSError`, with the path, if the disk is full or the folder is read-only; an old file then stays as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as error:
        hint = f"{error.strerror} (the environment variable SPECNB_OUT names another folder for what is made)"
        raise OSError(error.errno, hint, str(path)) from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return path


def all_claims() -> pd.DataFrame:
    """The claims in `data/claims.csv`, every column as text. Raises `RuntimeError` outside the project's checkout."""
    if not CLAIMS.exists():
        raise RuntimeError(
            f"{CLAIMS} does not exist: findings and verdicts need the project's checkout, and this specnb is installed "
            "without it. Clone the repository and install it there with `pip install -e .`"
        )
    return pd.read_csv(CLAIMS, dtype=str)


def written(value: float) -> str:
    """`value` with `DIGITS` significant digits; a whole number below 10^15 with all of its digits.

    >>> written(2 / 3), written(1234567.0), written(1234567.8)
    ('0.666667', '1234567', '1.23457e+06')
    """
    # Processors add in different orders, so the last bits of a tie such as 0.1234565 differ between them. Rounding to
    # 12 digits first gives all of them the same tie.
    value = float(f"{value:.12g}")
    whole = value.is_integer() and abs(value) < 1e15
    return f"{value:.0f}" if whole else f"{value:.{DIGITS}g}"


def as_number(value: object, name: str) -> Number:
    """`value` as it is stored: floats rounded as in tables, an estimate as a dictionary.

    Raises `TypeError` for what is neither a scalar nor an estimate, and `ValueError` for NaN and infinities; `name`
    says which number it was.

    >>> as_number(2 / 3, "alpha"), as_number(Fraction(1, 4), "bound")
    (0.666667, 0.25)
    """
    if hasattr(value, "value") and hasattr(value, "low") and hasattr(value, "high"):
        parts = {part: getattr(value, part) for part in ("value", "low", "high", "n") if hasattr(value, part)}
        return {part: as_number(number, f"{name}, {part}") for part, number in parts.items()}
    value = value.item() if hasattr(value, "item") and getattr(value, "size", None) == 1 else value
    if isinstance(value, bool | int | str):
        return value
    if not isinstance(value, float | Fraction):
        raise TypeError(f"{name} is a {type(value).__name__}; give a number, a string or an estimate with an interval")
    if not math.isfinite(value):
        raise ValueError(f"{name} is {value}; numbers must be finite")
    return float(written(float(value)))


def collect(files: Sequence[str | Path]) -> pd.DataFrame:
    """One row for every claim in `data/claims.csv`, in its order; a claim without a verdict in `files` is `open`."""
    found = {row["id"]: row for file in files for row in pd.read_csv(file, dtype=str).to_dict("records")}
    claims = all_claims()
    rows = [
        {"id": claim, "verdict": "open", "evidence": UNCHECKED, "notebook": notebook} | found.get(claim, {})
        for claim, notebook in zip(claims.id, claims.notebook, strict=True)
    ]
    return pd.DataFrame(rows, columns=["id", "verdict", "evidence", "notebook"])


def main() -> None:
    """Collects the verdicts in the files named into `data/results/claims.csv`, and prints how many are of each kind."""
    table = collect(sys.argv[1:])
    write(out() / "data" / "results" / "claims.csv", table.to_csv(index=False, lineterminator="\n"))
    counts = table.verdict.value_counts()
    print(f"{len(table)} claims: {', '.join(f'{counts.get(verdict, 0)} {verdict}' for verdict in VERDICTS)}")


if __name__ == "__main__":
    main()
