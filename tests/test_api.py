"""The public interface: every name resolves and has an example, and importing the package loads no model code."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import specnb

ROOT = Path(specnb.__file__).parent
PROJECT = ROOT.parent
PACKAGES = ["specnb", "specnb.audit"]  # with public names that are imported when first used
NAMES = [(package, name) for package in PACKAGES for name in import_module(package).__all__]


def _imports_for_type_checkers(package: str) -> dict[str, str]:
    """Each name that `package` imports under TYPE_CHECKING, and the module that it comes from."""
    source = (PROJECT / package.replace(".", "/") / "__init__.py").read_text(encoding="utf-8")
    (guarded,) = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    imports = [node for node in guarded.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_same_names_as_users(package: str) -> None:
    module = import_module(package)
    defined_in = {name: package if home == f"{package}.{name}" else home for name, home in module._PUBLIC.items()}
    assert _imports_for_type_checkers(package) == defined_in
    assert module.__all__ == sorted(defined_in)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize(("package", "name"), NAMES, ids=lambda part: part)
def test_every_public_name_has_a_docstring_with_an_example(package: str, name: str) -> None:
    """The example may stand at one of the functions of a module or the methods of a class."""
    value = getattr(import_module(package), name)
    parts = [value] if inspect.isfunction(value) else [value, *vars(value).values()]
    assert inspect.getdoc(value)
    assert any(">>>" in (inspect.getdoc(part) or "") for part in parts)


def test_a_name_that_is_not_public_is_refused_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match=r"'specnb' has no attribute 'generator'.*'generate'"):
        specnb.generator  # noqa: B018 - looking it up is what is tested


def test_importing_the_package_loads_no_model_code() -> None:
    """Counted in modules, not in time: what Python itself has loaded at the start is not ours."""
    code = "import sys; before = set(sys.modules); import specnb; print(*(set(sys.modules) - before))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    ours = {name for name in loaded if name.split(".")[0] not in sys.stdlib_module_names}
    assert ours == {"specnb", "specnb.lazy"}
    assert len(loaded) < 60


def test_the_wheel_holds_every_folder_but_experiments() -> None:
    packaged = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    folders = {".".join(file.parent.relative_to(PROJECT).parts) for file in ROOT.rglob("__init__.py")}
    assert {name for name in packaged if "_pair" not in name} == {
        name for name in folders if not name.startswith("specnb.experiments")
    }
    for model in ("target", "draft"):
        assert f"specnb._pair.{model}" in packaged
        assert (PROJECT / "data" / "pair" / model / "model.safetensors").exists()
