"""Notebooks are executed in place and tidied: results stay, progress bars and machine traces go."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_notebook, new_output

from specnb.notebook import origin
from specnb.notebook.claims import ROOT
from studies import notebooks


def _written(path: Path, source: str) -> Path:
    nbformat.write(new_notebook(cells=[new_code_cell(source)], metadata={"widgets": {"state": {}}}), path)
    return path


def test_outputs_stay_and_bars_go(tmp_path: Path) -> None:
    path = _written(tmp_path / "a.ipynb", "import sys\nprint('bar', file=sys.stderr)\nprint('result')")
    notebooks.execute(path)
    done = nbformat.read(path, as_version=4)
    assert [output.text for output in done.cells[0].outputs] == ["result\n"]
    assert set(done.metadata) <= {*notebooks.KEPT, "specnb"}
    assert done.metadata.specnb == {"code": origin.fingerprint(path, ROOT)}
    assert "execution" not in done.cells[0].metadata
    first = path.read_bytes()
    notebooks.execute(path)
    assert path.read_bytes() == first


def test_only_bars_among_widgets_go() -> None:
    views: list[dict[str, Any]] = [
        {notebooks.WIDGET: {}, "text/plain": text} for text in ("Loading: 100%|###| 1/1", "interactive(...)")
    ]
    notebook = new_notebook(cells=[new_code_cell(outputs=[new_output("display_data", data=view) for view in views])])
    kept = notebooks.tidy(notebook).cells[0].outputs
    assert [output.data["text/plain"] for output in kept] == ["interactive(...)"]


def test_a_failing_cell_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = _written(tmp_path / "a.ipynb", "1 / 0")
    before = path.read_bytes()
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        notebooks.execute(path)
    assert path.read_bytes() == before
