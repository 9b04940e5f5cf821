"""The optimum: linear programs against closed forms, duality, and block verification's optimality."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair
from scipy.optimize import OptimizeResult, linprog

from specnb.sampling import optimal_acceptance
from specnb.sampling.block_verification import block_plan
from specnb.sampling.distributions import overlap
from specnb.sampling.draft_schemes import independent, most_probable, without_replacement
from specnb.sampling.enumeration import step_distribution
from specnb.sampling.optimal_acceptance import (
    drafted_trees,
    optimal_block,
    optimal_chains,
    optimal_cover,
    optimal_independent,
    optimal_selection,
    optimal_tree,
    proposed_sets,
)
from specnb.sampling.threshold_enumeration import expected_accepted, planned_step_distribution
from specnb.sampling.tree_schemes import draft_trees, independent_children, top_children
from specnb.sampling.verification import token_verification

every_kind = pytest.mark.parametrize("kind", PAIRS)


@every_kind
@pytest.mark.parametrize(("vocab", "k"), [(5, 1), (4, 2), (3, 3), (3, 4)])
def test_the_linear_program_has_the_value_of_the_closed_form(kind: str, vocab: int, k: int) -> None:
    p, q = (probs(()) for probs in distribution_pair(kind, vocab))
    solved = optimal_selection(p, independent(q, k))
    assert solved.gap < 1e-9
    assert solved.value == pytest.approx(optimal_independent(p, q, k), abs=1e-9)
    if k == 1:
        assert solved.value == pytest.approx(float(overlap(p, q)), abs=1e-9)


@every_kind
def test_without_replacement_no_set_of_tokens_is_covered_more_often_than_drafted(kind: str) -> None:
    """The cut bound of every token set S: p(S) and the probability of a draft token outside S."""
    p, q = (probs(()) for probs in distribution_pair(kind, vocab=4))
    drafts = without_replacement(q, 2)
    bounds = []
    for members in range(2**4):
        inside = {x for x in range(4) if members >> x & 1}
        outside = sum(draft.probability for draft in drafts if set(draft.tokens) - inside - {-1})
        bounds.append(sum(float(p[x]) for x in inside) + outside)
    assert optimal_selection(p, drafts).value == pytest.approx(min(bounds), abs=1e-9)


@every_kind
@pytest.mark.parametrize(("vocab", "k"), [(3, 4), (4, 2)])
@pytest.mark.parametrize("replacement", [True, False])
def test_only_the_set_of_tokens_matters(kind: str, vocab: int, k: int, replacement: bool) -> None:
    p, q = (probs(()) for probs in distribution_pair(kind, vocab))
    drafts = independent(q, k) if replacement else without_replacement(q, k)
    sets = proposed_sets(q, k, replacement)
    assert sum(sets.values()) == pytest.approx(1, abs=1e-12)
    assert optimal_cover(p, sets).value == pytest.approx(optimal_selection(p, drafts).value, abs=1e-9)


@pytest.mark.parametrize("k", [5, 8])
def test_eight_draft_tokens_have_the_value_of_the_closed_form(k: int) -> None:
    p, q = (probs(()) for probs in distribution_pair("dense", vocab=8))
    solved = optimal_cover(p, proposed_sets(q, k))
    assert solved.gap < 1e-9
    assert solved.value == pytest.approx(optimal_independent(p, q, k), abs=1e-9)


def test_fixed_draft_tokens_are_accepted_with_their_probability() -> None:
    p, q = (probs(()) for probs in distribution_pair("dense", vocab=5))
    best = optimal_selection(p, most_probable(q, 3)).value
    assert best == pytest.approx(float(p[q.topk(3).indices].sum()), abs=1e-9)


def test_the_optimum_grows_with_the_number_of_draft_tokens() -> None:
    p, q = (probs(()) for probs in distribution_pair("dense", vocab=4))
    values = [optimal_independent(p, q, k) for k in range(1, 6)]
    assert values == sorted(values)
    assert values[-1] > values[0] + 0.01


@every_kind
@pytest.mark.parametrize(("vocab", "gamma"), [(4, 1), (3, 2), (2, 3)])
def test_no_exact_rule_for_a_chain_beats_block_verification(kind: str, vocab: int, gamma: int) -> None:
    p, q = distribution_pair(kind, vocab)
    best = optimal_block(p, q, gamma)
    assert best.gap < 1e-9
    assert expected_accepted(planned_step_distribution(block_plan, p, q, gamma)) == pytest.approx(best.value, abs=1e-9)


@every_kind
def test_one_chain_is_a_block_and_chains_of_one_token_are_a_selection(kind: str) -> None:
    p, q = distribution_pair(kind, vocab=3)
    assert optimal_chains(p, q, 2, 1).value == pytest.approx(optimal_block(p, q, 2).value, abs=1e-9)
    assert optimal_chains(p, q, 1, 3).value == pytest.approx(optimal_independent(p(()), q(()), 3), abs=1e-9)


def test_chains_are_the_trees_that_they_make() -> None:
    p, q = distribution_pair("dense", vocab=2)
    parents = (-1, -1, 0, 1)
    trees = drafted_trees(draft_trees(parents, q, independent_children), parents)
    assert sum(trees.values()) == pytest.approx(1, abs=1e-12)
    assert optimal_tree(p, trees, 2).value == pytest.approx(optimal_chains(p, q, 2, 2).value, abs=1e-9)


def test_of_a_fixed_tree_each_node_is_accepted_with_its_probability() -> None:
    """No rule can do better than to follow the target: the optimum of a fixed tree is the sum of p over its nodes."""
    p, q = distribution_pair("dense", vocab=3)
    parents = (-1, -1, 0, 0)
    (tree,) = drafted_trees(draft_trees(parents, q, top_children), parents)
    chances = [float(p(())[path[0]]) * (float(p(path[:1])[path[1]]) if len(path) == 2 else 1) for path in tree]
    assert optimal_tree(p, {tree: 1.0}, 2).value == pytest.approx(sum(chances), abs=1e-9)


def test_the_optimum_grows_with_the_number_of_chains() -> None:
    p, q = distribution_pair("dense", vocab=2)
    values = [optimal_chains(p, q, 2, k).value for k in (1, 2, 4, 8)]
    assert values == sorted(values)
    assert values[-1] > values[0] + 0.01


def test_token_verification_is_not_optimal() -> None:
    p, q = distribution_pair("dense", vocab=3)
    best = optimal_block(p, q, 2).value
    assert expected_accepted(step_distribution(token_verification, p, q, 2)) < best - 1e-3


def test_an_unsolved_program_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimal_acceptance, "linprog", lambda *_, **__: OptimizeResult(status=1, message="no time"))
    with pytest.raises(RuntimeError, match=r"not solved \(no time\)"):
        optimal_selection(torch.tensor([1.0]), independent(torch.tensor([1.0]), 1))


def test_a_wrong_dual_solution_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = linprog

    def shifted(*args: Any, **kwargs: Any) -> OptimizeResult:
        solved = solve(*args, **kwargs)
        solved.fun += 1e-6
        return solved

    monkeypatch.setattr(optimal_acceptance, "linprog", shifted)
    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    with pytest.raises(RuntimeError, match="dual solution"):
        optimal_selection(p, independent(p, 1))
