"""Judging a rule: exact rules and known bugs are told apart, and tokens per step are those of
closed forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair, lenient_distribution
from drafter_kinds import BUGS as DRAFTER_BUGS
from torch import Tensor

from specnb.copies import PromptLookupDrafter
from specnb.distributions import Conditional, overlap
from specnb.drafters import ChainDrafter, Context, Proposal
from specnb.enumeration import completed, expected_accepted, joint_distribution, step_distribution
from specnb.exactness import EXACT, judge_drafter, judge_rule, random_pairs, worst_prefix
from specnb.rules import (
    Outcome,
    Plan,
    PlannedRule,
    block_verification,
    exact_match,
    lenient_verification,
    recursive_rejection,
    rejection_sampling,
    token_verification,
    traversal_verification,
)
from specnb.theory import expected_tokens
from specnb.trees import distinct_children
from studies.drafters.tables import UniformDrafter

CHANGES: dict[str, Callable[[Plan, Tensor], Plan]] = {
    "p itself after a rejection": lambda plan, p: plan._replace(less=None),
    "always accepting": lambda plan, p: plan._replace(accept=torch.ones_like(plan.accept)),
    "the test of the next token": lambda plan, p: plan._replace(accept=plan.accept.roll(-1, -1)),
    "p of the root": lambda plan, p: plan._replace(after=p[..., :1, :].expand_as(p)),
}


def wrong(name: str) -> PlannedRule:
    return PlannedRule(lambda p, *given: CHANGES[name](token_verification.plan(p, *given), p))


P, Q = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], dtype=torch.float64)
IID = {"iid": (lambda _: P, lambda _: Q)}


def as_function(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, accept, final)


@pytest.mark.parametrize(
    ("rule", "settings"),
    [
        *((rule, {}) for rule in (token_verification, block_verification, rejection_sampling, exact_match)),
        (recursive_rejection, {"gamma": (-1, -1, 0), "scheme": distinct_children}),
        (traversal_verification, {"gamma": (-1, -1, 0)}),
    ],
)
def test_exact_rules_are_judged_exact(rule: Any, settings: dict[str, Any]) -> None:
    found = judge_rule(rule, **settings)
    assert found.exact
    assert found.worst.allowed == EXACT == 1e-12
    assert found.tokens_per_step <= found.beside["block verification"] + 1e-12
    assert "worst prefix" not in str(found)


@pytest.mark.parametrize("name", CHANGES)
def test_every_planted_bug_of_a_rule_is_judged_inexact(name: str) -> None:
    """Its worst prefix has the probabilities that are named, and they differ by more than an exact
    rule's do."""
    found = judge_rule(wrong(name), gamma=2, pairs=random_pairs(4))
    assert not found.exact
    tokens, target, of_rule = found.worst.worst
    assert EXACT < abs(target - of_rule) <= found.worst.total_variation + 1e-12
    where, gamma = found.worst.where.rsplit(", gamma ", 1)
    p, q = random_pairs(4)[where]
    assert target == pytest.approx(float(joint_distribution(p, len(tokens))[tokens]), abs=1e-12)
    joint = completed(step_distribution(wrong(name), p, q, int(gamma)), p, int(gamma) + 1)
    assert of_rule == pytest.approx(float(joint[tokens].sum()), abs=1e-12)
    assert f"worst prefix: {tokens}" in str(found)


def test_a_rule_without_a_plan_is_refused() -> None:
    with pytest.raises(TypeError, match="PlannedRule"):
        judge_rule(as_function)


@pytest.mark.parametrize("lenience", [0.5, 0.99, 1.0])
def test_a_lenient_rule_is_off_by_the_known_amount(lenience: float) -> None:
    """The first token has the distribution of the closed form, and only the last token of a step is
    tested if gamma is 1."""
    found = judge_rule(lenient_verification(lenience), gamma=1, pairs=IID)
    known = float((lenient_distribution(P, Q, lenience) - P).abs().sum()) / 2
    assert found.exact == (lenience == 1)
    assert found.worst.total_variation == pytest.approx(known, abs=1e-12)
    assert found.tokens_per_step == pytest.approx(1 + float(torch.minimum(P / lenience, Q).sum()), abs=1e-12)


