"""What `make book` does beside Sphinx: notebooks get folded cells, figures to move, and an address for each
claim that they judge; the page of claims gets its table; links to source files lead to pages."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pandas as pd
from sphinx.application import Sphinx

from notebooks.support.dependencies import code_of, reads, writes
from notebooks.support.widgets import PLACE, place
from studies.files import ROOT, located, notebooks

CLAIMS = "<!-- here the book has the table of claims -->"
PLACES = "document.querySelectorAll('[data-widget]').forEach((el) => widget.render({ el }))"


def as_read(app: Sphinx, page: str, content: list[str]) -> None:
    """Change the source of a page before Sphinx parses it."""
    name = page.replace("notebooks/", "", 1)
    if name in notebooks() and page != name:
        content[0] = json.dumps(dressed(name, json.loads(content[0])))
        return
    content[0] = linked(page, content[0])
    if page == "docs/claims":
        content[0] = content[0].replace(CLAIMS, "\n".join(claims()))


def linked(page: str, text: str) -> str:
    """With the page of a module in place of its file."""

    def to_module(link: re.Match[str]) -> str:
        parts = PurePosixPath(os.path.normpath(PurePosixPath(page).parent / link[1])).with_suffix("").parts
        package = parts[parts[0] == "audit" :]
        described = f"build/api/{package[0]}/{'.'.join(package)}.rst"
        return f"](/{described})" if (ROOT / described).exists() else link[0]

    return re.sub(r"\]\((?!\w+:)([\w./]+\.py)\)", to_module, text)


def dressed(name: str, notebook: dict) -> dict:
    """A notebook with folded cells, addresses of claims and figures, and links to its files."""
    page, code = located("notebooks", name), code_of(notebooks()[name])
    tables = [file for file in (*writes(name, code), *reads(code)) if re.search(r"(?<!\.claims)\.csv$", file)]
    cells, judged = [], []
    for cell in notebook["cells"]:
        source = cell["source"] = linked(page, "".join(cell["source"]))
        cells.append(cell)
        if cell["cell_type"] == "markdown":
            # As MyST has them: a formula between lines of text, and JupyterLab's address of a heading.
            # A picture leads to the cell that draws it.
            source = re.sub(r"(?<=[^\n])\n(\$\$.+?\$\$)\n?", r"\n\n\1\n\n", source, flags=re.DOTALL)
            source = re.sub(r"(?<=\]\(#)[^)]+", lambda m: re.sub(r"[^\w-]", "", m[0]).lower(), source)
            cell["source"] = re.sub(r"^!(\[.*\]\(\S*/(\w+)\.svg\))$", r"[!\1](#figure-\2)", source, flags=re.MULTILINE)
            continue
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), "hide-input"]
        for data in (output.get("data", {}) for output in cell["outputs"]):
            if moving := data.pop(PLACE, None):
                data.pop("image/png", None)  # the picture in its place, for pages that run no script
                data["text/html"] = place(**moving)
        claims, figures = re.findall(r'nb\.claim\(\s*"([\w-]+)"', source), re.findall(r'\bsave\(.*, "([\w/]+)"', source)
        judged += claims
        places = [f"(claim-{claim})=" for claim in claims] + [f"(figure-{Path(figure).name})=" for figure in figures]
        cells[-1:-1] = [text_cell(each[1:-2], each) for each in places]
        for figure in (Path(figure).name for figure in figures):
            files = ", ".join(f"[{kind.upper()}](../figures/{figure}.{kind})" for kind in ("svg", "pdf"))
            cells.append(text_cell(f"files-{figure}", f"{{.files}}\nThis figure: {files}."))
    first = cells[0]
    for claim in judged:
        first["source"] = first["source"].replace(f"`{claim}`", f"[`{claim}`](#claim-{claim})")
    first["source"] += f"\n\n{{download}}`Download this notebook <{Path(page).name}.ipynb>` to run and change it."
    named = ", ".join(f"[{Path(file).name}](/{file})" for file in tables if (ROOT / file).exists())
    cells.append(text_cell("files", f"{{.files}}\nTables: {named}." if named else ""))
    return notebook | {"cells": cells}


def text_cell(name: str, source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "id": name[:64], "source": source}


def claims() -> Iterator[str]:
    """The table of claims, in Markdown."""
    table = pd.read_csv(ROOT / "data/results/claims.csv", dtype=str)
    plain = table.replace(r"([\\`*_\[\]<>|$#{}])", r"\\\1", regex=True)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in table.verdict.value_counts().items())
    yield f"{len(table)} claims: {counts}.\n\n{{.claims}}\n| claim | source | verdict | evidence | decided in |"
    yield "| --- | --- | --- | --- | --- |"
    for one in plain.itertuples():
        decided, claim = f"[{one.notebook}](#claim-{one.id})", f"**{one.id}**<br>{one.statement}"
        yield f"| {claim} | {one.source}, {one.place} | {one.verdict} | {one.evidence} | {decided} |"


def literal(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Absolute values, and aligned columns below a colon in the docstring of a module, stay as they are."""
    text = re.sub(r"\|(?=\S)([^|\n]*)(?<=\S)\|", r"\|\1\|", "\n".join(lines))
    lines[:] = (re.sub(r":(?=\n\n {4})", "::", text) if what == "module" else text).split("\n")


def widgets(app: Sphinx, error: Exception | None) -> None:
    """The figures to move, as a script and not as a module, which browsers do not load from files."""
    module = (ROOT / "notebooks/support/widgets.js").read_text(encoding="utf-8")
    script = re.sub(r"^export (?!default)", "", module, flags=re.MULTILINE).replace("export default", "const widget =")
    script = f"(() => {{\n{script}\ndocument.addEventListener('DOMContentLoaded', () => {PLACES});\n}})();\n"
    (Path(app.outdir) / "_static/widgets.js").write_text(script, encoding="utf-8")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", as_read)
    app.connect("autodoc-process-docstring", literal, priority=100)
    app.connect("build-finished", widgets)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
