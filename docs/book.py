"""`make book`: build/book, a site of the notebooks as committed, guides, claims, docstrings and the
paper.

Nothing is executed. Sphinx reads build/book-source: Markdown files and notebooks at their places in
the checkout, so that links between them hold, with what a page needs beyond the file: folded cells,
the files behind each figure, an address for each cell that judges a claim, the table of claims, and
a page for each module.
"""

import ast
import html
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pandas as pd

from notebooks.support.dependencies import code_of, reads, writes
from notebooks.support.widgets import PLACE, place
from studies.files import located, notebooks

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "specnb": ROOT, "specnb_audit": ROOT / "audit", "studies": ROOT, "audit_studies": ROOT / "audit", "notebooks": ROOT,
}  # and where each is  # fmt: skip
PAGES = (
    "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "audit/README.md", "audit/docs/*.md", "notebooks/*.md",
    "audit/data/findings/*.md", "data/results/README.md", "data/pair/README.md", "data/t5/README.md",
    "data/smollm2-head/README.md",
)  # fmt: skip
GUIDES = (
    "run-a-notebook", "teach", "decode", "refusals", "add-a-drafter", "add-a-rule", "add-a-notebook", "sweeps", "slurm",
    "dependencies", "glossary",
)  # fmt: skip
AUDIT = ("any-engine", "constraints", "speed", "litgpt", "on-transformers", "export-token-ids", "engines", "kernels")
LINK = re.compile(r"\]\((?!\w+:|//|#)([^)#\s]+)")

# ("data/results/02_joint.csv", "") for a table, (module, name) for code; and how many assignments
# away it was used.
Labels = dict[tuple[str, str], int]
# What notebooks use everywhere, which decides no claim by itself.
GENERAL = (
    "notebooks.support.claims", "notebooks.support.figures", "specnb.statistics", "studies.corpus",
    "studies.files",
)  # fmt: skip
LOADING = ("Sampling", "load_pair", "corpus", "completed", "normalise", "prompts_of")


def lineage(sources: list[str], number: str) -> list[list[tuple[str, Labels]]]:
    """For each code cell its statements, each with the tables and the functions of this project
    behind it.

    They are followed through assignments, which are counted, and through the notebook's own
    functions, which are not. That may name too many; it misses what a function reads by itself.
    """
    known: dict[str, Labels] = {}
    cells: list[list[tuple[str, Labels]]] = []
    for source in sources:
        cells.append([])
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.ImportFrom):
                if (module := statement.module or "").split(".")[0] in PACKAGES:
                    known |= {alias.asname or alias.name: {(module, alias.name): 0} for alias in statement.names}
                continue
            nodes = list(ast.walk(statement))
            names = [node for node in nodes if isinstance(node, ast.Name)]
            made = [node.id for node in names if isinstance(node.ctx, ast.Store)]
            made += [statement.name] if isinstance(statement, ast.FunctionDef) else []
            read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
            grown = []  # what gets new rows or columns
            labels = nearest(known.get(name, {}) for name in read)
            for node in nodes:
                if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                    grown.append(first_name(node))
                if isinstance(node, ast.Call):
                    called = node.func.attr if isinstance(node.func, ast.Attribute) else first_name(node.func)
                    named = str(getattr(node.args[0], "value", "")) if node.args else ""
                    if called == "append":
                        grown.append(first_name(node.func))
                    if called == "read_table":
                        labels[located("data", f"{named}.csv"), ""] = 0
                    if called == "table" and first_name(node.func) == "nb":
                        labels[located("data/results", f"{number}_{named}.csv"), ""] = 0
                        grown.append(first_name(node.args[1]))
            grown += [] if isinstance(statement, ast.Assign | ast.FunctionDef) else made
            away = labels if isinstance(statement, ast.FunctionDef) else {one: n + 1 for one, n in labels.items()}
            known |= {name: away for name in made if name not in grown}
            known |= {name: nearest([away, known.get(name, {})]) for name in grown}
            known = {name: found for name, found in known.items() if name not in ("nb", "claim", "")}
            cells[-1].append((ast.unparse(statement), labels))
    return cells


def nearest(several: Iterable[Labels]) -> Labels:
    """All labels, each with its smallest number of assignments."""
    found: Labels = {}
    for labels in several:
        found |= {label: min(away, found.get(label, away)) for label, away in labels.items()}
    return found


def first_name(node: ast.AST) -> str:
    """`table` of `table.groupby("x")["y"]`; empty if it begins with something else than a name."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def files_of(figure: str, behind: Labels, tables: list[str]) -> str:
    """The paragraph below a figure: the tables behind it, and the figure as files."""
    found = sorted({name for name, code in behind if not code and (ROOT / name).exists()})
    words = "Data"
    if not found:
        words = "Tables of this notebook"
        found = [name for name in tables if (ROOT / name).exists()]
    top = "../" * located("notebooks", figure).count("/")  # from the folder of the notebook
    linked_tables = ", ".join(f"[{Path(name).name}]({top}{name})" for name in found) or "none"
    kinds = ", ".join(f"[{kind.upper()}]({top}{located('figures', figure)}.{kind})" for kind in ("svg", "pdf"))
    return f"{{.files}}\n{words}: {linked_tables}. Figure: {kinds}."


def said_of_code(labels: Labels) -> str:
    """Links to the functions and classes that decide: of `labels` the nearest ones."""
    away = {one: n for one, n in labels.items() if one[1] and not one[1].isupper()
            and one[1] not in LOADING and not one[0].startswith(GENERAL)}  # fmt: skip
    links = set()
    for module, name in (one for one, n in away.items() if n == min(away.values())):
        value = getattr(importlib.import_module(module), name, None)
        value = importlib.import_module(f"{module}.{name}") if value is None else value
        home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", module)
        home = home if home.split(".")[0] in PACKAGES else module
        # Others lead to the page of their module.
        described = isinstance(value, type) or inspect.isroutine(value)
        links.add(f"{{py:obj}}`{name} <{f'{home}.{name}' if described else home}>`")
    return ", ".join(sorted(links))


def dressed(name: str) -> tuple[dict, dict[str, str]]:
    """The notebook as a page, and for each claim that it judges the links to its cell and code."""
    notebook, parsed = json.loads(notebooks()[name].read_text(encoding="utf-8")), code_of(notebooks()[name])
    tables = [file for file in writes(name, parsed) + reads(parsed) if re.search(r"(?<!\.claims)\.csv$", file)]
    number, cells, judged = name.split("_")[0], [], {}
    mark = f"figure-{name.rpartition('/')[0]}"  # before the name of a figure: its address
    for cell in notebook["cells"]:
        cell["source"] = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            # JupyterLab's address of a heading, as MyST writes it.
            cell["source"] = re.sub(r"(?<=\]\(#)[^)]+", lambda m: re.sub(r"[^\w-]", "", m[0]).lower(), cell["source"])
            cell["source"] = re.sub(r"^!(\[.*\]\(\S*/(\w+)\.svg\))$", rf"[!\1](#{mark}\2)", cell["source"], flags=re.M)
    traced = iter(lineage([cell["source"] for cell in notebook["cells"] if cell["cell_type"] == "code"], number))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            cells.append(cell)
            continue
        if cell["metadata"].get("jupyter", {}).get("source_hidden"):
            cell["metadata"]["tags"] = [*cell["metadata"].get("tags", []), "hide-input"]
        for data in (output.get("data", {}) for output in cell["outputs"]):
            if moving := data.pop(PLACE, None):
                data.pop("image/png")  # the picture in its place, for pages that run no script
                data["text/html"] = place(**moving)
        statements = next(traced)
        for code, labels in statements:
            for claim in re.findall(r"nb\.claim\('([\w-]+)'", code):
                judged[claim] = f"[{number}](#claim-{claim})<br>{said_of_code(labels)}"
                cells.append(text_cell(f"claim-{claim}", f"(claim-{claim})="))
        figures = {Path(figure).name: figure for figure in re.findall(r'\bsave\(.*, "([\w/]+)"', cell["source"])}
        cells += [text_cell(f"{mark}{figure}", f"({mark}{figure})=") for figure in figures] + [cell]
        behind = nearest(labels for _, labels in statements)
        cells += [text_cell(f"files-{own}", files_of(figure, behind, tables)) for own, figure in figures.items()]
    first = notebook["cells"][0]
    for claim in judged:
        first["source"] = first["source"].replace(f"`{claim}`", f"[`{claim}`](#claim-{claim})")
    download = f"/download/{name}.ipynb"
    first["source"] += f"\n\n{{download}}`Download this notebook <{download}>` to run and change it."
    notebook["cells"] = cells
    return notebook, judged


def text_cell(name: str, source: str) -> dict:
    return {"cell_type": "markdown", "metadata": {}, "id": name[:64], "source": source}


def claims_page(judged: dict[str, str]) -> str:
    claims = pd.read_csv(ROOT / "data/results/claims.csv", dtype=str)
    errata = pd.read_csv(ROOT / "data/errata.csv", dtype=str)
    counts = claims.verdict.value_counts()

    def plain(text: str) -> str:
        return re.sub(r"([\\`*_\[\]<>|$#{}])", r"\\\1", text)

    rows = [
        f"| **{row.id}**<br>{plain(row.statement)} | {row.source}, {plain(row.place)} | {row.verdict} "
        f"| {plain(row.evidence)} | {judged.get(row.id, 'no notebook yet')} |" for row in claims.itertuples()
    ]  # fmt: skip
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in counts.index)
    return "\n".join([
        "# Claims and verdicts", "",
        f"{len(claims)} claims: {said}. The last column leads to the cell that decides, and to its code. "
        "A claim *holds* if it is true as its source states it; *conditional* means: only under a condition that the "
        "source does not state; a *refuted* one is false as stated; an *open* one is unsettled, or about accelerators "
        "or large models. The evidence is the condition as the notebook has it, the control, and the numbers; what is "
        "below 1e-12 is rounding, and 0 here. [As a table](data/results/claims.csv); [registry](data/claims.yml).", "",
        "{.claims}", "| claim | source | verdict | evidence | decided in |", "| --- " * 5 + "|", *rows, "",
        "## Misprints of the sources", "", "| source | printed | right | shown in |", "| --- " * 4 + "|",
        *(f"| {row.source}, {plain(row.place)} | {plain(row.printed)} | {plain(row.right)} | {row.notebook} |"
          for row in errata.itertuples()), "",
    ])  # fmt: skip


