"""The public interface: every name has a docstring with an example; the wheels hold every folder of
the packages."""

from __future__ import annotations

import inspect
import tomllib
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import specnb

PROJECT = Path(specnb.__file__).parents[1]
# And the folder of its distribution.
PACKAGES = {"specnb": PROJECT, "specnb_audit": PROJECT / "audit"}


def _public(package: str) -> list[str]:
    """The names that `package` lists or imports, submodules aside."""
    module = import_module(package)
    names = [(name, getattr(module, name)) for name in getattr(module, "__all__", vars(module))]
    return [name for name, value in names if not name.startswith("_") and not isinstance(value, ModuleType)]


NAMES = [(package, name) for package in PACKAGES for name in _public(package)]


@pytest.mark.parametrize(("package", "name"), NAMES, ids=lambda part: part)
def test_every_public_name_has_a_docstring_with_an_example(package: str, name: str) -> None:
    """The example may stand at one of the methods of a class."""
    value = getattr(import_module(package), name)
    parts = [value] if inspect.isfunction(value) else [value, *vars(value).values()]
    assert inspect.getdoc(value)
    assert any(">>>" in (inspect.getdoc(part) or "") for part in parts)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_holds_every_folder_of_its_package_and_the_sampler_s_the_weights(package: str) -> None:
    above = PACKAGES[package]
    packaged = tomllib.loads((above / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {".".join(file.parent.relative_to(above).parts) for file in (above / package).rglob("__init__.py")}
    pair = {f"specnb._pair.{model}" for model in ("target", "draft") if package == "specnb"}
    assert set(packaged) == folders | pair
    assert all((PROJECT / "data/pair" / name.split(".")[-1] / "model.safetensors").exists() for name in pair)
