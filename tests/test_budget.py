"""Line budgets: what comes new has to find its lines, by being small or by something else going."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
# Goals of the design: specnb 8,000 in 40 files, specnb_audit 6,000, studies 6,500, paper 450, tests 12,000, notebooks
# 4,500 lines of code. A number above its goal is where the tree stands; it may only be lowered. It was raised
# once, for the T5, PaSS, lookahead, the head of the real model and the kernels of engines.
LINES = {"specnb": 8_000, "specnb_audit": 6_000, "studies": 9_610, "paper": 450, "tests": 15_300}
NOTEBOOKS = 4_775
FILES = 40


@pytest.mark.parametrize("folder", LINES)
def test_every_folder_keeps_its_budget(folder: str) -> None:
    files = (ROOT / folder).rglob("*.py")
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files) <= LINES[folder]


def test_the_library_has_few_files() -> None:
    assert len([path for path in (ROOT / "specnb").rglob("*.py") if path.name != "__init__.py"]) <= FILES


def test_notebooks_keep_their_budget() -> None:
    """All together, and each: 300 lines of code and 45 cells."""
    notebooks = [nbformat.read(path, as_version=4).cells for path in (ROOT / "notebooks").glob("*.ipynb")]
    lines = [sum(len(cell.source.splitlines()) for cell in cells if cell.cell_type == "code") for cells in notebooks]
    assert sum(lines) <= NOTEBOOKS
    assert max(lines) <= 300
    assert max(map(len, notebooks)) <= 45
