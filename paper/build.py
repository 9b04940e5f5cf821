"""The paper: `python -m paper` makes `paper/paper.pdf` and, as LaTeX, `paper/tables/`.

It is made from `paper/`'s sources, the results and the figures, and from nothing else: what it needs is put into
an empty folder first, so that what is not there cannot be used. A result that is missing stops it.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
import typst

from paper.numbers import numbers
from paper.reading import Missing, Results, known_bugs
from paper.remarks import require_true
from specnb.notebook.findings import CLAIMS, ROOT, UNCHECKED, out, write

SOURCES = ("paper.typ", "style.typ", "references.bib")
FIGURE = re.compile(r"\"(\d\d_\w+)\"")


def claims_table(results: Results) -> pd.DataFrame:
    """Every claim with its source, verdict and what decided it; one that nothing has checked names its notebook."""
    stated = pd.read_csv(CLAIMS, dtype=str)
    table = results.claims().loc[stated.id].reset_index()
    undecided = "not checked yet; planned as notebook " + table.notebook.str.zfill(2)
    return pd.DataFrame(
        {
            "claim": table.id,
            "source": (stated.source + ", " + stated.locus).replace("beyond, -", "ours"),
            "verdict": table.verdict,
            "evidence": table.evidence.where(table.evidence != UNCHECKED, undecided),
        }
    )


ENGINES = {
    "openvino": "OpenVINO", "llama_cpp": "llama.cpp", "transformers": "transformers", "vllm": "vLLM",
    "vllm_mended": "vLLM, mended", "onnxruntime": "ONNX", "mlx_lm": "mlx-lm",
}  # fmt: skip


def expected_table(results: Results) -> pd.DataFrame:
    """Table 4 of the paper, remade: what Theorem 3.8 gives, and the range that rounding of alpha and c allows."""
    table = results.table("03_table4")
    return pd.DataFrame(
        {
            "task": table.task,
            "draft": table.draft,
            "T": table.temperature.map("{:g}".format),
            "gamma": table.gamma.map("{:g}".format),
            "alpha": table.alpha.map("{:.2f}".format),
            "c": table.cost_ratio.map("{:.2f}".format),
            "printed": table.expected.map("{:.1f}".format),
            "computed": table.computed.map("{:.2f}".format),
            "range": table.least.map("{:.2f}".format) + " to " + table["most"].map("{:.2f}".format),
        }
    )


def bug_suite_table(results: Results) -> pd.DataFrame:
    """The bug suite as printed: tokens until found, or never; share of passes (· where a test cannot meet it)."""
    table = known_bugs(results)
    tokens = {name: table[name].map(lambda n: "never" if pd.isna(n) else f"{n:,.0f}") for name in ("median", "90%")}
    passes = {
        name: table[name].map(lambda passed: "·" if pd.isna(passed) else f"{passed:.0%}")
        for name in ("vLLM V1", "vLLM V2", "TensorRT-LLM", "transformers")
    }
    named = {"bug": table.index, "tv": table.tv.map("{:.3f}".format), "median": tokens["median"], "most": tokens["90%"]}
    return pd.DataFrame(named | passes)


def decision_table(results: Results) -> pd.DataFrame:
    """Best gamma and predicted speed-up by batch, c and alpha: part of the table of notebook 13."""
    table = results.table("13_best_gamma")
    table = table[table.batch.isin([1, 32, 128]) & table.c.isin([0, 0.05, 0.2])]
    cells = table.assign(cell=table.gamma.astype(str) + " (" + table["speed-up"].map("{:.2f}".format) + ")")
    wide = cells.pivot_table("cell", ["batch", "c"], "alpha", aggfunc="first").reset_index()
    return wide.rename(columns=str).astype(str)


def readings_table(results: Results) -> pd.DataFrame:
    """One printed number under several definitions: tokens per step, alpha by Equation 1, predicted speed-up."""
    table = results.table("13_readings")
    return pd.DataFrame(
        {
            "meaning": table["short"],
            "tokens": table["tokens per step"].map("{:.2f}".format),
            "alpha": table["alpha by Equation 1"].map("{:.2f}".format),
            "speed": table["predicted speed-up, c = 0.05"].map("{:.2f}".format),
        }
    )


def engines_table(results: Results) -> pd.DataFrame:
    """Released engines as the audit sees them, one row per engine, kind of speculation and settings."""
    every = results.table("engines")
    table = every[every.speculation != "none"]
    after = table.found_after.map(lambda n: "no" if pd.isna(n) else f"after {n:.0f}")
    unsound = every.row[(every.speculation == "none") & (every.verdict == "rejected")]
    after += table.control.isin(unsound).map({True: "*", False: ""})
    return pd.DataFrame(
        {
            "engine": table.engine.map(ENGINES),
            "speculation": table.speculation,
            "settings": [settings_in_words(row) for row in table.itertuples()],
            "tokens": table.tokens.map("{:,}".format),
            "rejected": after,
            "tv": table.tv.map("{:.3f}".format),
            "low": table.tv_low.map("{:.3f}".format),
            "high": table.tv_high.map("{:.3f}".format),
        }
    )


def settings_in_words(row: Any) -> str:
    """Temperature, top-k or top-p, and the dtype if it is the engine's own, of a row of `engines.csv`."""
    filters = f", k {row.top_k}" if row.top_k else f", p {row.top_p:g}" if row.top_p < 1 else ""
    return f"{row.temperature:g}{filters}{', own' * (row.dtype != 'float32')}"