def dependencies_page() -> str:
    """What each dependency is for, as pyproject.toml says behind it. Raises `KeyError` where it
    says nothing."""
    lines = ["# Dependencies", "", "Lower bounds are the oldest versions tried; `constraints.txt` has exact ones."]
    for file in ("pyproject.toml", "audit/pyproject.toml"):
        text = (ROOT / file).read_text(encoding="utf-8")
        project, said = tomllib.loads(text)["project"], dict(re.findall(r'^    "([^"]+)", # (.+)$', text, re.MULTILINE))
        lists = {project["name"]: project["dependencies"]}
        lists |= {f"{project['name']}[{extra}]": names for extra, names in project["optional-dependencies"].items()}
        for wanted, names in lists.items():
            lines += ["", f"## `pip install {wanted}`", "", "| package | for |", "| --- | --- |"]
            lines += [f"| `{name}` | {said[name]} |" for name in names]
    return "\n".join(lines) + "\n"


def api_pages(out: Path) -> None:
    """A page for each module, and an index."""
    lines = ["# API", "", "The public names of `specnb`, and where each is defined:", ""]
    names = re.findall(r"^from (specnb[\w.]*) import (.+)$", (ROOT / "specnb/__init__.py").read_text(), re.M)
    lines += [f"- {name}: [{module}]({module}.rst)" for module, name in names if module != "specnb"]
    for package, above in PACKAGES.items():
        lines += ["", "```{toctree}", f":caption: {package}", ":maxdepth: 1", ""]
        for file in sorted((above / package).rglob("*.py")):
            module = ".".join(file.relative_to(above).with_suffix("").parts).removesuffix(".__init__")
            if not module.endswith("__main__"):
                (out / f"{module}.rst").write_text(f"{module}\n{'=' * len(module)}\n\n.. automodule:: {module}\n")
                lines.append(module)
        lines.append("```")
    (out / "index.md").write_text("\n".join(lines) + "\n")


