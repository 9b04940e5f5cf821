"""Public names of a package that are imported when first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy(package: str, public: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for `package`, whose names `public` maps to the modules that define them.

    A name that is mapped to itself as a submodule (`"audit": "specnb.audit"`) stands for that module. A name that is
    not public raises `AttributeError`, which lists those that are.

    >>> get, _ = lazy("specnb", {"theory": "specnb.theory", "Sampling": "specnb.sampling.distributions"})
    >>> get("theory").__name__
    'specnb.theory'
    >>> get("Sampling").__name__
    'Sampling'
    """

    def get(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; its public names are {sorted(public)}")
        module = import_module(public[name])
        value = module if public[name] == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, value)  # the next use finds it without this function
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return get, names
