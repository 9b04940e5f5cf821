"""Lines of code, by the table in CONTRIBUTING: a limit is there to notice growth, and is raised by
who has a reason."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parent.parent
ROW = re.compile(r"^\| `([\w/]+)/` \| ([\d,]+) \|", flags=re.MULTILINE)
LIMITS = {folder: int(lines.replace(",", "")) for folder, lines in ROW.findall((ROOT / "CONTRIBUTING.md").read_text())}


def prose(source: str) -> set[int]:
    """The lines of `source` that are only a comment, or part of a docstring."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line.strip() == token.string:
            lines.add(token.start[0])
    return lines


def code_lines(source: str) -> int:
    """The lines of `source` that are neither blank nor only a comment or a docstring."""
    blank = {number for number, line in enumerate(source.splitlines(), 1) if not line.strip()}
    return len(source.splitlines()) - len(blank | prose(source))


def test_code_is_counted_without_what_explains_it() -> None:
    assert (
        code_lines('"""About."""\n\n# Why.\nx = 1  # what\n\n\ndef f():\n    """One\n    two."""\n    return x\n') == 3
    )


def test_every_folder_of_code_has_a_limit() -> None:
    folders = {"specnb", "studies", "tests", "notebooks", "notebooks/support"} | {
        f"audit/{name}" for name in ("specnb_audit", "audit_studies", "notebooks", "tests")
    }
    assert set(LIMITS) == folders


@pytest.mark.parametrize("folder", sorted(set(LIMITS) - {"notebooks", "audit/notebooks"}))
def test_no_folder_outgrows_its_limit(folder: str) -> None:
    files = (ROOT / folder).rglob("*.py")
    assert sum(code_lines(file.read_text(encoding="utf-8")) for file in files) <= LIMITS[folder]


@pytest.mark.parametrize("folder", ["notebooks", "audit/notebooks"])
def test_notebooks_keep_their_limits(folder: str) -> None:
    """All together, and each: 250 lines of code and 40 cells."""
    notebooks = [nbformat.read(path, as_version=4).cells for path in (ROOT / folder).glob("*.ipynb")]
    lines = [sum(code_lines(cell.source) for cell in cells if cell.cell_type == "code") for cells in notebooks]
    assert sum(lines) <= LIMITS[folder]
    assert max(lines) <= 250
    assert max(map(len, notebooks)) <= 40


def test_docstrings_and_comments_end_at_column_100() -> None:
    """They are read as text. Code, and examples with what they print, ends at 120."""
    wide = []
    for file in (one for folder in (*LIMITS, ".ci", "docs") for one in (ROOT / folder).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        lines, example = source.splitlines(), False
        for number in sorted(prose(source)):
            text = lines[number - 1].strip()
            example = text.startswith(">>>") or (example and bool(text))
            wide += [f"{file}:{number}"] if len(lines[number - 1]) > 100 and not example else []
    assert wide == []
