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
    assert found
    for test in found:
        assert doctest.DocTestRunner().run(test).failed == 0, test.name


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_calls_have_the_shapes_of_the_signatures(checked: dict[str, ModuleType], batch: tuple[int, ...]) -> None:
    distributions, trees, rules = (checked[name] for name in MODULES)
    p = distributions.standardise(torch.rand(*batch, 3, 4), distributions.Sampling(0.7, 3, 0.9, 0.01))
    q = distributions.standardise_probs(torch.softmax(torch.rand(*batch, 2, 4), -1), distributions.Sampling())
    for function in (distributions.overlap, distributions.total_variation, distributions.residual):
        function(p[..., :2, :], q)
    tokens = distributions.sample(q, torch.rand(*batch, 2))
    distributions.one_hot(tokens, 4)
    for parents in (None, (-1, -1)):
        for rule in (rules.token_verification, rules.block_verification, rules.exact_match, rules.rejection_sampling):
            rule(p, q, tokens, torch.rand(*batch, 2), torch.rand(batch), parents)
        tree = trees.TokenTree(parents or trees.chain(2))
        for visit in (tree.last_from_root, tree.first_from_leaves):
            assert visit(torch.rand(*batch, 2) < 0.5).shape == batch


def test_a_wrong_shape_is_found(checked: dict[str, ModuleType]) -> None:
    """Here q has one row, and everything else two."""
    p, q, tokens = torch.full((2, 2, 3), 1 / 3), torch.full((1, 1, 3), 1 / 3), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(TypeCheckError):
        checked["specnb.rules"].token_verification(p, q, tokens, torch.zeros(2, 1), torch.zeros(2))
