"""Provenance of results: the code, inputs and parameters that a notebook's results were made from.

`data/results/<notebook>.origin.json` is committed beside the results. It holds the parameters of the run and digests of
the notebook's code cells, of every module of this package that they import, of every file that was read and of every
file that was written. It is the same on every machine: results that depend on timing (`_timed`) are left out. `stale`
compares the record with the present state of the checkout.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from specnb.notebook.source_digest import digest, modules

# Read by every notebook; a notebook's other inputs are listed under `reads` in config.yml.
SHARED = ("data/corpus.csv", "data/pair/draft/model.safetensors", "data/pair/target/model.safetensors")
FREE = ("threads", "progress")  # parameters that do not affect results

Origin = dict[str, Any]


def _cells(notebook: Path) -> list[dict[str, Any]]:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells if cell["cell_type"] == "code"]


def code(notebook: Path, root: Path) -> Origin:
    """Digests of the code cells of a notebook and of the modules under `root` that they import.

    Text cells, outputs, comments and docstrings do not change them.
    """
    sources = [cell["source"] for cell in _cells(notebook)]
    return {"code": digest("\0".join(sources).encode()), "modules": modules(root, *map(_python, sources))}


def fingerprint(notebook: Path, root: Path) -> str:
    """One digest of everything that `code` returns; an executed notebook has it in its metadata."""
    return digest(json.dumps(code(notebook, root)).encode())


def _python(source: str) -> str:
    """A cell without the lines that only Jupyter understands."""
    return "\n".join(line for line in source.splitlines() if not line.startswith(("%", "!")))


def parameters(notebook: Path) -> list[str]:
    """The names that the cell tagged `parameters` assigns."""
    tagged = [cell["source"] for cell in _cells(notebook) if "parameters" in cell["metadata"].get("tags", [])]
    return [name for source in tagged for name in assigned(source)]


def assigned(source: str) -> list[str]:
    r"""The names that the statements of `source` assign, in order.

    >>> assigned("gamma = 4\nseed = 0")
    ['gamma', 'seed']
    """
    statements = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return [target.id for node in statements for target in node.targets if isinstance(target, ast.Name)]


def config(root: Path) -> dict[str, dict[str, Any]]:
    """The entries of `config.yml`, by the names of the notebooks."""
    entries: dict[str, dict[str, Any]] = yaml.safe_load((root / "config.yml").read_text(encoding="utf-8"))["notebooks"]
    return entries


def promised(name: str, entry: dict[str, Any], timed: bool = False) -> list[str]:
    """The files that notebook `name` must write, by its `entry` in `config.yml`; those with timings only if `timed`."""
    number = name[:2]
    files = [f"data/results/{number}.claims.csv", f"data/results/{number}.numbers.json"]
    files += [f"data/results/{number}_{table}.csv" for table in entry.get("tables", [])]
    files += [f"figures/{number}_{figure}.{kind}" for figure in entry.get("figures", []) for kind in ("svg", "pdf")]
    return [file for file in files if timed or "_timed." not in file]


def digests(files: Iterable[str], *folders: Path) -> dict[str, str]:
    """The digest of every file that exists, from the first of the `folders` that has it."""
    found = {file: next((folder / file for folder in folders if (folder / file).exists()), None) for file in files}
    return {file: digest(path.read_bytes()) for file, path in sorted(found.items()) if path}


def at_start(root: Path, number: str) -> Origin:
    """Digests of the code and inputs of notebook `number`; empty if `config.yml` does not list it.

    Called when the notebook starts, so that a file edited during the run counts as changed.
    """
    for name, entry in config(root).items():
        if name.startswith(number):
            made_of = code(root / "notebooks" / f"{name}.ipynb", root)
            return {"notebook": name, **made_of, "read": digests([*SHARED, *entry.get("reads", [])], root)}
    return {}


def at_end(start: Origin, root: Path, folder: Path, parameters: dict[str, Any]) -> Origin:
    """`start` with the `parameters` of the run and digests of the promised files that are under `folder`."""
    name = start["notebook"]
    return start | {"parameters": parameters, "written": digests(promised(name, config(root)[name]), folder)}


def stale(root: Path, folder: Path) -> list[str]:
    """What has changed since the results under `folder` were made: one sentence for each, with the file's name."""
    return [
        sentence
        for name, entry in config(root).items()
        for sentence in _stale(json.loads(_path(folder, name).read_text(encoding="utf-8")), name, entry, root, folder)
    ]


def _path(folder: Path, name: str) -> Path:
    return folder / "data" / "results" / f"{name[:2]}.origin.json"


def _stale(made: Origin, name: str, entry: dict[str, Any], root: Path, folder: Path) -> list[str]:
    number, changes, code_now = name[:2], [], code(root / "notebooks" / f"{name}.ipynb", root)
    if made["notebook"] != name or made["code"] != code_now["code"]:
        changes.append(f"the code of notebooks/{name}.ipynb has changed since its results were made")
    before, after = made.get("modules", {}), code_now["modules"]
    if changed := sorted(module for module in before | after if before.get(module) != after.get(module)):
        changes.append(f"the results of notebook {number} were made by other code than is in {', '.join(changed)}")
    for parameter, value in entry.get("parameters", {}).items():
        ran = made["parameters"].get(parameter)
        if parameter not in FREE and ran != value:
            changes.append(f"notebook {number} ran with {parameter} = {ran!r}, and config.yml says {value!r}")
    read, written = [*SHARED, *entry.get("reads", [])], promised(name, entry)
    now = digests(read, folder, root) | digests(written, folder)
    for word, files in (("read", read), ("written", written)):
        verb = "wrote" if word == "written" else word
        changes += [
            f"{file} is not what notebook {number} {verb}" for file in files if made[word].get(file) != now.get(file)
        ]
        changes += [
            f"notebook {number} {verb} {file} too, and config.yml does not list it"
            for file in sorted(made[word].keys() - set(files))
        ]
    return changes
