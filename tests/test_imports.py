"""Imports only go down: the order of the rooms in a package's docstring is the order of the code."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import specnb

ROOT = Path(specnb.__file__).parent
PACKAGES = [".".join(file.parent.relative_to(ROOT.parent).parts) for file in sorted(ROOT.rglob("__init__.py"))]
FLOOR_LINE = re.compile(r"^ {4}([a-z_, ]+?) {2,}\S", flags=re.MULTILINE)


def _floors(package: str) -> dict[str, int]:
    lines = FLOOR_LINE.findall(import_module(package).__doc__ or "")
    return {room: floor for floor, line in enumerate(lines) for room in line.split(", ")}


def _rooms(package: str) -> dict[str, list[Path]]:
    """The files of each room: one, or all those of a package inside this one."""
    folder = ROOT.parent / package.replace(".", "/")
    files = {file.stem: [file] for file in folder.glob("*.py") if not file.stem.startswith("__")}
    return files | {inner.parent.name: sorted(inner.parent.rglob("*.py")) for inner in folder.glob("*/__init__.py")}


def _imported(file: Path, package: str) -> set[str]:
    """The rooms of `package` that `file` imports from, wherever in the file it does."""
    froms = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    direct = {alias.name for node in froms if node.module == package for alias in node.names}
    below = [(node.module or "").removeprefix(package + ".") for node in froms]
    inside = {name.split(".")[0] for name, node in zip(below, froms, strict=True) if name != node.module}
    return (direct | inside) & set(_rooms(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_has_its_floor(package: str) -> None:
    assert set(_floors(package)) == set(_rooms(package))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_only_go_down_or_stay(package: str) -> None:
    memory_bounds = _floors(package)
    wrong = [
        f"{file.stem} imports {other}"
        for room, files in _rooms(package).items()
        for file in files
        for other in _imported(file, package) - {room}
        if memory_bounds[room] < memory_bounds[other]
    ]
    assert not wrong


def test_distributions_and_rules_know_no_model() -> None:
    for room in ("distribution", "theory", "verify", "exact"):
        assert not re.search(r"^(from|import) transformers", (ROOT / f"{room}.py").read_text(), flags=re.MULTILINE)