def contents(order: list[str]) -> str:
    """The table of contents beside every page, with the notebooks in this order."""
    pages = [located("notebooks", name) for name in order]
    parts = {
        "Notebooks": ["notebooks/README", *(page for page in pages if not page.startswith("audit/"))],
        "Guides": [f"docs/{name}" for name in GUIDES],
        "Audit": [
            "audit/README",
            *(page for page in pages if page.startswith("audit/")),
            *(f"audit/docs/{name}" for name in AUDIT),
        ],
        "Results": ["claims", "paper/paper", "audit/data/findings/README", "audit/data/findings/*", "data/*/README"],
        "Reference": ["api/index", "docs/index", "CONTRIBUTING", "CHANGELOG"],
    }
    return "".join("\n```{toctree}\n:hidden:\n:glob:\n:caption: " + "\n".join([name, "", *pages, "```", ""])
                   for name, pages in parts.items())  # fmt: skip


def stage(out: Path) -> None:
    """Everything that Sphinx reads, in the folder `out`, which is made anew."""
    shutil.rmtree(out, ignore_errors=True)
    for folder in ("_static/mathjax", "api", "download/audit", "notebooks", "audit/notebooks", "paper"):
        (out / folder).mkdir(parents=True)
    for page in (file for pattern in PAGES for file in ROOT.glob(pattern)):
        (out / page.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page, out / page.relative_to(ROOT))
    own = re.findall(r"\]\((\w+)\.ipynb\)", (ROOT / "notebooks/README.md").read_text(encoding="utf-8"))
    audit = re.findall(r"\]\(notebooks/(\w+)\.ipynb\)", (ROOT / "audit/README.md").read_text(encoding="utf-8"))
    order = list(dict.fromkeys([*own, *(f"audit/{name}" for name in audit)]))
    judged: dict[str, str] = {}
    for name in order:
        notebook, decided = dressed(name)
        (out / located("notebooks", f"{name}.ipynb")).write_text(json.dumps(notebook), encoding="utf-8")
        shutil.copy(notebooks()[name], out / "download" / f"{name}.ipynb")
        judged |= decided
    (out / "docs/package.md").unlink()  # for the package index
    (out / "docs/dependencies.md").write_text(dependencies_page(), encoding="utf-8")
    (out / "claims.md").write_text(claims_page(judged), encoding="utf-8")
    said = "the [paper](paper.pdf), and the [supplement](supplement.pdf) with all claims, misprints and engines"
    (out / "paper/paper.md").write_text(f"# The paper\n\nTypeset from the committed results: {said}.\n")
    api_pages(out / "api")
    with (out / "README.md").open("a", encoding="utf-8") as readme:
        readme.write(contents(order))
    for page in [*out.rglob("*.md"), *out.rglob("notebooks/*.ipynb")]:
        linked(page, out)
    for file in (ROOT / "docs/_static").iterdir():
        shutil.copy(file, out / "_static")
    shutil.copy(ROOT / "docs/conf.py", out)
    script = (ROOT / "notebooks/support/widgets.js").read_text(encoding="utf-8")
    # As a script and not as a module, which browsers do not load from files.
    script = re.sub(r"^export (?!default)", "", script, flags=re.M).replace("export default", "const widget =")
    places = "document.querySelectorAll('[data-widget]').forEach((el) => widget.render({ el }))"
    script = f"(() => {{\n{script}\ndocument.addEventListener('DOMContentLoaded', () => {places});\n}})();\n"
    (out / "_static/widgets.js").write_text(script, encoding="utf-8")


