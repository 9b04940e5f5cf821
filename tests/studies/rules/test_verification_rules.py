"""The table of verification rules: exact rules stay below the optimum, the others are named; and
its families.

`test_committed` computes a part of the table again.
"""

from __future__ import annotations

import pandas as pd
import pytest

from studies.files import ROOT
from studies.rules.rule_families import FAMILIES, TRAINED, conditionals, trained_conditionals
from studies.rules.verification_rules import README

TABLE = pd.read_csv(ROOT / "data" / "results" / "verification_rules.csv")
NOT_EXACT = {
    "hierarchical, authors' code",
    "hierarchical, algorithm.py",
    "best draft token by min(1, p/q)",
    "recursive, merged children in random order",
    "recursive, merged children in order",
    "SpecHub, authors' code",
}


def test_which_rules_are_exact_and_none_of_them_exceeds_the_optimum() -> None:
    assert set(TABLE[~TABLE.exact].rule) == NOT_EXACT
    exact = TABLE[~TABLE.rule.isin(NOT_EXACT)]
    assert (exact.fraction_max <= 1 + 1e-9).all()
    assert (exact.fraction_min >= 0).all()


def test_which_rules_reach_the_optimum() -> None:
    chains = TABLE[TABLE.kind == "chain"].groupby("rule").fraction_min.min()
    assert chains["block verification"] == chains["hierarchical, paper"] == 1
    assert chains["token verification"] < 0.99
    trees = TABLE[TABLE.kind == "tree"]
    assert trees[trees.rule == "traversal, top-k tree"].fraction_max.max() == 1


def test_the_example_of_the_readme() -> None:
    example = TABLE[TABLE.family == README].set_index("rule")
    ninths = {"token verification": 10, "block verification": 11, "hierarchical, authors' code": 12}
    assert {rule: example.accepted[rule] * 9 for rule in ninths} == pytest.approx(ninths, rel=1e-5)
    assert example.tv["hierarchical, authors' code"] == pytest.approx(1 / 9, rel=1e-5)


def test_the_trained_pair_is_reduced_to_a_small_vocabulary() -> None:
    for probs in trained_conditionals(vocab=3, seed=0):
        first, second = probs(()), probs((2,))
        assert (first.shape, second.shape) == ((3,), (3,))
        assert float(first.sum()) == pytest.approx(1, abs=1e-12)
        assert first.tolist() != second.tolist()
    p, _ = trained_conditionals(vocab=3, seed=0)
    assert p(())[0] >= p(())[1]
    assert TRAINED not in FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_are_normalised_and_depend_on_the_context(family: str) -> None:
    for probs in conditionals(family, vocab=5, seed=0):
        assert float(probs(()).sum()) == pytest.approx(1, abs=1e-12)
        assert probs(()).tolist() != probs((0,)).tolist()
