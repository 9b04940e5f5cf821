"""One file of a wheel, executed alone: what it imports from its own package is a stand-in."""

from __future__ import annotations

import ast
import builtins
import hashlib
import linecache
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

Edit = Callable[[ast.Module], None]  # changes the syntax tree of a file before it is executed


class Wheel(NamedTuple):
    """A released package."""

    path: Path
    name: str
    version: str
    sha256: str

    def read(self, file: str) -> str:
        """The text of a file. Raises `ValueError` if there is none of that name."""
        with zipfile.ZipFile(self.path) as archive:
            if file not in archive.namelist():
                raise ValueError(f"{self.path.name} has no {file}; its adapter is for another version")
            return archive.read(file).decode()


def open_wheel(path: Path, names: Collection[str]) -> Wheel:
    """The wheel at `path`. Raises `ValueError` for anything else, and for packages not in `names`."""
    name, *rest = path.name.split("-")
    if path.suffix != ".whl" or not rest or not zipfile.is_zipfile(path):
        raise ValueError(f"{path} {'is no wheel' if path.exists() else 'is missing'}; give a file NAME-VERSION-....whl")
    if name not in names:
        raise ValueError(f"{path.name}: there is no adapter for {name}; there are some for {', '.join(names)}")
    with path.open("rb") as file:
        return Wheel(path, name, rest[0], hashlib.file_digest(file, "sha256").hexdigest())


class StandIn:
    """Takes the place of anything: it can be called, indexed and subclassed."""

    def __init__(self, *ignored: object) -> None: ...

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return ()

    def __bool__(self) -> bool:
        return False  # so that no optional package is imported

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *given: Any, **named: Any) -> Any:
        return given[0] if len(given) == 1 and callable(given[0]) and not named else self

    def __or__(self, other: object) -> StandIn:
        return self

    __ror__ = __getitem__ = __or__


def load(text: str, file: str, given: Mapping[str, Any], edit: Edit | None = None) -> tuple[dict[str, Any], list[str]]:
    """What `file` with the content `text` defines, and which of `given` it imported from its own
    package; other names of that package are a `StandIn`. Nothing is written to disk: Triton
    reads a kernel's source from Python's cache of lines."""
    tree = ast.parse(text)
    if edit is not None:
        edit(tree)
        text = ast.unparse(tree)
    own, used = file.split("/")[0], set[str]()

    def imported(name: str, scope: Any = None, local: Any = None, wanted: Any = (), level: int = 0) -> Any:
        if level == 0 and name.split(".")[0] != own:
            return builtins.__import__(name, scope, local, wanted, level)
        if not wanted:
            return StandIn()
        module = ModuleType(name)
        used.update({*wanted} & given.keys())
        vars(module).update({one: given.get(one, StandIn()) for one in wanted})
        return module

    path = f"<{file}, {hash(text):x}>"
    linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
    # Dataclasses look it up.
    names = {"__name__": __name__, "__builtins__": {**vars(builtins), "__import__": imported}}
    exec(compile(text, path, "exec"), names)
    return names, sorted(used)
