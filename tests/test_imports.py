"""Imports only go down: the order of the rooms in the package's docstring is the order of the code."""

import ast
import re
from pathlib import Path

import specnb

PACKAGE = Path(specnb.__file__).parent


def _floors() -> dict[str, int]:
    lines = re.findall(r"^ {4}([a-z_, ]+?) {2,}\S", specnb.__doc__ or "", flags=re.MULTILINE)
    return {room: floor for floor, line in enumerate(lines) for room in line.split(", ")}


def _imported(file: Path) -> set[str]:
    froms = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom) and node.module]
    direct = {alias.name for node in froms if node.module == "specnb" for alias in node.names}
    return direct | {node.module.split(".")[1] for node in froms if (node.module or "").startswith("specnb.")}


def test_every_room_has_its_floor() -> None:
    rooms = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__"}
    assert set(_floors()) == rooms


def test_imports_only_go_down_or_stay() -> None:
    floors = _floors()
    wrong = [
        f"{file.stem} imports {room}"
        for file in PACKAGE.glob("*.py")
        for room in _imported(file)
        if floors.get(file.stem, 99) < floors[room]
    ]
    assert not wrong


def test_laws_and_rules_know_no_model() -> None:
    for room in ("law", "theory", "verify", "exact"):
        assert not re.search(r"^(from|import) transformers", (PACKAGE / f"{room}.py").read_text(), flags=re.MULTILINE)
