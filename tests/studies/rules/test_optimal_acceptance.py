"""The optimum: linear programs against closed forms, duality, and block verification's optimality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair
from scipy.optimize import OptimizeResult, linprog

from specnb.distributions import overlap
from specnb.draft_schemes import DraftTuple, independent, most_probable, without_replacement
from specnb.enumeration import expected_accepted, planned_step_distribution, step_distribution
from specnb.rules import block_plan, token_verification
from specnb.trees import DraftTree, draft_trees, independent_children, top_children
from studies.rules import optimal_acceptance
from studies.rules.optimal_acceptance import (
    drafted_trees,
    optimal_block,
    optimal_chains,
    optimal_cover,
    optimal_independent,
    optimal_selection,
    optimal_tree,
    proposed_sets,
)

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


# The program and its proof


def program(monkeypatch: pytest.MonkeyPatch, change: Callable[[OptimizeResult], None] | None = None) -> list[Any]:
    """Notes what is handed to the solver and what comes back, after `change`."""
    solve, noted = linprog, []

    def noting(*args: Any, **kwargs: Any) -> OptimizeResult:
        solved = solve(*args, **kwargs)
        if change is not None:
            change(solved)
        noted.append((args, kwargs, solved))
        return solved

    monkeypatch.setattr(optimal_acceptance, "linprog", noting)
    return noted


def test_the_program_of_a_selection_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for each set and each token, all of them scaled by 10,000; a column for each token of each set."""
    noted = program(monkeypatch)
    p, sets = (
        torch.tensor([0.5, 0.25, 0.25]).double(),
        {frozenset({0}): 0.25, frozenset({2, 1}): 0.5, frozenset(): 0.25},
    )
    found = optimal_cover(p, sets)
    assert found.value == pytest.approx(0.75, abs=1e-12)
    ((gain,), given, _) = noted[0]
    assert gain.tolist() == [-1.0] * 3
    assert given.keys() == {"A_ub", "b_ub", "bounds", "method"}
    rows = [[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert given["A_ub"].toarray().tolist() == [[1e4 * x for x in row] for row in rows]
    assert given["b_ub"].tolist() == [1e4 * x for x in (0.25, 0.5, 0.25, 0.5, 0.25, 0.25)]
    assert given["bounds"] == (0, None)
    assert given["method"] == "highs-ds"


def test_the_program_of_a_block_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """gamma = 1: what a draft emits, with what follows, has to have the target's joint distribution."""
    noted = program(monkeypatch)
    p = {(): [0.25, 0.75], (0,): [0.5, 0.5], (1,): [0.125, 0.875]}
    found = optimal_block(lambda c: torch.tensor(p[c]).double(), lambda _: torch.tensor([0.5, 0.5]).double(), 1)
    assert found.value == pytest.approx(0.75, abs=1e-12)
    ((gain,), given, _) = noted[0]
    assert given.keys() == {"A_eq", "b_eq", "bounds", "method"}
    # Columns: of the draft 0 it emits (0,), (1,), (0, 0), (0, 1); of the draft 1 (0,), (1,), (1, 0), (1, 1).
    assert (-gain).tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    rows: list[list[float]] = [
        [1, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0.5, 0, 1, 0, 0.5, 0, 0, 0],
        [0.5, 0, 0, 1, 0.5, 0, 0, 0],
        [0, 0.125, 0, 0, 0, 0.125, 1, 0],
        [0, 0.875, 0, 0, 0, 0.875, 0, 1],
    ]
    assert given["A_eq"].toarray().tolist() == [[1e4 * x for x in row] for row in rows]
    joint = [0.125, 0.125, 0.75 * 0.125, 0.75 * 0.875]
    assert given["b_eq"].tolist() == pytest.approx([1e4 * x for x in (0.5, 0.5, *joint)], abs=1e-9)


def perturbed(prices: float, values: float, fun: float) -> Callable[[OptimizeResult], None]:
    """A solution that is off: dual prices of the rows in turn too high and too low, values, and the optimum."""

    def change(solved: OptimizeResult) -> None:
        sides = solved.ineqlin if len(solved.ineqlin.marginals) else solved.eqlin
        sides.marginals = sides.marginals + prices * (-1.0) ** np.arange(len(sides.marginals))
        solved.x = solved.x + values * (-1.0) ** np.arange(len(solved.x))
        solved.fun += fun

    return change


@pytest.mark.parametrize("change", [(0, 0, 0), (1e-6, 0, 0), (-1e-6, 0, 0), (0, 1e-3, 0), (0, -1e-3, 0), (0, 0, 1e-3),
                                    (0, 0, -1e-3), (2e-6, 1e-3, 1e-3)], ids=str)  # fmt: skip
@pytest.mark.parametrize("equal", [False, True])
def test_the_gap_adds_up_what_the_solution_does_not_prove(
    equal: bool, change: tuple[float, float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The duality gap, the largest violation of a dual constraint, and primal violations at their prices."""
    noted = program(monkeypatch, perturbed(*change))
    monkeypatch.setattr(optimal_acceptance, "TOLERANCE", np.inf)
    p, q = distribution_pair("dense", vocab=3)
    found = optimal_block(p, q, 1) if equal else optimal_selection(p(()), independent(q(()), 2))
    ((minus_gain,), given, solved) = noted[0]
    matrix = given["A_eq" if equal else "A_ub"].toarray()
    limits = given["b_eq" if equal else "b_ub"]
    prices = -(solved.eqlin if equal else solved.ineqlin).marginals
    duality = abs(sum(a * b for a, b in zip(limits, prices, strict=True)) + solved.fun)
    violated = [
        -minus_gain[j] - sum(matrix[i, j] * prices[i] for i in range(len(prices))) for j in range(len(solved.x))
    ]
    violated += [] if equal else [-price for price in prices]
    primal = 0.0
    for i, price in enumerate(prices):
        excess = float(matrix[i] @ solved.x - limits[i])
        primal += abs(price) * (abs(excess) if equal else max(0.0, excess))
    want = duality + max(0.0, *violated) + primal
    assert found.value == -solved.fun
    assert found.gap == pytest.approx(want, rel=1e-9, abs=1e-12)
    assert (found.gap > 1e-9) == any(change)


def test_the_error_names_the_gap_and_what_causes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program(monkeypatch, perturbed(0, 0, 2e-6))
    p = torch.tensor([0.5, 0.5], dtype=torch.float64)
    with pytest.raises(RuntimeError) as error:
        optimal_selection(p, independent(p, 1))
    assert str(error.value) == (
        "the dual solution proves the optimum to 2.0e-06 only, not to 1e-09; very small probabilities cause this: "
        "leave them out or make them larger"
    )
    monkeypatch.setattr(optimal_acceptance, "linprog", lambda *_, **__: OptimizeResult(status=4, message="no luck"))
    with pytest.raises(RuntimeError) as error:
        optimal_selection(p, independent(p, 1))
    assert str(error.value) == ("the linear program was not solved (no luck); try a smaller vocabulary or chain")


@pytest.mark.parametrize("k", [0, 1, 2, 4])
@pytest.mark.parametrize("kind", ["dense", "zeros in q", "one-hot q"])
def test_the_sets_of_distinct_tokens_by_counting(kind: str, k: int) -> None:
    q = distribution_pair(kind, vocab=3)[1](())
    for replacement in (True, False):
        want: dict[frozenset[int], float] = {}
        drafts = independent(q, k) if replacement else without_replacement(q, k)
        for draft in drafts:
            tokens = frozenset(draft.tokens) - {-1}
            want[tokens] = want.get(tokens, 0.0) + draft.probability
        found = proposed_sets(q, k, replacement)
        assert found == pytest.approx(want, abs=1e-12)
        assert all(chance > 0 for chance in found.values())
    assert proposed_sets(q, k) == proposed_sets(q, k, replacement=True)


def test_tuples_of_the_same_tokens_count_together_and_no_token_is_none() -> None:
    unused = torch.zeros(2, 3).double()
    drafts = [DraftTuple((0, 1), 0.25, unused), DraftTuple((1, 0), 0.25, unused), DraftTuple((2, -1), 0.5, unused)]
    p = torch.tensor([0.25, 0.125, 0.625]).double()
    assert optimal_selection(p, drafts).value == pytest.approx(0.375 + 0.5, abs=1e-12)


@pytest.mark.parametrize("kind", ["dense", "zeros in q", "disjoint"])
def test_the_closed_form_is_the_smallest_cut(kind: str) -> None:
    p, q = (probs(()) for probs in distribution_pair(kind, vocab=4))
    for k in (1, 3):
        cuts = []
        for members in range(2**4):
            inside = [x for x in range(4) if members >> x & 1]
            cuts.append(sum(float(p[x]) for x in inside) + 1 - sum(float(q[x]) for x in inside) ** k)
        assert optimal_independent(p, q, k) == pytest.approx(min(cuts), abs=1e-12)


def test_the_trees_of_a_drafter_are_sets_of_paths() -> None:
    """Trees of the same paths count together; a node without a token, and what is below it, is none."""
    unused = torch.zeros(3, 2).double()
    trees = [DraftTree((0, 1, 1), 0.25, unused), DraftTree((1, 0, 1), 0.25, unused), DraftTree((1, -1, 0), 0.5, unused)]
    assert drafted_trees(trees, (-1, -1, 0)) == {
        frozenset({(0,), (1,), (0, 1)}): 0.25, frozenset({(0,), (1,), (1, 1)}): 0.25, frozenset({(1,), (1, 0)}): 0.5
    }  # fmt: skip
    same = [DraftTree((0, 1), 0.25, unused), DraftTree((1, 0), 0.25, unused)]
    assert drafted_trees(same, (-1, -1)) == {frozenset({(0,), (1,)}): 0.5}


def test_what_two_chains_can_accept_by_hand() -> None:
    """Both chains are of one token, and p is certain: it is accepted if one of them has it."""
    p, q = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.25, 0.75]).double()
    for k in (1, 2, 3):
        assert optimal_chains(lambda _: p, lambda _: q, 1, k).value == pytest.approx(1 - 0.75**k, abs=1e-9)
    assert optimal_block(lambda _: p, lambda _: q, 3).value == pytest.approx(0.25 + 0.25**2 + 0.25**3, abs=1e-9)
