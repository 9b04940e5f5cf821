"""The best of k draft tokens: exactness, agreement with the rule for paths, and planted bugs."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import rules_by_hand as by_hand
import torch
from distributions_for_tests import PAIRS, distance, distribution_pair, first_distributions
from torch import Tensor

from specnb.distributions import residual
from specnb.draft_schemes import independent
from specnb.enumeration import (
    asked_selection,
    asked_tree_distribution,
    expected_accepted,
    planned_selection,
)
from specnb.multi_draft import SelectionPlan, SelectionPlanner
from specnb.rules import best_path_block, best_path_thresholds
from specnb.trees import independent_children
from studies.rules import best_draft as module
from studies.rules.best_draft import best_draft, best_draft_code, best_draft_code_plan, best_draft_plan

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


# Beside the definition in plain Python

WELL_CONDITIONED = [kind for kind in PAIRS if kind != "nearly equal"]  # there rounding decides


def plan_by_hand(p: list[float], q: list[float], tokens: list[int], capped: bool) -> by_hand.Selection:
    """The best token is counted over all k samples that could be drafted."""
    vocab, k = len(p), len(tokens)
    value = [min(by_hand.ratio(a, b), 1.0) if capped else by_hand.ratio(a, b) for a, b in zip(p, q, strict=True)]
    best = [0.0] * vocab
    for drafted in product(range(vocab), repeat=k):
        best[max(drafted, key=lambda x: (value[x], x))] += prod(q[x] for x in drafted)
    place = [value[x] if capped else (value[x], x) for x in tokens]
    chosen = place.index(max(place))
    accept = [0.0] * k
    accept[chosen] = min(1.0, by_hand.ratio(p[tokens[chosen]], best[tokens[chosen]]))
    left = [max(0.0, a - b) for a, b in zip(p, best, strict=True)]
    return accept, left if sum(left) > 1e-12 else p


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_chosen_token_is_tested_against_the_distribution_of_the_best(k: int, capped: bool) -> None:
    generator = torch.Generator().manual_seed(k)
    pairs = [first_distributions(kind, 3, seed) for kind in WELL_CONDITIONED for seed in range(4)]
    p, q = (torch.stack(side).unflatten(0, (-1, 4)) for side in zip(*pairs, strict=True))
    tokens = torch.multinomial(q.flatten(0, 1), k, replacement=True, generator=generator).unflatten(0, (-1, 4))
    planner, rule = (best_draft_code_plan, best_draft_code) if capped else (best_draft_plan, best_draft)
    each = q[..., None, :].expand(-1, -1, k, -1)
    found = planner(p, each, tokens)
    assert found.accept.shape == tokens.shape
    assert found.recovered.shape == p.shape
    accept = torch.rand(tokens.shape, generator=generator, dtype=torch.float64)
    final = torch.rand(p.shape[:2], generator=generator, dtype=torch.float64)
    decided = rule(p, each, tokens, accept, final)
    for row in product(*map(range, p.shape[:2])):
        want = plan_by_hand(p[row].tolist(), q[row].tolist(), tokens[row].tolist(), capped)
        assert found.accept[row].tolist() == pytest.approx(want[0], abs=1e-9)
        own = found.recovered[row].tolist()
        assert own == pytest.approx(want[1], abs=1e-9) or sum(own) < 1e-12  # nothing is left, up to rounding
        passed = [i for i in range(k) if float(accept[row][i]) < want[0][i]]
        index = passed[0] if passed else -1
        assert int(decided.accepted[row]) == index
        if passed:
            assert int(decided.token[row]) == int(tokens[row][index])
        elif sum(own) > 1e-12:
            assert int(decided.token[row]) == by_hand.sampled(want[1], float(final[row]))


@pytest.mark.parametrize("plan", [best_draft_plan, best_draft_code_plan])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_plan_has_the_dtype_of_the_distributions_and_can_be_sampled_from(
    plan: SelectionPlanner, dtype: torch.dtype
) -> None:
    for kind in WELL_CONDITIONED:
        p, q = (side.to(dtype) for side in first_distributions(kind, 4))
        generator = torch.Generator().manual_seed(1)
        tokens = torch.multinomial(q, 6, replacement=True, generator=generator).reshape(3, 1, 2)
        found = plan(p.expand(3, 1, 4), q.expand(3, 1, 2, 4), tokens)
        assert found.accept.shape == (3, 1, 2)
        assert found.accept.dtype == found.recovered.dtype == dtype
        assert found.recovered.shape == (3, 1, 4)
        assert found.recovered.min() >= 0
        assert found.recovered.sum(-1).min() > 0
        for row in range(3):
            alone = plan(p, q.expand(2, 4), tokens[row, 0])
            assert torch.equal(
                alone.accept,
                found.accept[row, 0],
            )
            assert torch.equal(alone.recovered, found.recovered[row, 0])


def test_a_token_that_neither_distribution_has_is_chosen_last() -> None:
    p = q = torch.tensor([0.0, 0.5, 0.5]).double()
    for plan in (best_draft_plan, best_draft_code_plan):
        found = plan(p, q.expand(2, 3), torch.tensor([0, 1]))
        assert found.accept[0] == 0
        assert found.accept[1] > 0


def test_of_many_tokens_with_equal_ratios_the_last_is_preferred() -> None:
    """Torch keeps the order of more than 16 equal numbers in a stable sort only."""
    probs = torch.full((40,), 1 / 40, dtype=torch.float64)
    for seed in range(10):
        tokens = torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:2]
        found = best_draft_plan(probs, probs.expand(2, 40), tokens)
        later = int(tokens.argmax())
        share = ((int(tokens[later]) + 1) ** 2 - int(tokens[later]) ** 2) / 1600
        want = [0.0, 0.0]
        want[later] = min(1.0, 1 / 40 / share)
        assert found.accept.tolist() == pytest.approx(want, abs=1e-9)
        code = best_draft_code_plan(probs, probs.expand(2, 40), tokens)
        share = ((int(tokens[0]) + 1) ** 2 - int(tokens[0]) ** 2) / 1600  # the first in the tuple, as if by its id
        assert code.accept.tolist() == pytest.approx([min(1.0, 1 / 40 / share), 0.0], abs=1e-9)
