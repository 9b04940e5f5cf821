"""Which modules of this package some code imports, directly or through other modules, and a digest of each.

The digest is of the syntax tree without comments, layout and docstrings: words may change without a new run. It does
not depend on the version of Python.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "specnb"
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def digest(content: bytes) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of `content`."""
    return hashlib.sha256(content).hexdigest()[:16]


@cache
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def code_digest(source: str) -> str:
    """A digest of Python `source` that comments, layout and docstrings do not change.

    >>> code_digest("x = 1  # one") == code_digest("x  =  1")
    True
    """
    return digest(repr(_plain(_parsed(source))).encode())


def _plain(node: Any) -> Any:
    """`node` as lists and strings. Empty fields are left out: newer versions of Python have more of them."""
    if isinstance(node, list):
        return [_plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
        fields["body"] = node.body[1:]
    if isinstance(node, ast.JoinedStr):  # some versions of Python put empty strings between its parts
        fields["values"] = [part for part in node.values if not (isinstance(part, ast.Constant) and part.value == "")]
    filled = [(name, _plain(value)) for name, value in fields.items() if value is not None and value != []]
    return [type(node).__name__, *filled]


def modules(root: Path, *sources: str) -> dict[str, str]:
    """The digest of every module of the package under `root` that `sources` import, by the module's name.

    Raises `SyntaxError` for code that is not Python.
    """
    found: dict[str, str] = {}
    waiting = set().union(*(_imported(root, _parsed(source), "") for source in sources))
    while waiting:
        name = waiting.pop()
        source = _file(root, name).read_text(encoding="utf-8")
        found[name] = code_digest(source)
        waiting |= _imported(root, _parsed(source), name) - found.keys()
    return dict(sorted(found.items()))


def module_digest(root: Path, module: str) -> str:
    """One digest of `module` and of every module of the package that it imports."""
    return digest(repr(modules(root, f"import {module}")).encode())


def _file(root: Path, module: str) -> Path:
    """The file of a module or package; it need not exist."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported(root: Path, tree: ast.AST, inside: str) -> set[str]:
    """The modules of the package that the code of module `inside` names, with the packages that they are in."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(root, node, inside)
            if base.split(".")[0] == PACKAGE:
                names |= _from(root, base, [alias.name for alias in node.names])
    parts = [name.split(".") for name in names if name.split(".")[0] == PACKAGE]
    return {".".join(part[: end + 1]) for part in parts for end in range(len(part))}


def _absolute(root: Path, node: ast.ImportFrom, inside: str) -> str:
    """What a `from` import, perhaps a relative one, imports from."""
    if not node.level:
        return node.module or ""
    parts = inside.split(".")
    up = node.level - (_file(root, inside).name == "__init__.py")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def _from(root: Path, base: str, names: Iterable[str]) -> set[str]:
    """The modules behind `from base import names`. A package that makes a name in another way than by a statement,
    for instance on demand, counts with everything in it."""
    modules = {f"{base}.{name}" for name in names if _file(root, f"{base}.{name}").exists()}
    file = _file(root, base)
    others = [name for name in names if f"{base}.{name}" not in modules]
    if file.name == "__init__.py" and set(others) - _bound(_parsed(file.read_text(encoding="utf-8"))):
        modules |= {".".join(inner.relative_to(root).with_suffix("").parts) for inner in file.parent.rglob("*.py")}
    return {name.removesuffix(".__init__") for name in modules} | {base}


def _bound(tree: ast.Module) -> set[str]:
    """The names that statements at the top of a module bind."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names
