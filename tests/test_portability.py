"""The comparison of notebooks on another processor."""

from pathlib import Path
from typing import Any

import papermill
import pytest

from specnb.report.claims import ROOT
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
