"""The comparison of notebooks on another processor."""

from pathlib import Path
from typing import Any

import nbformat
import papermill
import pytest

from specnb.notebook import reproduce
from specnb.notebook.claims import ROOT
from tests import portability
from tests.portability import run


@pytest.mark.parametrize(("name", "given"), [("01_unbiasedness", {"threads": 2}), ("14_prediction", {})])
def test_only_notebooks_with_threads_are_given_threads(
    name: str, given: dict[str, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passed: list[Any] = []
    monkeypatch.setenv("SPECNB_OUT", "as before")
    monkeypatch.setattr(papermill, "execute_notebook", lambda *_, parameters, **__: passed.append(parameters))
    run(ROOT / "notebooks" / f"{name}.ipynb", tmp_path, threads=2)
    assert passed == [given]


def test_what_the_pipeline_ran_is_compared_and_the_rest_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two notebooks the pipeline ran one, which printed something else than is committed."""
    monkeypatch.setattr(portability, "MADE", tmp_path)
    monkeypatch.setattr(reproduce, "up_to_date", lambda name, entry, folder: name == "14_prediction")
    notebook = nbformat.read(ROOT / "notebooks" / "14_prediction.ipynb", as_version=4)
    printed = next(cell for cell in notebook.cells if cell.cell_type == "code" and cell.outputs)
    printed.outputs.insert(0, nbformat.v4.new_output("stream", text="something else"))
    nbformat.write(notebook, tmp_path / "14_prediction.ipynb")

    monkeypatch.setattr("sys.argv", ["portability.py", "--not-made", "13", "14"])
    assert portability.main() == 0
    assert capsys.readouterr().out == "notebooks/13_decision_guide.ipynb\n"

    monkeypatch.setattr("sys.argv", ["portability.py", "--made", "13", "14"])
    assert portability.main() == 1
    assert capsys.readouterr().out.startswith("14_prediction: 1 differ\n")
