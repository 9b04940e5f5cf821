"""A sweep: runs of one notebook over a grid of parameters, gathered in one table. `make sweep`, or

    snakemake --cores 2 --keep-going --config sweep=workflow/sweep.yml
    python workflow/sweep.py workflow/sweep.yml build/own    # gathers what there is, also
                                                             while it runs

Beside the runs it writes `table.csv`, in which each line is one cell of one table of one run, and
`summary.md`.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import yaml

MOST = 100_000  # runs
# In the column `table`; tables of notebooks have names without a dot.
VERDICTS, NUMBERS = ".claims", ".numbers"
FORM = "a sweep has `notebook`, `grid` (lists of values by parameter) and, if any is the same in all runs, `parameters`"


class Sweep(NamedTuple):
    """What a file such as sweep.yml asks for: a notebook, and the parameters of each run by the
    name of its folder."""

    notebook: str
    varied: tuple[str, ...]
    runs: dict[str, dict[str, Any]]


def read(file: Path) -> Sweep:
    """The sweep in `file`. Raises `ValueError` for another form.

    The folder of a run is named after a digest of its parameters: a value may be a list, or a
    model's name with a slash, which paths of Snakemake's `Paramspace` cannot hold.
    """
    asked = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(asked, dict) or not {"notebook", "grid"} <= asked.keys() <= {"notebook", "grid", "parameters"}:
        raise ValueError(f"{file}: {FORM}")
    notebook, grid, same = asked["notebook"], asked["grid"], asked.get("parameters") or {}
    if not (isinstance(grid, dict) and grid and isinstance(same, dict) and all(map(_is_list, grid.values()))):
        raise ValueError(f"{file}: {FORM}")
    if twice := sorted(grid.keys() & same.keys()):
        raise ValueError(f"{file}: {', '.join(twice)} stands under `grid` and under `parameters`")
    if len(runs := list(product(*grid.values()))) > MOST:
        raise ValueError(f"{file}: the grid has {len(runs):,} runs; the most is {MOST:,}")
    named = {}
    for values in runs:
        parameters = same | dict(zip(grid, values, strict=True))
        digest = hashlib.sha256(json.dumps([notebook, parameters], sort_keys=True).encode())
        named[digest.hexdigest()[:12]] = parameters
    return Sweep(str(notebook), tuple(grid), named)


def _is_list(values: object) -> bool:
    return isinstance(values, list) and bool(values)


def folder(file: Path, out: Path) -> Path:
    """Where the sweep of `file` is, in the folder `out` of the results of own runs."""
    return out / "sweeps" / file.stem


def lines_of(made: Path) -> Iterator[tuple[str, str, str, str]]:
    """Table, row, column and value of everything that a run wrote into the folder `made`; of
    verdicts and numbers the claim instead of the row."""
    results = [file for file in sorted(made.rglob("*")) if file.parent.name == "results"]
    for path in (file for file in results if file.suffix == ".csv"):
        verdicts = path.stem.endswith(VERDICTS)
        name = VERDICTS if verdicts else path.stem.partition("_")[2]
        with path.open(encoding="utf-8", newline="") as content:
            for number, row in enumerate(csv.DictReader(content)):
                key = row.pop("id") if verdicts else str(number)
                yield from ((name, key, column, value) for column, value in row.items())
    for path in (file for file in results if file.name.endswith(f"{NUMBERS}.json")):
        for claim, numbers in json.loads(path.read_text(encoding="utf-8")).items():
            yield from ((NUMBERS, claim, *leaf) for name, value in numbers.items() for leaf in _leaves(name, value))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for part, inner in value.items():
            yield from _leaves(f"{name}.{part}", inner)
    else:
        yield name, str(value)


def failure(run: Path) -> str:
    """Why a run has no result: its last error, or that there was none."""
    if not (run / "log.ipynb").exists():
        return "not run"
    cells = json.loads((run / "log.ipynb").read_text(encoding="utf-8"))["cells"]
    errors = [one for cell in cells for one in cell.get("outputs", []) if one["output_type"] == "error"]
    return f"failed: {errors[-1]['ename']}: {errors[-1]['evalue']}" if errors else "interrupted"


def gather(file: Path, out: Path) -> str:
    """Writes `table.csv` and `summary.md` into the sweep's folder, and returns the summary."""
    sweep, at = read(file), folder(file, out)
    told, verdicts, numbers, empty = [], {}, {}, True
    at.mkdir(parents=True, exist_ok=True)
    with (at / "table.csv").open("w", encoding="utf-8", newline="") as content:
        table = csv.writer(content, lineterminator="\n")
        table.writerow(["run", *sweep.varied, "table", "row", "column", "value"])
        for run, parameters in sweep.runs.items():
            values = [parameters[name] for name in sweep.varied]
            done = (at / run / "notebook.ipynb").exists()
            told.append([run, *values, "done" if done else failure(at / run)])
            for line in lines_of(at / run / "made") if done else ():
                table.writerow([run, *values, *line])
                empty = False
                name, row, column, value = line
                if name == VERDICTS and column == "verdict":
                    verdicts.setdefault(row, []).append(value)
                elif name == NUMBERS:
                    numbers.setdefault((row, column), []).append(value)
    ended = sum(line[-1] == "done" for line in told)
    text = [f"# {sweep.notebook} over {', '.join(sweep.varied)}: {ended} of {len(told)} runs are done", ""]
    text += _markdown(["run", *sweep.varied, "result"], told)
    kinds = ("holds", "conditional", "refuted", "open")
    text += _section("Verdicts, in how many runs", ["claim", *kinds],
                     [[claim, *map(found.count, kinds)] for claim, found in verdicts.items()])  # fmt: skip
    text += _section("Numbers of the claims, over all runs", ["claim", "number", "least", "greatest"],
                     [[*key, *_ends(all_)] for key, all_ in numbers.items()])  # fmt: skip
    (at / "summary.md").write_text("\n".join(text) + "\n", encoding="utf-8")
    rest = f"{at}/table.csv and summary.md have the rest"
    if ended and empty:
        rest = f"{sweep.notebook} writes no tables and judges no claims; each run's notebook in {at} has what it shows"
    return "\n".join(text[: 4 + len(told)]) + f"\n\n{rest}"


def _ends(values: list[str]) -> tuple[str, str]:
    try:
        ordered = sorted(values, key=float)
    except ValueError:  # words
        ordered = sorted(values)
    return ordered[0], ordered[-1]


def _section(title: str, head: list[str], rows: list[list[Any]]) -> list[str]:
    """A table below its title; nothing without rows, as of a notebook that has no claims."""
    return ["", f"## {title}", "", *_markdown(head, rows)] if rows else []


def _markdown(head: list[str], rows: list[list[Any]]) -> list[str]:
    cells = [[" ".join(str(cell).split()).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    lines = [f"| {' | '.join(row)} |" for row in cells]
    return [lines[0], "|" + " --- |" * len(head), *lines[1:]]


if __name__ == "__main__":
    print(gather(Path(sys.argv[1]), Path(sys.argv[2])))
