"""The best of k draft tokens: exactness, agreement with the rule for paths, and planted bugs."""

from __future__ import annotations

import pytest
import torch
from distributions_for_tests import PAIRS, distance, distribution_pair, first_distributions
from torch import Tensor

from specnb.sampling import best_draft as module
from specnb.sampling.best_draft import best_draft, best_draft_code, best_draft_code_plan, best_draft_plan
from specnb.sampling.distributions import residual
from specnb.sampling.draft_schemes import independent
from specnb.sampling.multi_draft import SelectionPlan, SelectionPlanner
from specnb.sampling.threshold_enumeration import (
    asked_selection,
    asked_tree_distribution,
    expected_accepted,
    planned_selection,
)
from specnb.sampling.traversal import best_path_block, best_path_thresholds
from specnb.sampling.tree_schemes import independent_children

P, Q = torch.tensor([0.05, 0.35, 0.2, 0.4]).double(), torch.tensor([0.4, 0.3, 0.2, 0.1]).double()
P, Q = P / P.sum(), Q / Q.sum()


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_emitted_token_has_the_targets_distribution(kind: str, k: int) -> None:
    p, q = first_distributions(kind, vocab=3)
    emitted, _ = asked_selection(best_draft, best_draft_plan, p, independent(q, k))
    assert distance(emitted, p) < 1e-12


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("k", [2, 3])
def test_it_accepts_as_often_as_the_rule_for_paths(seed: int, k: int) -> None:
    p, q = distribution_pair("dense", vocab=3, seed=seed)
    _, accepted = planned_selection(best_draft_plan, p(()), independent(q(()), k))
    paths = asked_tree_distribution(best_path_block, best_path_thresholds, p, q, (-1,) * k, independent_children)
    assert accepted == pytest.approx(expected_accepted(paths), abs=1e-12)


def test_it_can_accept_less_often_than_one_draft_token() -> None:
    """With p = q one draft token is always accepted; of several the one that the order prefers comes too often."""
    p = torch.tensor([7, 3]).double() / 10
    assert planned_selection(best_draft_plan, p, independent(p, 1))[1] == pytest.approx(1, abs=1e-12)
    assert planned_selection(best_draft_plan, p, independent(p, 3))[1] == pytest.approx(0.643, abs=1e-12)


def test_the_smallest_example_where_the_copy_of_the_code_is_not_exact() -> None:
    p, q = torch.tensor([2, 2, 0]).double() / 4, torch.tensor([1, 1, 2]).double() / 4
    emitted, _ = asked_selection(best_draft_code, best_draft_code_plan, p, independent(q, 2))
    assert distance(emitted, p) == pytest.approx(1 / 16, abs=1e-12)


def not_skewed(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """The chosen token is verified as if it had not been chosen."""
    ratio = (p / q[..., 0, :]).gather(-1, tokens)
    chosen = ratio.argmax(-1, keepdim=True)
    accept = torch.zeros_like(ratio).scatter(-1, chosen, ratio.gather(-1, chosen).clamp_max(1))
    return SelectionPlan(accept, residual(p, q[..., 0, :]))


def residual_of_one_token(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """The recovered token comes from token verification's residual."""
    return best_draft_plan(p, q, tokens)._replace(recovered=residual(p, q[..., 0, :]))


def one_draft_fewer(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """The distribution of the best of k - 1."""
    plan = best_draft_plan(p, q[..., :-1, :], tokens[..., :-1])
    return SelectionPlan(best_draft_plan(p, q, tokens).accept, plan.recovered)


def both_tested(p: Tensor, q: Tensor, tokens: Tensor) -> SelectionPlan:
    """The other draft token is tested after the chosen one."""
    plan = best_draft_plan(p, q, tokens)
    other = (p / q[..., 0, :]).gather(-1, tokens).clamp_max(1)
    return plan._replace(accept=torch.where(plan.accept > 0, plan.accept, other))


@pytest.mark.parametrize(
    "plan", [not_skewed, residual_of_one_token, one_draft_fewer, both_tested], ids=lambda f: f.__name__
)
def test_a_plan_with_a_bug_is_not_exact(plan: SelectionPlanner) -> None:
    assert distance(planned_selection(plan, P, independent(Q, 3))[0], P) > 1e-3


def test_the_order_behind_the_distribution_must_be_that_of_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._distribution_of_the_best
    monkeypatch.setattr(module, "_distribution_of_the_best", lambda q, preference, k: right(q, -preference, k))
    assert distance(planned_selection(best_draft_plan, P, independent(Q, 2))[0], P) > 1e-3
