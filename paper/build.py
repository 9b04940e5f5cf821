"""The paper: `python -m paper` makes `paper/paper.pdf` and, as LaTeX, `paper/tables/` from the
results under `out()`.

The compiler sees the texts of this folder, the results, the figures and what `of_code` says of the
test, and nothing else: they are put into an empty folder first. Numbers, tables and conditions are
Typst: `numbers.typ`, `tables.typ` and `remarks.typ`, which look up results with `results.typ`. What
is missing, and a statement that the results contradict, stops the build by its name.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import typst

from audit_studies.power.audit_comparison import SUITE
from specnb_audit import alternatives, auditor, bets, evidence, low_acceptance, numerics, uniforms
from studies.files import ROOT, out, write


@cache
def of_code() -> dict[str, Any]:
    """What the paper says of the test as it is in the code: its constants, its kinds of bets with
    how many each has, and the known bugs that it is tried on."""
    p = torch.tensor([[0.5, 0.3, 0.2]])
    counted = [Counter(bets.Bets().bets_on(bets.Row([0], p, q)).alternatives) for q in (None, p.flip(-1))]
    kinds = [
        {"kind": kind, "bets": counted[1][kind], "without": counted[0][kind], "meaning": meaning}
        for kind, meaning in alternatives.ALTERNATIVES.items()
    ]
    bugs = [{"bug": name, "reported": bug.reported_in, "what": bug.description} for name, bug in SUITE.items()]
    constants = {
        "stakes": evidence.STRENGTHS, "bins": uniforms.BINS, "initial": uniforms.LEARNING, "edges": uniforms.EDGES,
        "early": bets.EARLY, "late": bets.LATE, "of_all": evidence.ALL_TOKENS_WEIGHT, "likely": alternatives.LIKELY,
        "level": signature(low_acceptance.explain_acceptance).parameters["level"].default,
        "tolerance": signature(low_acceptance.explain_acceptance).parameters["tolerance"].default,
        "share": auditor.SHARE, "orders": [round(float(order), 3) for order in numerics.ORDERS],
    }  # fmt: skip
    return constants | {"kinds": kinds, "bugs": bugs}


def assembled(folder: Path, results: Path) -> dict[str, str]:
    """Puts into `folder` what the paper is made of: its texts, the committed tables of studies, and
    what notebooks made under `results`.

    Returns what is told to the compiler: the names of all tables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.typ", "*.bib"):
        for source in (ROOT / "paper").glob(pattern):
            shutil.copy(source, folder)
    (folder / "code.json").write_text(json.dumps(of_code()))
    of_pair = ["corpus.csv", "pair/quality.csv", "pair/target/config.json", "pair/draft/config.json"]
    parts = [(ROOT, f"data/{name}") for name in ("errata.csv", *of_pair)]
    parts += [(ROOT, f"audit/data/{name}") for name in ("engines/kernels.csv", "reference/*_speeds.csv")]
    for home in ("", "audit/"):
        of_notebooks = [(results, f"{home}data/results/[0-9]*.*"), (results, f"{home}figures/*.pdf")]
        parts += [(ROOT, f"{home}data/results/[a-z]*.*"), *of_notebooks]
    for place, pattern in [*parts, (results, "data/results/claims.csv")]:
        for file in place.glob(pattern):
            copy = folder / file.relative_to(place)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
    tables = [file.relative_to(folder).as_posix() for file in folder.rglob("data/results/*.csv")]
    return {"tables": ",".join(sorted(name.replace("data/results/", "").removesuffix(".csv") for name in tables))}


def compiled(folder: Path, inputs: dict[str, str], name: str = "paper") -> bytes:
    """The PDF of the text `name` in `folder`, with the fonts that come with the compiler only.

    Raises `RuntimeError` for an error and for a warning.
    """
    try:
        pdf, warnings = typst.compile_with_warnings(
            folder / f"{name}.typ", root=folder, ignore_system_fonts=True, sys_inputs=inputs
        )
    except typst.TypstError as error:
        raise RuntimeError(f"the {name} does not compile: {error.diagnostic}") from error
    if warnings:
        raise RuntimeError(f"the {name} compiles with warnings: {'; '.join(warning.message for warning in warnings)}")
    assert isinstance(pdf, bytes)
    return pdf


def latex(rows: list[dict[str, str]]) -> str:
    """A LaTeX fragment for documents that load booktabs and longtable."""
    table = pd.DataFrame(rows)
    columns = "llp{0.25\\textwidth}lp{0.35\\textwidth}" if "evidence" in table else "l" * len(table.columns)
    return str(table.to_latex(index=False, escape=True, longtable=len(table) > 40, column_format=columns))


def build(results: Path) -> dict[str, bytes]:
    """All files of the paper by name, made from `results`. Raises `RuntimeError` with what is
    missing or untrue."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        inputs = assembled(folder, results)
        made = {f"{name}.pdf": compiled(folder, inputs, name) for name in ("paper", "supplement")}
        tables = typst.query(folder / "tables.typ", "<tables>", field="value", one=True, root=folder)
    return made | {f"tables/{name}.tex": latex(rows).encode() for name, rows in json.loads(tables).items()}


def main() -> None:
    """Writes everything under `paper/`, or stops and says why it cannot."""
    try:
        made = build(out())
    except RuntimeError as error:
        raise SystemExit(f"no paper from {out()}: {error}\n`make reproduce` makes the results") from None
    for name, content in made.items():
        write(out() / "paper" / name, content)
    print(", ".join(f"paper/{name}" for name in made))