TABLES = {
    "engines": engines_table,
    "decision": decision_table,
    "readings": readings_table,
    "claims": claims_table,
    "expected": expected_table,
    "bug_suite": bug_suite_table,
}


def latex(table: pd.DataFrame) -> str:
    """A LaTeX fragment for documents that load booktabs and longtable."""
    long = len(table) > 40
    columns = "llp{0.1\\textwidth}p{0.5\\textwidth}" if "evidence" in table else "l" * len(table.columns)
    return str(table.to_latex(index=False, escape=True, longtable=long, column_format=columns))


def compiled(files: dict[str, bytes]) -> bytes:
    """The PDF of `paper.typ` among `files`, with the fonts that come with the compiler only.

    Raises `RuntimeError` for an error and for a warning.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for path, content in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)
        try:
            pdf, warnings = typst.compile_with_warnings(folder / "paper.typ", root=folder, ignore_system_fonts=True)
        except typst.TypstError as error:
            raise RuntimeError(f"the paper does not compile: {error.diagnostic}") from error
    if warnings:
        raise RuntimeError(f"the paper compiles with warnings: {'; '.join(warning.message for warning in warnings)}")
    assert isinstance(pdf, bytes)
    return pdf


def build() -> dict[str, bytes]:
    """All files of the paper by name, made from the results and figures under `out()`. Raises `Missing`."""
    folder = out()
    results = Results(folder / "data" / "results")
    require_true(results)
    files = {name: (ROOT / "paper" / name).read_bytes() for name in SOURCES}
    for name in sorted(set(FIGURE.findall(files["paper.typ"].decode()))):
        path = folder / "figures" / f"{name}.pdf"
        if not path.exists():
            raise Missing(f"missing: figures/{path.name}; `make reproduce` writes it")
        files[f"figures/{path.name}"] = path.read_bytes()
    tables = {name: table(results) for name, table in TABLES.items()}
    values = numbers(results) | {"tables": {name: table.to_dict("records") for name, table in tables.items()}}
    files["numbers.json"] = (json.dumps(values, indent=1, ensure_ascii=False) + "\n").encode()
    made = {"paper.pdf": compiled(files), "numbers.json": files["numbers.json"]}
    return made | {f"tables/{name}.tex": latex(table).encode() for name, table in tables.items()}


def main() -> None:
    """Writes everything under `paper/`, or stops with the name of what is missing."""
    try:
        made = build()
    except Missing as missing:
        raise SystemExit(f"no paper: {missing}") from None
    for name, content in made.items():
        write(out() / "paper" / name, content)
    print(", ".join(f"paper/{name}" for name in made))
