"""The shapes in the signatures of distributions, trees and rules, checked at run time on the
examples of docstrings.

The modules are imported a second time for this, so that the other tests and compiled code run
without the checks.
"""

from __future__ import annotations

import doctest
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from unittest.mock import patch

import pytest
import torch
from jaxtyping import TypeCheckError, install_import_hook

import specnb

MODULES = [f"specnb.{name}" for name in ("distributions", "trees", "rules")]


@pytest.fixture(scope="module")
def checked() -> Iterator[dict[str, ModuleType]]:
    """The modules, with every call checked."""
    with patch.dict(sys.modules), patch.dict(vars(specnb)):
        for name in MODULES:
            del sys.modules[name]
        with install_import_hook(MODULES, "shape_checks.check"):
            modules = {name: importlib.import_module(name) for name in MODULES}
        yield modules


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_have_the_shapes_of_the_signatures(checked: dict[str, ModuleType], name: str) -> None:
    found = doctest.DocTestFinder(exclude_empty=True).find(checked[name])
    tests = [
        test for test in found if "specnb.enumeration" not in str(test.docstring)
    ]  # which has rules without checks
    assert len(tests) > 5
    for test in tests:
        assert doctest.DocTestRunner().run(test).failed == 0, test.name


def test_a_wrong_shape_is_found(checked: dict[str, ModuleType]) -> None:
    """Here q has one row, and everything else two."""
    p, q, tokens = torch.full((2, 2, 3), 1 / 3), torch.full((1, 1, 3), 1 / 3), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(TypeCheckError):
        checked["specnb.rules"].token_verification(p, q, tokens, torch.zeros(2, 1), torch.zeros(2))
