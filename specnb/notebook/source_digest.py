"""Which modules of this package some code imports, directly or through other modules, and a digest of each.

A digest covers the syntax tree without comments, layout and docstrings, so editing these does not make results stale.
It does not depend on the version of Python.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = "specnb"
PUBLIC = "_PUBLIC"  # in a package: {name: module} of what it imports on demand
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

    Raises `SyntaxError` for code that is not Python. The package's own checkout as an example:

    >>> "specnb.theory" in modules(Path(__file__).parents[2], "from specnb import theory")
    True
    """
    found: dict[str, str] = {}
    waiting = set().union(*(_imported(root, source, "") for source in sources))
    while waiting:
        name = waiting.pop()
        source = _file(root, name).read_text(encoding="utf-8")
        found[name] = code_digest(source)
        waiting |= _imported(root, source, name) - found.keys()
    return dict(sorted(found.items()))


def module_digest(root: Path, module: str) -> str:
    """One digest of `module` and of every module of the package that it imports."""
    return digest(repr(modules(root, f"import {module}")).encode())


def _file(root: Path, module: str) -> Path:
    """The file of a module or package; it need not exist."""
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imported(root: Path, source: str, inside: str) -> set[str]:
    """The modules of the package that the `source` of module `inside` names, with the packages that they are in."""
    names: set[str] = set()
    packages: dict[str, str] = {}  # names bound by `import`, and what they stand for
    nodes = _imports_and_attributes(source)
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
            packages |= {(alias.asname or PACKAGE): (alias.name if alias.asname else PACKAGE) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(root, node, inside)
            if base.split(".")[0] == PACKAGE:
                names |= _from(root, base, [alias.name for alias in node.names])
    for node in nodes:  # `import specnb` and then `specnb.generate`
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            names |= _public(root, packages[node.value.id]).get(node.attr, set())
    parts = [name.split(".") for name in names if name.split(".")[0] == PACKAGE]
    return {".".join(part[: end + 1]) for part in parts for end in range(len(part))}


@cache
def _imports_and_attributes(source: str) -> list[ast.AST]:
    """The nodes of `source` that may name a module: imports, and attributes of names."""
    return [
        node
        for node in _executed(_parsed(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name))
    ]


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    """`node` and all nodes below it, without the imports that only a type checker sees."""
    yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        yield from _executed(child)


def _absolute(root: Path, node: ast.ImportFrom, inside: str) -> str:
    """What a `from` import, perhaps a relative one, imports from."""
    if not node.level:
        return node.module or ""
    parts = inside.split(".")
    up = node.level - (_file(root, inside).name == "__init__.py")
    return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])


def _public(root: Path, package: str) -> dict[str, set[str]]:
    """The names that a package imports on demand, with their modules: its dictionary `_PUBLIC`; empty without one."""
    file = _file(root, package)
    if package.split(".")[0] != PACKAGE or file.name != "__init__.py" or not file.exists():
        return {}
    for node in _parsed(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value and PUBLIC in _bound(ast.Module([node], [])):
            return {name: {module} for name, module in ast.literal_eval(node.value).items()}
    return {}


def _from(root: Path, base: str, names: Iterable[str]) -> set[str]:
    """The modules behind `from base import names`.

    A name in the package's `_PUBLIC` counts with its module only. If the package makes a name in any other way than
    by a statement, everything in the package counts.
    """
    modules = {f"{base}.{name}" for name in names if _file(root, f"{base}.{name}").exists()}
    file, public = _file(root, base), _public(root, base)
    others = {name for name in names if f"{base}.{name}" not in modules} - public.keys()
    if file.name == "__init__.py" and others - _bound(_parsed(file.read_text(encoding="utf-8"))):
        modules |= {".".join(inner.relative_to(root).with_suffix("").parts) for inner in file.parent.rglob("*.py")}
    on_demand = set().union(*(public.get(name, set()) for name in names))
    return {name.removesuffix(".__init__") for name in modules} | on_demand | {base}


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
