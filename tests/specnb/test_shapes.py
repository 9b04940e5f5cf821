"""The shapes in the signatures of distributions, trees and rules, checked at run time on the examples of docstrings.

The modules are imported a second time for this, so that the other tests and compiled code run without the checks.
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


P, Q = torch.full((2, 4, 3), 1 / 3), torch.full((2, 3, 3), 1 / 3)
TOKENS, ACCEPT, FINAL = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3), torch.zeros(2)


@pytest.mark.parametrize(
    "given",
    [
        (P, Q[:1], TOKENS, ACCEPT, FINAL),  # q has one row
        (P, Q[..., :2], TOKENS, ACCEPT, FINAL),  # q has another vocabulary
        (P, P, TOKENS, ACCEPT, FINAL),  # q has a node too many
        (P, Q, TOKENS.float(), ACCEPT, FINAL),
        (P, Q, TOKENS, ACCEPT[:, :2], FINAL),
        (P, Q, TOKENS, ACCEPT, ACCEPT),
    ],
)
def test_wrong_shapes_are_found(checked: dict[str, ModuleType], given: tuple[torch.Tensor, ...]) -> None:
    rules = checked["specnb.rules"]
    for rule in (rules.token_verification, rules.exact_match, rules.lenient_verification(0.5)):
        assert rule(P, Q, TOKENS, ACCEPT, FINAL).accepted.shape == (2,)
        with pytest.raises(TypeCheckError):
            rule(*given)
