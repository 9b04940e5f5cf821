"""The public interface of the audit: every name has a docstring with an example; the wheel holds every
folder."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest

import specnb_audit

FOLDER = Path(specnb_audit.__file__).parent


@pytest.mark.parametrize("name", specnb_audit.__all__)
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    """The example may stand at one of the methods of a class."""
    value = getattr(specnb_audit, name)
    parts = [value] if inspect.isfunction(value) else [value, *vars(value).values()]
    assert inspect.getdoc(value)
    assert any(">>>" in (inspect.getdoc(part) or "") for part in parts)


def test_the_wheel_holds_every_folder() -> None:
    project = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {".".join(file.parent.relative_to(FOLDER.parent).parts) for file in FOLDER.rglob("__init__.py")}
    assert set(project["tool"]["setuptools"]["packages"]) == folders
