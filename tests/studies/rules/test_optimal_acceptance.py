"""The optimum: linear programs against closed forms, proofs by duality, and block verification's
optimality."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, first_distributions
from scipy.optimize import OptimizeResult, linprog
from torch import Tensor

from specnb.distributions import overlap
from specnb.enumeration import Drafts, draft_trees, expected_accepted, step_distribution
from specnb.rules import block_verification, token_verification
from specnb.trees import independent_children, top_children
from studies.rules import optimal_acceptance
from studies.rules.merged_drafts import independent, most_probable, without_replacement
from studies.rules.optimal_acceptance import (
    drafted_trees,
    optimal_chains,
    optimal_cover,
    optimal_selection,
    optimal_tree,
    proposed_sets,
)

every_kind = pytest.mark.parametrize("kind", PAIRS)


def smallest_cut(p: Tensor, q: Tensor, k: int) -> float:
    """The optimum for k independent samples in closed form (Hu et al.): min over token sets S of
    p(S) + 1 - q(S)^k."""
    sets = [list(s) for size in range(len(p) + 1) for s in combinations(range(len(p)), size)]
    return min(float(p[s].sum()) + 1 - float(q[s].sum()) ** k for s in sets)


@every_kind
@pytest.mark.parametrize(("vocab", "k"), [(5, 1), (4, 2), (3, 4)])
def test_the_linear_program_has_the_value_of_the_closed_form(kind: str, vocab: int, k: int) -> None:
    p, q = first_distributions(kind, vocab)
    solved = optimal_selection(p, independent(q, k))
    assert solved.gap < 1e-9
    assert solved.value == pytest.approx(smallest_cut(p, q, k), abs=1e-9)
    if k == 1:
        assert solved.value == pytest.approx(float(overlap(p, q)), abs=1e-9)


@every_kind
@pytest.mark.parametrize("k", [1, 2, 4])
def test_only_the_set_of_tokens_matters(kind: str, k: int) -> None:
    """Also without replacement, where no set is covered more often than drafted."""
    p, q = first_distributions(kind, 4)
    sets: dict[frozenset[int], float] = {}
    drafts = independent(q, k)
    for tokens, chance in zip(drafts.tokens.tolist(), drafts.probability.tolist(), strict=True):
        sets[frozenset(tokens)] = sets.get(frozenset(tokens), 0.0) + chance
    assert proposed_sets(q, k) == pytest.approx(sets, abs=1e-12)
    drafts = without_replacement(q, k)
    bounds = []
    for members in ([x for x in range(4) if number >> x & 1] for number in range(2**4)):
        outside = [bool({*tokens} - {-1, *members}) for tokens in drafts.tokens.tolist()]
        bounds.append(float(p[members].sum() + drafts.probability[outside].sum()))
    assert optimal_selection(p, drafts).value == pytest.approx(min(bounds), abs=1e-9)


def test_many_draft_tokens_and_fixed_ones() -> None:
    p, q = first_distributions("dense", 5)
    for k in (5, 8):
        assert optimal_cover(p, proposed_sets(q, k)).value == pytest.approx(smallest_cut(p, q, k), abs=1e-9)
    fixed = optimal_selection(p, most_probable(q, 3)).value
    assert fixed == pytest.approx(float(p[q.topk(3).indices].sum()), abs=1e-9)


@every_kind
@pytest.mark.parametrize(("vocab", "gamma"), [(4, 1), (3, 2), (2, 3)])
def test_no_exact_rule_for_a_chain_beats_block_verification(kind: str, vocab: int, gamma: int) -> None:
    p, q = distribution_pair(kind, vocab)
    best = optimal_chains(p, q, gamma)
    assert best.gap < 1e-9
    assert expected_accepted(step_distribution(block_verification, p, q, gamma)) == pytest.approx(best.value, abs=1e-9)
    if kind == "dense" and gamma > 1:
        assert expected_accepted(step_distribution(token_verification, p, q, gamma)) < best.value - 1e-3


@every_kind
def test_chains_of_one_token_are_a_selection(kind: str) -> None:
    p, q = distribution_pair(kind, vocab=3)
    assert optimal_chains(p, q, 1, 3).value == pytest.approx(smallest_cut(p(()), q(()), 3), abs=1e-9)


def test_trees() -> None:
    """Chains are the trees that they make; of a fixed tree each node is accepted with its
    probability."""
    p, q = distribution_pair("dense", vocab=2)
    trees = drafted_trees(draft_trees((-1, -1, 0, 1), q, independent_children), (-1, -1, 0, 1))
    assert optimal_tree(p, trees, 2).value == pytest.approx(optimal_chains(p, q, 2, 2).value, abs=1e-9)
    p, q = distribution_pair("dense", vocab=3)
    (tree,) = drafted_trees(draft_trees((-1, -1, 0, 0), q, top_children), (-1, -1, 0, 0))
    chances = [float(p(())[path[0]]) * (float(p(path[:1])[path[1]]) if len(path) == 2 else 1) for path in tree]
    assert optimal_tree(p, {tree: 1.0}, 2).value == pytest.approx(sum(chances), abs=1e-9)


def test_drafts_of_the_same_tokens_count_together_and_no_token_is_none() -> None:
    unused, chances = torch.zeros(3, 3, 3).double(), torch.tensor([0.25, 0.25, 0.5]).double()
    drafts = Drafts(torch.tensor([[0, 1], [1, 0], [2, -1]]), unused[:, :2], chances)
    p = torch.tensor([0.25, 0.125, 0.625]).double()
    assert optimal_selection(p, drafts).value == pytest.approx(0.375 + 0.5, abs=1e-12)
    assert drafted_trees(drafts, (-1, -1)) == {frozenset({(0,), (1,)}): 0.5, frozenset({(2,)}): 0.5}
    drafts = Drafts(torch.tensor([[0, 1, 1], [1, 0, 1], [1, -1, 0]]), unused, chances)
    assert drafted_trees(drafts, (-1, -1, 0)) == {
        frozenset({(0,), (1,), (0, 1)}): 0.25, frozenset({(0,), (1,), (1, 1)}): 0.25, frozenset({(1,), (1, 0)}): 0.5
    }  # fmt: skip


@pytest.mark.parametrize("what", ["prices", "values", "optimum"])
@pytest.mark.parametrize("equal", [False, True])
def test_a_solution_that_is_off_does_not_prove_the_optimum(
    what: str, equal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The duality gap, violations of a dual constraint, and primal violations at their prices all
    count."""
    p, q = distribution_pair("dense", vocab=3)

    def shifted(*args: Any, **kwargs: Any) -> OptimizeResult:
        solved = linprog(*args, **kwargs)
        sides = solved.eqlin if equal else solved.ineqlin
        sides.marginals = sides.marginals + 1e-6 * (what == "prices")
        solved.x = solved.x + 1e-3 * (what == "values")
        solved.fun += 1e-6 * (what == "optimum")
        return solved

    monkeypatch.setattr(optimal_acceptance, "linprog", shifted)
    with pytest.raises(RuntimeError, match=r"the dual solution proves the optimum to .* only, not to 1e-09"):
        optimal_chains(p, q, 1) if equal else optimal_selection(p(()), independent(q(()), 2))