def linked(page: Path, out: Path) -> None:
    """Brings the files that `page` links to; a link to a module leads to its page."""
    text = page.read_text(encoding="utf-8")
    top = "../" * (len(page.relative_to(out).parts) - 1)

    def to_module(link: re.Match[str]) -> str:
        file = (page.parent / link[1]).resolve().relative_to(out.resolve())
        parts = file.with_suffix("").parts[file.parts[0] == "audit" :]
        return f"]({top}api/{'.'.join(parts)}.rst)" if parts[0] in PACKAGES else link[0]

    text = re.sub(r"\]\((?!\w+:)([\w./]+\.py)(?:#[^)]*)?\)", to_module, text)
    page.write_text(text, encoding="utf-8")
    for link in LINK.findall(text):
        file = (page.parent / link).resolve()
        committed = ROOT / file.relative_to(out.resolve()) if file.is_relative_to(out.resolve()) else ROOT
        if not file.exists() and committed.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(committed, file)


def forwarded(to: str) -> str:
    """A page that leads to the address `to`."""
    return (
        '<!DOCTYPE html><meta charset="utf-8"><title>specnb</title>'
        f'<meta http-equiv="refresh" content="0; url={to}"><a href="{to}">This page has moved.</a>\n'
    )


def redirect(site: Path) -> None:
    """Pages at the addresses that notebooks had, in `docs/moved.csv`, which lead to where they
    are."""
    for old, new in pd.read_csv(ROOT / "docs/moved.csv").itertuples(index=False):
        (site / f"{old}.html").write_text(forwarded(f"../{new}.html"), encoding="utf-8")
    (site / "index.html").write_text(forwarded("README.html"), encoding="utf-8")


