"""What a notebook found: tables, verdicts on claims, and the numbers behind them.

They are written under `out()`: the pipeline's `build`, or `build/own` for a reader's run, never over what is committed.
A notebook reads its data through `data_file` and `read_table`. Claims, data and notebooks are in the project's
checkout, not in the installed package; without it `Findings` and `collect` raise `RuntimeError`.
"""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Any

import pandas as pd

ROOT = Path(__file__).resolve().parents[2]  # of the checkout, where there is one
CLAIMS = ROOT / "data" / "claims.csv"
VERDICTS = ("holds", "refuted", "conditional", "open")
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


def all_claims() -> pd.DataFrame:
    """The claims in `data/claims.csv`, every column as text. Raises `RuntimeError` outside the project's checkout."""
    if not CLAIMS.exists():
        raise RuntimeError(
            f"{CLAIMS} does not exist: findings and verdicts need the project's checkout, and this specnb is installed "
            "without it. Clone the repository and install it there with `pip install -e .`"
        )
    return pd.read_csv(CLAIMS, dtype=str)


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


class Findings:
    """The findings of one notebook: a `verdict` for each of its claims, its `table`s, and `close` at the end.

    `rules` decide verdicts from what was measured, by the ids of the claims. `parameters` are recorded with the
    results. Raises `ValueError` for a notebook that does not exist.
    """

    def __init__(self, notebook: str, rules: Mapping[str, Callable[..., str]] | None = None, /, **parameters: Any):
        self.notebook, self.rules, self.parameters = notebook, rules or {}, parameters
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

        `measured` is what the claim's rule judges, by the names of its parameters. Without a rule, `holds` is one of
        `VERDICTS` or an answer: true if the claim is true as stated, `None` if nothing here can decide it (`open`),
        false if it is `refuted`, or `conditional` where it is true under a condition that the source does not state
        (`holds_if`). `evidence` says in a sentence or two what decided it, or for an open claim why nothing does.
        `numbers` are the values behind the evidence: scalars, or estimates with `value`, `low` and `high`.

        Raises `KeyError` for a claim of another notebook, `ValueError` for an unknown verdict, for evidence without a
        figure and for an open claim without a reason, and what `as_number` raises.
        """
        if claim not in self.claims.index:
            raise KeyError(f"{claim!r} is not a claim of notebook {self.notebook}; those are {list(self.claims.index)}")
        verdict = named(holds, holds_if) if measured is None else self.rules[claim](**measured)
        if verdict == "open" and not evidence.strip():
            raise ValueError(f"{claim!r} is open without a reason; give as evidence why nothing here can decide it")
        if verdict != "open" and not any(character.isdigit() for character in evidence):
            raise ValueError(f"the evidence for {claim!r} names no figure: {evidence!r}")
        self.verdicts[claim] = (verdict, " ".join(evidence.split()))
        self.numbers[claim] = {name: as_number(value, f"{claim}: {name}") for name, value in (numbers or {}).items()}
        return verdict

    def table(self, name: str, frame: pd.DataFrame) -> pd.DataFrame:
        """Writes `frame` to `data/results/<notebook>_<name>.csv`, floats with six digits, and returns it unchanged."""
        content = frame.to_csv(index=False, lineterminator="\n", float_format=written)
        write(out() / "data" / "results" / f"{self.notebook}_{name}.csv", content)
        return frame

    def close(self) -> pd.DataFrame:
        """Writes verdicts, numbers and a record of the run; returns a row per claim: `id, verdict, evidence, notebook`.

        Without `SPECNB_OUT` it prints to stderr where the results are.
        """
        unchecked = ("open", "not checked by this run")
        rows = [(claim, *self.verdicts.get(claim, unchecked), self.notebook) for claim in self.claims.index]
        verdicts = pd.DataFrame(rows, columns=["id", "verdict", "evidence", "notebook"])
        results = out() / "data" / "results"
        write(results / f"{self.notebook}.claims.csv", verdicts.to_csv(index=False, lineterminator="\n"))
        numbers = {claim: self.numbers.get(claim, {}) for claim in self.claims.index}
        write(results / f"{self.notebook}.numbers.json", json.dumps(numbers, indent=1, allow_nan=False) + "\n")
        write(results / f"{self.notebook}.run.json", json.dumps(stamp(self.parameters), indent=1, default=str) + "\n")
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


def stamp(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters, versions and machine of a run. It holds no time of day, so the same run gives the same record."""
    import torch  # slow to import, and not needed to collect verdicts

    return {
        "parameters": parameters,
        "python": platform.python_version(),
        "packages": {package: metadata.version(package) for package in PACKAGES},
        "machine": platform.machine(),
        "system": platform.system(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "threads": torch.get_num_threads(),
    }


def require_at_least(parameters: Mapping[str, Any], **least: int) -> None:
    """Raises `ValueError` naming every one of `parameters` that is below its smallest allowed value in `least`.

    >>> require_at_least({"rows": 8, "gamma": 0}, rows=2, gamma=1)
    Traceback (most recent call last):
    ValueError: parameters too small: gamma = 0 (at least 1); change the cell tagged `parameters`
    """
    small = [f"{name} = {parameters[name]} (at least {low})" for name, low in least.items() if parameters[name] < low]
    if small:
        raise ValueError(f"parameters too small: {', '.join(small)}; change the cell tagged `parameters`")


def collect() -> pd.DataFrame:
    """One row for every claim in `data/claims.csv`, in its order; a claim without a verdict is `open`."""
    files = sorted((out() / "data" / "results").glob("[0-9]*.claims.csv"))
    found = {row["id"]: row for file in files for row in pd.read_csv(file, dtype=str).to_dict("records")}
    claims = all_claims()
    rows = [
        {"id": claim, "verdict": "open", "evidence": UNCHECKED, "notebook": notebook} | found.get(claim, {})
        for claim, notebook in zip(claims.id, claims.notebook, strict=True)
    ]
    return pd.DataFrame(rows, columns=["id", "verdict", "evidence", "notebook"])


def main() -> None:
    """Collects all verdicts into `data/results/claims.csv` and prints how many there are of each kind."""
    table = collect()
    write(out() / "data" / "results" / "claims.csv", table.to_csv(index=False, lineterminator="\n"))
    counts = table.verdict.value_counts()
    print(f"{len(table)} claims: {', '.join(f'{counts.get(verdict, 0)} {verdict}' for verdict in VERDICTS)}")


if __name__ == "__main__":
    main()
