"""Executes the notebooks in place, as they are committed: `python -m studies.notebooks [NAME ...]`.

Outputs stay, top to bottom; progress bars, widget states and times of day do not, so that a notebook
changes only when its contents change. Its metadata carry a digest of the code that its outputs came from.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from tqdm import tqdm

from specnb.notebook import origin
from specnb.notebook.claims import ROOT
from specnb.notebook.findings import write

FOLDER = ROOT / "notebooks"
KEPT = ("kernelspec", "language_info")
WIDGET = "application/vnd.jupyter.widget-view+json"


def tidy(notebook: NotebookNode) -> NotebookNode:
    """`notebook`, changed in place, without what only the run was about."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr" and not _is_bar(out)]
    for name in set(notebook.metadata) - set(KEPT):
        del notebook.metadata[name]
    return notebook


def _is_bar(output: NotebookNode) -> bool:
    return WIDGET in output.get("data", {}) and "%|" in output["data"].get("text/plain", "")


def execute(path: Path) -> None:
    """Runs a notebook with its own parameters and writes it back whole, tidied.

    Raises `nbclient.exceptions.CellExecutionError` when a cell fails; the file then stays as it was.
    """
    notebook = nbformat.read(path, as_version=4)
    code = origin.fingerprint(path, ROOT)
    NotebookClient(
        notebook, kernel_name="python3", record_timing=False, resources={"metadata": {"path": FOLDER}}
    ).execute()
    tidy(notebook).metadata["specnb"] = {"code": code}
    write(path, nbformat.writes(notebook) + "\n")


def main() -> None:
    """Executes all notebooks, or those whose names begin as an argument does, and writes their results in place."""
    os.environ.setdefault("SPECNB_OUT", str(ROOT))
    paths = [path for path in sorted(FOLDER.glob("*.ipynb")) if path.name.startswith(tuple(sys.argv[1:]) or "")]
    for path in tqdm(paths, desc="notebooks", unit=""):
        execute(path)


if __name__ == "__main__":
    main()
