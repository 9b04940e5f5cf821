"""What a notebook reads and writes, by its calls: the Snakefile runs it again when a file that it
reads has changed.

    nb.table("alpha", ...)             writes data/results/NN_alpha.csv
    save(figure, "NN_alpha")           writes figures/NN_alpha.svg and .pdf
    read_table("reference/table3")     reads data/reference/table3.csv
    data_file("workloads.jsonl")       reads data/workloads.jsonl
    pooled()                           reads the tables that `predictions.py` names, and their
                                       records
    "drafters", the name of a study    reads data/results/drafters.csv and its record

The names are literal. Every notebook also writes its verdicts and numbers.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

from studies.files import ROOT, located

PREDICTIONS = Path(__file__).parent / "predictions.py"


def code_of(notebook: Path) -> ast.Module:
    """The code cells of a notebook, parsed."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return ast.parse("\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"))


def reads(code: ast.Module) -> list[str]:
    """The files that a notebook reads, in order, without those that every notebook depends on."""
    found = set(_of_studies(code))
    for function, texts in _calls(code):
        if function == "pooled" and not texts:
            found.update(_of_studies(ast.parse(PREDICTIONS.read_text(encoding="utf-8"))))
        elif function in ("read_table", "data_file") and texts:
            found.add(located("data", texts[0] + ".csv" * (function == "read_table")))
    return sorted(found)


def writes(name: str, code: ast.Module) -> list[str]:
    """The tables and figures that the notebook `name` writes, such as 05_acceptance or
    audit/02_engines."""
    number = name.partition("_")[0]
    results, figures = [f"{number}.claims.csv", f"{number}.numbers.json"], []
    for function, texts in _calls(code):
        if function == "nb.table":
            results.append(f"{number}_{texts[0]}.csv")
        elif function == "save":
            figures += [f"{texts[0]}.{kind}" for kind in ("svg", "pdf")]
    return [located("data/results", file) for file in results] + [located("figures", file) for file in figures]


def _calls(code: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Every call: the function, and its arguments that are literal texts."""
    for node in ast.walk(code):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), [text for argument in node.args for text in _text(argument)]


def _of_studies(code: ast.Module) -> Iterator[str]:
    """Table and record of every study that a text in `code` names."""
    for name in {text for node in ast.walk(code) for text in _text(node)}:
        for folder in ("data/results", "audit/data/results"):
            if name.isidentifier() and (ROOT / folder / f"{name}.record.json").exists():
                yield from (f"{folder}/{name}.csv", f"{folder}/{name}.record.json")


def _text(node: ast.AST) -> list[str]:
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
