"""The results of a notebook: tables, verdicts on claims, and a record of the code, inputs and machine behind them.

A claim that a notebook does not check is `open`. Files are written under the folder that the environment variable
`SPECNB_OUT` names; without it under `build/own` of the checkout, so that a reader's run leaves committed results alone.
The pipeline sets it to the checkout. A file is written completely or not at all.

Notebooks, claims and committed results are in the project's checkout, not in the installed package. This module can be
imported anywhere; `Findings` and `collect` raise `RuntimeError` outside a checkout.

The claims: their table, the thresholds in it, and the names of the verdicts.

`data/claims.csv` is the one place where a threshold is written. Its column `threshold` says in words what a claim
needs, with every number after a comparison sign, and the rules of `specnb.notebook.verdicts` read the numbers from
there. It is in the project's checkout, not in the installed package.

The values that the parameters of a notebook may have.
"""

from __future__ import annotations

import csv
import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from specnb.notebook.claims import CLAIMS, ROOT, VERDICTS, all_claims, named, thresholds
from specnb.notebook.verdicts import RULES

UNCHECKED = "no check has been run"  # the evidence for a claim whose notebook is still to come
DIGITS = 6  # significant digits in tables; the last bits of a sum differ between processors
PACKAGES = ("numpy", "scipy", "pandas", "torch", "transformers", "tokenizers", "matplotlib", "seaborn")


Number = bool | int | float | str | dict[str, "Number"]
"""A value in a file of numbers: a scalar, or an estimate as `{"value": ..., "low": ..., "high": ..., "n": ...}`."""


def out() -> Path:
    """The folder under which `data/results` and `figures` are written.

    `SPECNB_OUT` if it is set; otherwise `build/own` of the checkout, or of the working directory outside a checkout.
    """
    return Path(os.environ.get("SPECNB_OUT") or (ROOT if CLAIMS.exists() else Path.cwd()) / "build" / "own")


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file under a temporary name, moves it into place and returns `path`; readers never see half a file.

    Raises `OSError` if the disk is full or the folder is read-only; an old file then stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    return path


class Findings:
    """The findings of one notebook: a `verdict` for each of its claims, its `table`s, and `close` at the end.

    A notebook may have no claims. `parameters` are recorded with the results. Raises `ValueError` for an unknown
    notebook, `RuntimeError` outside the project's checkout.
    """

    def __init__(self, notebook: str, **parameters: Any) -> None:
        self.notebook = notebook
        self.parameters = parameters
        claims = all_claims()
        self.claims = claims[claims.notebook == notebook].set_index("id")
        known = set(claims.notebook) | {path.stem[:2] for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}
        if notebook not in known:
            raise ValueError(f"there is no notebook {notebook!r}; there are {sorted(known)}")
        self.verdicts: dict[str, tuple[str, str]] = {}
        self.numbers: dict[str, dict[str, Number]] = {}

    def verdict(
        self,
        claim: str,
        holds: bool | str | None = None,
        evidence: str = "",
        holds_if: bool = False,
        numbers: Mapping[str, object] | None = None,
        measured: Mapping[str, Any] | None = None,
    ) -> str:
        """Records and returns the verdict on `claim`.

        `measured` is what the claim's rule in `specnb.notebook.verdicts` judges, by the names of its parameters. A
        claim without a rule takes `holds` instead, one of `VERDICTS` or an answer: true if the claim is true as stated,
        `None` if nothing here can decide it (`open`), and false if it is `refuted`, or `conditional` where it is true
        under a condition that the source does not state (`holds_if`). `evidence` says in a sentence or two what decided
        it, and which condition, or for an open claim why nothing does. `numbers` are the values behind the evidence, by
        name: scalars, or estimates with `value`, `low` and `high`. They are written to
        `data/results/<notebook>.numbers.json`, from which the paper reads them.

        Raises `KeyError` for a claim of another notebook, `ValueError` for an unknown verdict, for evidence without a
        figure, for an open claim without a reason and for a number that is not finite, `TypeError` for a number that is
        neither a scalar nor an estimate.
        """
        if claim not in self.claims.index:
            raise KeyError(f"{claim!r} is not a claim of notebook {self.notebook}; those are {list(self.claims.index)}")
        verdict = named(holds, holds_if) if measured is None else RULES[claim](**measured)
        if verdict == "open" and not evidence.strip():
            raise ValueError(f"{claim!r} is open without a reason; give as evidence why nothing here can decide it")
        if verdict != "open" and not any(character.isdigit() for character in evidence):
            raise ValueError(f"the evidence for {claim!r} names no figure: {evidence!r}")
        self.verdicts[claim] = (verdict, " ".join(evidence.split()))
        self.numbers[claim] = {name: as_number(value, f"{claim}: {name}") for name, value in (numbers or {}).items()}
        return verdict

    def thresholds(self, claim: str) -> tuple[float, ...]:
        """The numbers in the threshold of `claim` in `data/claims.csv`, percentages as fractions."""
        return thresholds(claim)

    def table(self, name: str, frame: pd.DataFrame) -> pd.DataFrame:
        """Writes `frame` to `data/results/<notebook>_<name>.csv`, floats with six digits, and returns it unchanged."""
        content = frame.to_csv(index=False, lineterminator="\n", float_format=written)
        write(out() / "data" / "results" / f"{self.notebook}_{name}.csv", content)
        return frame

    def close(self) -> pd.DataFrame:
        """Writes verdicts, numbers and a record of the run; returns a row per claim: `id, verdict, evidence, notebook`.

        Outside the pipeline it prints to stderr where the results are.
        """
        rows = [
            (claim, *self.verdicts.get(claim, ("open", "not checked by this run")), self.notebook)
            for claim in self.claims.index
        ]
        verdicts = pd.DataFrame(rows, columns=["id", "verdict", "evidence", "notebook"])
        results = out() / "data" / "results"
        write(results / f"{self.notebook}.claims.csv", verdicts.to_csv(index=False, lineterminator="\n"))
        numbers = {claim: self.numbers.get(claim, {}) for claim in self.claims.index}
        write(results / f"{self.notebook}.numbers.json", json.dumps(numbers, indent=1, allow_nan=False) + "\n")
        write(results / f"{self.notebook}.run.json", json.dumps(stamp(self.parameters), indent=1) + "\n")
        if not os.environ.get("SPECNB_OUT"):
            print(f"results are in {out()}; SPECNB_OUT names another folder", file=sys.stderr)
        return verdicts


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


def plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """`parameters` with every value that JSON cannot hold turned into a string."""
    return {
        name: value if isinstance(value, int | float | str | None) else str(value) for name, value in parameters.items()
    }


def stamp(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters, versions and machine: what a result depends on besides code and inputs.

    It holds no time of day, so the same run gives the same stamp.
    """
    import torch  # slow to import, and not needed to collect verdicts

    return {
        "parameters": plain(parameters),
        **versions(),
        "machine": platform.machine(),
        "system": platform.system(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, Any]:
    """The versions of Python and of the packages that results depend on."""
    return {
        "python": platform.python_version(),
        "packages": {package: metadata.version(package) for package in PACKAGES},
    }


def collect() -> pd.DataFrame:
    """One row for every claim in `data/claims.csv`, in its order; a claim without a verdict is `open`.

    Raises `ValueError` for a verdict that is not one of `VERDICTS`, `RuntimeError` outside the project's checkout.
    """
    found: dict[str, dict[str, str]] = {}
    for file in sorted((out() / "data" / "results").glob("[0-9][0-9].claims.csv")):
        with file.open(newline="", encoding="utf-8") as lines:
            found |= {row["id"]: row for row in csv.DictReader(lines)}
    wrong = {row["verdict"] for row in found.values()} - set(VERDICTS)
    if wrong:
        raise ValueError(f"unknown verdicts {sorted(wrong)}; they must be among {VERDICTS}")
    claims = all_claims()
    unchecked = {"verdict": "open", "evidence": UNCHECKED}
    rows = [
        {"id": claim, **unchecked, "notebook": notebook} | found.get(claim, {})
        for claim, notebook in zip(claims.id, claims.notebook, strict=True)
    ]
    return pd.DataFrame(rows, columns=["id", "verdict", "evidence", "notebook"])


def main() -> None:
    """Collects all verdicts into `data/results/claims.csv` and prints how many there are of each kind."""
    table = collect()
    write(out() / "data" / "results" / "claims.csv", table.to_csv(index=False, lineterminator="\n"))
    counts = table.verdict.value_counts()
    summary = ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in VERDICTS)
    print(f"{len(table)} claims: {summary} (data/results/claims.csv)")


if __name__ == "__main__":
    main()


def require_at_least(parameters: Mapping[str, Any], **least: int) -> None:
    """Raises `ValueError` naming every one of `parameters` that is below its smallest allowed value in `least`.

    >>> require_at_least({"rows": 8, "gamma": 0}, rows=2, gamma=1)
    Traceback (most recent call last):
    ValueError: parameters too small: gamma = 0 (at least 1); change the cell tagged `parameters`
    """
    small = [f"{name} = {parameters[name]} (at least {low})" for name, low in least.items() if parameters[name] < low]
    if small:
        raise ValueError(f"parameters too small: {', '.join(small)}; change the cell tagged `parameters`")
