"""Digests of what is imported: words change nothing, every statement does, and every way to import is seen."""

from pathlib import Path

import pytest

from specnb.notebook.source_digest import code_digest, module_digest, modules

CODE = 'def f(x: int = 1) -> str:\n    """Words."""\n    return f"{x!r:>{8}} {x + 1}" "end"\n'
PUBLIC = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from specnb.public.h import sample
_PUBLIC: dict[str, str] = {"generate": "specnb.public.g", "sample": "specnb.public.h", "sub": "specnb.inner.d"}
def __getattr__(name):
    return name
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A package: `a` imports `b`, `inner` has modules, `lazy` makes names on demand, `public` lists them."""
    files = {
        "__init__": "",
        "a": "def f():\n    from specnb import b\n",
        "b": "from .inner.c import X\n",
        "inner/__init__": "from specnb.inner.c import X\n",
        "inner/c": "from . import d as other\nX = 1\n",
        "inner/d": "Y = 1\n",
        "inner/e": "import specnb.a\n",
        "lazy/__init__": "def __getattr__(name):\n    return name\n",
        "lazy/f": "",
        "public/__init__": PUBLIC,
        "public/g": "def generate(): ...\n",
        "public/h": "def sample(): ...\n",
        "public/sub/__init__": "",
    }
    for name, source in files.items():
        file = tmp_path / "specnb" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return tmp_path


def test_comments_docstrings_and_layout_change_nothing() -> None:
    other = CODE.replace("Words", "Better words").replace("    ", "  ") + "# a comment\n\n"
    assert code_digest(other) == code_digest(CODE)


@pytest.mark.parametrize(("old", "new"), [("1)", "2)"), ("!r", ""), ("= 1", "= 1.0"), ("end", "END"), ("f(", "g(")])
def test_a_change_of_code_changes_it(old: str, new: str) -> None:
    assert code_digest(CODE.replace(old, new)) != code_digest(CODE)


def test_the_digest_is_the_same_for_every_python() -> None:
    """Tried with 3.11, 3.12 and 3.13."""
    assert code_digest(CODE) == "738c31a4f1ac8c5c"


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("import numpy", ""),
        ("import specnb.inner.d", ". inner inner.c inner.d"),
        ("from specnb import a", ". a b inner inner.c inner.d"),
        ("from specnb.inner import X", ". inner inner.c inner.d"),
        ("from specnb.inner.e import a", ". a b inner inner.c inner.d inner.e"),
        ("from specnb.lazy import anything", ". lazy lazy.f"),
        ("from specnb.public import generate", ". public public.g"),
        ("import specnb.public as s\ns.sample()", ". public public.h"),
        ("import specnb.public as s\ns.other()", ". public"),
        ("from specnb.public import sub", ". inner inner.c inner.d public public.sub"),
        ("from specnb.public import other", ". public public.g public.h public.sub"),
    ],
)
def test_everything_that_is_imported_counts(root: Path, source: str, names: str) -> None:
    assert list(modules(root, source)) == [f"specnb.{name}".rstrip(".") for name in names.split()]


def test_a_module_changes_the_digest_of_those_that_import_it(root: Path) -> None:
    before = {name: module_digest(root, f"specnb.{name}") for name in ("a", "lazy.f")}
    (root / "specnb" / "inner" / "d.py").write_text("Y = 2\n")
    assert module_digest(root, "specnb.a") != before["a"]
    assert module_digest(root, "specnb.lazy.f") == before["lazy.f"]