def broken_links(site: Path) -> list[str]:
    """Links of the pages to files or places that are not there, and what a page loads from another
    host.

    Links from listings of source code are left out: those of re-exported names lead to where they
    are not described.
    """
    places, links, broken = {}, {}, []
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        places[page.resolve()] = {html.unescape(name) for name in re.findall(r'\b(?:id|name)="([^"]+)"', text)}
        links[page] = {html.unescape(link) for link in re.findall(r'\b(?:href|src)="([^"]*)"', text)}
        loaded = re.findall(r'<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)="((?:https?:)?//[^"]+)"', text)
        broken += [f"{page.relative_to(site)} loads {link}" for link in loaded]
    for page, found in links.items():
        for link in () if page.is_relative_to(site / "_modules") else found:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            file = (page.parent / unquote(parts.path)).resolve() if parts.path else page.resolve()
            there = parts.fragment in ("", *places.get(file, [parts.fragment]))
            if not file.is_file() or not there:
                broken.append(f"{page.relative_to(site)} links to {link}")
    return sorted(broken)


def main() -> None:
    source, site = ROOT / "build/book-source", ROOT / "build/book"
    stage(source)
    (mathjax,) = find_spec("sphinx-mathjax-offline").submodule_search_locations
    shutil.copy(Path(mathjax, "static/mathjax/tex-svg.js"), source / "_static/mathjax")
    shutil.rmtree(site, ignore_errors=True)
    # A warning is an error, and so is a reference that leads nowhere.
    # Minutes of work: who waits at a terminal sees how far it is.
    quiet = [] if sys.stdout.isatty() else ["-q"]
    options = [*quiet, "-n", "-W", "--keep-going", "-j", "2", "-d", ROOT / "build/book-cache"]
    status = subprocess.run([sys.executable, "-m", "sphinx", *options, source, site], cwd=ROOT).returncode
    site.mkdir(exist_ok=True)
    redirect(site)
    broken = broken_links(site)
    for line in broken:
        print(line, file=sys.stderr)
    if status or broken:
        raise SystemExit(status or 1)
    print("build/book/index.html")


if __name__ == "__main__":
    main()
