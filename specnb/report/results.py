"""What a notebook leaves behind: tables, verdicts on claims, what they were made of, and a stamp of where.

A verdict is computed from checks that could have come out otherwise; a claim that a notebook names
and does not settle stays open. Everything is written under the folder that the variable `SPECNB_OUT` names. Without
it that is `build/own`, so that a run of one's own changes no committed result; the pipeline names the project's root.
A file is there either whole or not at all.
"""

from __future__ import annotations

import csv
import json
import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

from specnb.report import origin

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = ROOT / "data" / "claims.csv"
VERDICTS = ("holds", "refuted", "conditional", "open")
DIGITS = 6  # of what is written to tables; the last bits of a sum are different on another processor
PACKAGES = ("numpy", "scipy", "pandas", "torch", "transformers", "tokenizers", "matplotlib", "seaborn")


def out() -> Path:
    """The folder under which `data/results` and `figures` are written, wherever the process was started."""
    return Path(os.environ.get("SPECNB_OUT") or ROOT / "build" / "own")


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file under another name and moves it into place, so that no reader sees half of it.

    Raises `OSError` where there is no room or no permission; the old file, if any, is then as it was.
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
    """The findings of one notebook: `settle` its claims, keep its `table`s, and `close` at the end.

    Raises `ValueError` for a notebook that no claim names, and for a parameter that papermill was given and the
    notebook does not have.
    """

    def __init__(self, notebook: str, **parameters: Any) -> None:
        self.notebook = notebook
        self.parameters = parameters
        claims = pd.read_csv(CLAIMS, dtype=str)
        self.claims = claims[claims.notebook == notebook].set_index("id")
        if self.claims.empty:
            raise ValueError(
                f"{CLAIMS.name} gives no claim to notebook {notebook!r}; it names {sorted(set(claims.notebook))}"
            )
        self.verdicts: dict[str, tuple[str, str]] = {}
        self.begun = origin.begun(ROOT, notebook)
        if self.begun:
            require_known(_given(), ROOT / "notebooks" / f"{self.begun['notebook']}.ipynb")

    def verdict(self, claim: str, holds: bool, evidence: str, holds_if: bool = False) -> str:
        """Records and returns the verdict on `claim`: `holds` if it held as stated, `conditional` if it
        held only under the condition that `evidence` names (`holds_if`), otherwise `refuted`.

        Raises `KeyError` for a claim that is not this notebook's, `ValueError` for missing evidence.
        """
        if claim not in self.claims.index:
            raise KeyError(f"{claim!r} is not a claim of notebook {self.notebook}; those are {list(self.claims.index)}")
        if not any(character.isdigit() for character in evidence):
            raise ValueError(f"the evidence for {claim!r} names no figure: {evidence!r}")
        verdict = "holds" if holds else "conditional" if holds_if else "refuted"
        self.verdicts[claim] = (verdict, " ".join(evidence.split()))
        return verdict

    def table(self, name: str, frame: pd.DataFrame) -> pd.DataFrame:
        """Writes `frame` to `data/results/<notebook>_<name>.csv`, its numbers as `written`, and returns it."""
        content = frame.to_csv(index=False, lineterminator="\n", float_format=written)
        write(out() / "data" / "results" / f"{self.notebook}_{name}.csv", content)
        return frame

    def close(self) -> pd.DataFrame:
        """Writes verdicts, origin and stamp; returns one row per claim: `id, verdict, evidence, notebook`.

        Says on stderr where a run outside the pipeline has left its results.
        """
        rows = [
            (claim, *self.verdicts.get(claim, ("open", "not checked by this run")), self.notebook)
            for claim in self.claims.index
        ]
        verdicts = pd.DataFrame(rows, columns=["id", "verdict", "evidence", "notebook"])
        results = out() / "data" / "results"
        write(results / f"{self.notebook}.claims.csv", verdicts.to_csv(index=False, lineterminator="\n"))
        if self.begun:
            made = origin.ended(self.begun, ROOT, out(), plain(self.parameters))
            write(results / f"{self.notebook}.origin.json", json.dumps(made, indent=1) + "\n")
        write(results / f"{self.notebook}.stamp.json", json.dumps(stamp(self.parameters), indent=1) + "\n")
        if not os.environ.get("SPECNB_OUT"):
            print(f"results are in {out()}; SPECNB_OUT names another folder", file=sys.stderr)
        return verdicts


def written(value: float) -> str:
    """`value` with `DIGITS` significant digits; a whole number below 10^15 with all of its digits.

    >>> written(2 / 3), written(1234567.0), written(1234567.8)
    ('0.666667', '1234567', '1.23457e+06')
    """
    # Processors add in different orders, so that a tie such as 0.1234565 comes with another last bit on each. Rounding
    # to 12 digits first gives all of them the same tie.
    value = float(f"{value:.12g}")
    whole = value.is_integer() and abs(value) < 1e15
    return f"{value:.0f}" if whole else f"{value:.{DIGITS}g}"


def require_known(given: list[str], notebook: Path) -> None:
    """Raises `ValueError` if one of the names that were `given` is not a parameter of the `notebook`."""
    known = origin.parameters(notebook)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"{notebook.stem} has no parameter {', '.join(unknown)}; it has {', '.join(known)}")


def _given() -> list[str]:
    """The names in the cells that papermill has put into this notebook; papermill marks them by their first line."""
    from IPython import get_ipython

    shell = get_ipython()
    cells = shell.user_ns.get("In", []) if shell else []
    return [name for cell in cells if cell.startswith("# Parameters\n") for name in origin.assigned(cell)]


def plain(parameters: dict[str, Any]) -> dict[str, Any]:
    """`parameters` as JSON has them."""
    return {
        name: value if isinstance(value, int | float | str | None) else str(value) for name, value in parameters.items()
    }


def stamp(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters, versions and machine: what a result depends on besides the code, which `origin` has. No time, so
    that the same run gives the same stamp."""
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
    """One row for every claim in `data/claims.csv`, in its order; those without a verdict are open.

    Raises `ValueError` for a verdict that is not one of `VERDICTS`.
    """
    found: dict[str, dict[str, str]] = {}
    for file in sorted((out() / "data" / "results").glob("[0-9][0-9].claims.csv")):
        with file.open(newline="", encoding="utf-8") as lines:
            found |= {row["id"]: row for row in csv.DictReader(lines)}
    wrong = {row["verdict"] for row in found.values()} - set(VERDICTS)
    if wrong:
        raise ValueError(f"unknown verdicts {sorted(wrong)}; they must be among {VERDICTS}")
    claims = pd.read_csv(CLAIMS, dtype=str)
    unchecked = {"verdict": "open", "evidence": "no check has been run"}
    rows = [
        {"id": claim, **unchecked, "notebook": notebook} | found.get(claim, {})
        for claim, notebook in zip(claims.id, claims.notebook, strict=True)
    ]
    return pd.DataFrame(rows, columns=["id", "verdict", "evidence", "notebook"])


def main() -> None:
    """Collects all verdicts into `data/results/claims.csv` and says how many claims are open."""
    table = collect()
    write(out() / "data" / "results" / "claims.csv", table.to_csv(index=False, lineterminator="\n"))
    counts = table.verdict.value_counts()
    summary = ", ".join(f"{counts.get(verdict, 0)} {verdict}" for verdict in VERDICTS)
    print(f"{len(table)} claims: {summary} (data/results/claims.csv)")


if __name__ == "__main__":
    main()
