"""The public interface: every name has a docstring with an example; the wheel holds the package and the
weights."""

from __future__ import annotations

import inspect
import tomllib
from pathlib import Path

import pytest

import specnb

PROJECT = Path(specnb.__file__).parents[1]


@pytest.mark.parametrize("name", [name for name in specnb.__all__ if name != "theory"])
def test_every_public_name_has_a_docstring_with_an_example(name: str) -> None:
    """The example may stand at one of the methods of a class."""
    value = getattr(specnb, name)
    parts = [value] if inspect.isfunction(value) else [value, *vars(value).values()]
    assert inspect.getdoc(value)
    assert any(">>>" in (inspect.getdoc(part) or "") for part in parts)


def test_the_wheel_holds_the_package_and_the_weights() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    models = ("draft", "target")
    assert set(project["tool"]["setuptools"]["packages"]) == {"specnb", *(f"specnb._pair.{model}" for model in models)}
    assert all((PROJECT / "data/pair" / model / "model.safetensors").exists() for model in models)
