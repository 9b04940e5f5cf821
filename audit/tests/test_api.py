"""The wheel holds every folder."""

from __future__ import annotations

import tomllib
from pathlib import Path

import specnb_audit

FOLDER = Path(specnb_audit.__file__).parent


def test_the_wheel_holds_every_folder() -> None:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {".".join(file.parent.relative_to(FOLDER.parent).parts) for file in FOLDER.rglob("__init__.py")}
    assert set(project["tool"]["setuptools"]["packages"]) == folders