def test_with_iid_acceptance_tokens_per_step_are_capped_geometric() -> None:
    for gamma in (1, 2, 3):
        found = judge_rule(token_verification, gamma, IID)
        assert found.tokens_per_step == pytest.approx(float(expected_tokens(float(overlap(P, Q)), gamma)), abs=1e-12)


def optimal_accepted(p: Conditional, q: Conditional, gamma: int) -> float:
    """The most draft tokens of a chain that an exact rule accepts (arXiv:2403.10444): the sum over all
    sequences x of the least q(x_1..x_j) p(x_j+1..x_n | x_1..x_j), j = 0 .. n."""

    def accepted_after(prefix: tuple[int, ...], kept: float, drafted: float) -> float:
        if len(prefix) == gamma:
            return 0.0
        total = 0.0
        for x, (target, draft) in enumerate(zip(p(prefix).tolist(), q(prefix).tolist(), strict=True)):
            least = min(kept * target, drafted * draft)
            total += least + accepted_after((*prefix, x), least, drafted * draft)
        return total

    return accepted_after((), 1.0, 1.0)


@pytest.mark.parametrize("kind", PAIRS)
def test_block_verification_accepts_the_optimum(kind: str) -> None:
    p, q = distribution_pair(kind, vocab=3)
    for gamma in (1, 2, 3):
        accepted = expected_accepted(step_distribution(block_verification, p, q, gamma))
        assert accepted == pytest.approx(optimal_accepted(p, q, gamma), abs=1e-12)


def test_the_worst_prefix_is_the_shortest_with_the_largest_difference() -> None:
    want = joint_distribution(lambda _: P, 2)
    have = want.clone()
    have[1] += torch.tensor([0.0, 0.01, 0.0])
    have[2] -= torch.tensor([0.0, 0.0, 0.01])
    assert tuple(worst_prefix(have, want)) == ((1,), pytest.approx(0.3), pytest.approx(0.31))
    have = want.clone()
    have[0, 0], have[0, 1] = have[0, 0] + 0.02, have[0, 1] - 0.02
    assert tuple(worst_prefix(have, want)) == ((0, 0), pytest.approx(0.25), pytest.approx(0.27))


# Drafters


class Silent(ChainDrafter):
    vocab = 3

    def distribution(self, context: Context, position: int) -> Tensor:
        return torch.zeros(len(context.tokens), 3)


class Random(UniformDrafter):
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return super().propose(context, torch.rand_like(uniforms))


class Doubled(UniformDrafter):
    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        sampled = super().propose(context, uniforms)
        return sampled._replace(q=2 * sampled.q)


def test_a_drafter_is_judged_by_the_q_that_it_reports() -> None:
    assert judge_drafter(UniformDrafter(3)).exact
    found = judge_drafter(PromptLookupDrafter(3, shortest=1))
    assert found.exact, found
    assert 0 < found.cases < 24, "after some prefixes nothing is copied"
    found = judge_drafter(DRAFTER_BUGS["q reported raw"](), prefixes=[(0, 1), (2,)])
    assert not found.exact
    assert found.worst.total_variation > 0.05
    assert "ReportsRaw is NOT exact" in str(found)


@pytest.mark.parametrize("drafter", [Silent(), Random(3), Doubled(3)])
def test_what_cannot_be_judged_is_refused(drafter: ChainDrafter) -> None:
    with pytest.raises(ValueError, match=r"proposes|sums"):
        judge_drafter(drafter)


def test_a_drafter_that_reads_hidden_states_is_refused() -> None:
    drafter = UniformDrafter(3)
    drafter.hidden_layers = (-1,)
    with pytest.raises(TypeError, match="UniformDrafter reads hidden states"):
        judge_drafter(drafter)
