"""The table of verification rules, on a few pairs: exact rules stay below the optimum, the others are named."""

from __future__ import annotations

import pandas as pd
import pytest

from specnb.experiments.verification_rules import EXAMPLES, FAMILIES, README, chain_rows, conditionals, selection_rows

NOT_EXACT = {
    "hierarchical, authors' code",
    "recursive, merged children in random order",
    "recursive, merged children in order",
    "SpecHub, authors' code",
}


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return pd.DataFrame(
        [*chain_rows(pairs=2, sizes=[(3, 2)]), *selection_rows(pairs=2, vocabularies=[3], drafts=[1, 2])]
    )


def test_which_rules_are_exact(table: pd.DataFrame) -> None:
    assert set(table[~table.exact].rule) == NOT_EXACT


def test_no_exact_rule_exceeds_the_optimum(table: pd.DataFrame) -> None:
    exact = table[~table.rule.isin(NOT_EXACT)]
    assert (exact.fraction_max <= 1 + 1e-9).all()
    assert (exact.fraction_min >= 0).all()


def test_block_verification_reaches_the_optimum_and_token_verification_does_not(table: pd.DataFrame) -> None:
    chains = table[table.kind == "chain"].groupby("rule").fraction_min.min()
    assert chains["block verification"] == pytest.approx(1, abs=1e-9)
    assert chains["hierarchical, capped"] == pytest.approx(1, abs=1e-9)
    assert chains["token verification"] < 0.99


def test_the_example_of_the_readme(table: pd.DataFrame) -> None:
    example = table[table.family == README].set_index("rule")
    ninths = {"token verification": 10, "block verification": 11, "hierarchical, authors' code": 12}
    assert {rule: example.accepted[rule] * 9 for rule in ninths} == pytest.approx(ninths)
    assert example.tv["hierarchical, authors' code"] == pytest.approx(1 / 9)


def test_every_family_and_example_is_there(table: pd.DataFrame) -> None:
    assert set(table.family) == {README, *EXAMPLES, *FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_distributions_are_normalised_and_depend_on_the_context(family: str) -> None:
    for probs in conditionals(family, vocab=5, seed=0):
        assert float(probs(()).sum()) == pytest.approx(1, abs=1e-12)
        assert probs(()).tolist() != probs((0,)).tolist()
