"""The table of verification rules, on a few pairs: exact rules stay below the optimum, the others are named."""

from __future__ import annotations

import pandas as pd
import pytest

from studies.rules.rule_families import FAMILIES, TRAINED, conditionals, trained_conditionals
from studies.rules.verification_rules import README, chain_rows, selection_rows, tree_rows

NOT_EXACT = {
    "hierarchical, authors' code",
    "hierarchical, algorithm.py",
    "best draft token by min(1, p/q)",
    "recursive, merged children in random order",
    "recursive, merged children in order",
    "SpecHub, authors' code",
}


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    families = list(FAMILIES)
    rows = [*chain_rows(2, [(3, 2)], families), *selection_rows(2, {3: [1, 2]}, families)]
    return pd.DataFrame([*rows, *tree_rows(1, ["3 chains of 2", "tree of 4"], ["random", "near"])])


def test_which_rules_are_exact(table: pd.DataFrame) -> None:
    assert set(table[~table.exact].rule) == NOT_EXACT


def test_no_exact_rule_exceeds_the_optimum(table: pd.DataFrame) -> None:
    exact = table[~table.rule.isin(NOT_EXACT)]
    assert (exact.fraction_max <= 1 + 1e-9).all()
    assert (exact.fraction_min >= 0).all()


def test_block_verification_reaches_the_optimum_and_token_verification_does_not(table: pd.DataFrame) -> None:
    chains = table[table.kind == "chain"].groupby("rule").fraction_min.min()
    assert chains["block verification"] == pytest.approx(1, abs=1e-9)
    assert chains["hierarchical, paper"] == pytest.approx(1, abs=1e-9)
    assert chains["token verification"] < 0.99


def test_the_example_of_the_readme(table: pd.DataFrame) -> None:
    example = table[table.family == README].set_index("rule")
    ninths = {"token verification": 10, "block verification": 11, "hierarchical, authors' code": 12}
    assert {rule: example.accepted[rule] * 9 for rule in ninths} == pytest.approx(ninths)
    assert example.tv["hierarchical, authors' code"] == pytest.approx(1 / 9)


def test_no_rule_for_trees_is_above_the_optimum_and_each_is_exact(table: pd.DataFrame) -> None:
    trees = table[table.kind == "tree"]
    assert set(trees["shape"]) == {"3 chains of 2", "tree of 4"}
    assert trees.exact.all()
    assert trees.groupby("rule").fraction_max.max()["traversal, top-k tree"] == pytest.approx(1, abs=1e-9)


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
