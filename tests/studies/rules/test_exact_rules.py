"""Rules of studies, as those of specnb are tested: exact by multiplication, carried out so; planted
bugs are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair
from rule_checks import (
    BUGS,
    Method,
    any_case,
    changed,
    difference,
    emitted_by,
    error,
    from_p,
    integrated,
    is_found,
    off,
)
from torch import Tensor

from specnb.distributions import overlap, residual
from specnb.enumeration import count_distribution, draft_trees, step_distribution
from specnb.rules import PlannedRule, Rule
from specnb.trees import chain, independent_children, top_children
from studies.rules.published_rules import (
    AtEachNode,
    best_path_block,
    division_factor,
    hierarchical_verification,
    hub_children,
    k_sequential,
    k_sequential_tree,
    spechub,
    spechub_tree,
)

TREE, WIDE, TWO = (-1, -1, 0, 0), (-1, -1, -1), (-1, -1, 0, 1)
EXACT = {
    "hierarchical, paper": Method(hierarchical_verification, chain(3)),
    "k-sequential": Method(k_sequential_tree, (-1, -1, -1, 0), independent_children),
    "SpecHub": Method(spechub_tree, TREE, hub_children),
    "SpecHub, top": Method(spechub_tree, (-1, -1), top_children),
    "best path": Method(best_path_block, TWO, independent_children),
    "best path of one token": Method(best_path_block, WIDE, independent_children),
}
SMALL = {
    "SpecHub": Method(spechub_tree, (-1, -1), hub_children),
    "k-sequential": Method(k_sequential_tree, (-1, -1)),
    "best path": Method(best_path_block, TWO),
}


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("name", EXACT)
def test_a_step_has_the_targets_joint_distribution(name: str, kind: str) -> None:
    assert error(EXACT[name], kind) < 1e-12


def test_where_nothing_is_proposed_hierarchical_verification_is_exact_as_well() -> None:
    p, q = distribution_pair("dense", vocab=3)
    for silent in ((), (0,), (1,)):

        def drafted(context: tuple[int, ...], silent: tuple[int, ...] = silent) -> Tensor:
            return q(context) * (context != silent)

        method = EXACT["hierarchical, paper"]
        assert off(emitted_by(method, p, drafted), p, method.length) < 1e-12


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("seed", range(2))
def test_k_sequential_selection_accepts_what_its_closed_form_says(kind: str, seed: int) -> None:
    p_of, q_of = distribution_pair(kind, vocab=4, seed=seed)
    p, q = p_of(()), q_of(())

    def acceptance(k: int) -> float:
        return 1 - float(count_distribution(step_distribution(k_sequential_tree, p_of, q_of, (-1,) * k), 1)[0])

    assert acceptance(1) == pytest.approx(float(overlap(p, q)), abs=1e-12)
    of_rho = overlap(p / division_factor(p, q, 3), q)
    assert acceptance(3) == pytest.approx(float(1 - (1 - of_rho) ** 3), abs=1e-12)


@pytest.mark.parametrize("kind", ["dense", "zeros in both"])
@pytest.mark.parametrize("name", SMALL)
def test_the_cells_of_uniforms_have_the_multiplied_probabilities(name: str, kind: str) -> None:
    method, (p, q) = SMALL[name], distribution_pair(kind, vocab=2 if name == "best path" else 3)
    assert difference(integrated(method.rule, method, p, q), emitted_by(method, p, q)) < 1e-12


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("name", SMALL)
def test_a_bug_of_carrying_a_plan_out_is_found(name: str, bug: Callable[[Rule], Rule]) -> None:
    assert is_found(bug(SMALL[name].rule), SMALL[name])


@pytest.mark.parametrize("name", ["k-sequential", "SpecHub", "best path"])
def test_a_plan_that_samples_p_after_a_rejection_is_not_exact(name: str) -> None:
    right: Any = EXACT[name].rule
    method = EXACT[name]._replace(rule=PlannedRule(changed(right.plan, from_p), right.up))
    assert max(error(method, seed=seed) for seed in range(3)) > 1e-3


def one_more_draft(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """k-sequential selection with rho and the residual of k + 1 draft tokens."""
    accept, after = k_sequential(p, torch.cat([q, q[..., :1, :]], -2), torch.cat([x, x[..., :1]], -1))
    return accept[..., :-1], after


def residual_of_tokens(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    return k_sequential(p, q, x)[0], residual(p, q[..., 0, :])


def hub_takes_all(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The hub is accepted whenever the other token is not, beyond p(a)."""
    accept, after = spechub(p, q, x)
    return torch.where(x == q[..., 0, :].argmax(-1, keepdim=True), 1.0, accept), after


@pytest.mark.parametrize(
    ("name", "select"),
    [("k-sequential", one_more_draft), ("k-sequential", residual_of_tokens), ("SpecHub", hub_takes_all)],
)
def test_a_selection_with_a_bug_is_not_exact(name: str, select: Any) -> None:
    method = EXACT[name]._replace(rule=PlannedRule(AtEachNode(select)))
    assert max(error(method, seed=seed) for seed in range(3)) > 1e-3


def test_rules_are_values() -> None:
    assert PlannedRule(AtEachNode(k_sequential), schemes=(independent_children,)) == k_sequential_tree != spechub_tree


def test_rules_refuse_other_shapes() -> None:
    p, q, tokens, accept, final = any_case((-1, -1, 0))
    with pytest.raises(ValueError, match="SpecHub verifies 2 draft tokens; it was given 1"):
        spechub_tree(p, q, tokens, accept, final, (-1, -1, 0))
    with pytest.raises(ValueError, match="SpecHub proposes 2 children; child 3 was asked for"):
        draft_trees((-1, -1, -1), distribution_pair("dense", vocab=3)[1], hub_children)
    with pytest.raises(ValueError, match="this rule needs separate chains of one length"):
        best_path_block(p, q, tokens.clamp_min(0), accept, final, (-1, -1, 0))
    with pytest.raises(ValueError, match="hierarchical verification is for chains"):
        hierarchical_verification(p, q, tokens, accept, final, (-1, -1, 0))
