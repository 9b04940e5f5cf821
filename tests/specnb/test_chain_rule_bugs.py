"""Planted bugs of the rules that verify a chain token by token: each rule has three or more that enumeration finds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from distributions_for_tests import distribution_pair
from torch import Tensor

from specnb.distributions import residual, sample
from specnb.enumeration import completed, joint_distribution, step_distribution
from specnb.rules import (
    Outcome,
    Rule,
    exact_match,
    greedy_verification,
    rejection_sampling,
    token_verification,
)

RULES: dict[Rule, str] = {  # and the kind of distributions for which they are exact
    token_verification: "dense",
    rejection_sampling: "dense",
    exact_match: "dense",
    greedy_verification: "one-hot p",
}
GAMMA = 2


def accepted_off_by_one(rule: Rule) -> Rule:
    """The last accepted token is lost."""

    def wrong(*given: Tensor) -> Outcome:
        outcome = rule(*given)
        return outcome._replace(accepted=(outcome.accepted - 1).clamp_min(0))

    return wrong


def p_one_position_late(rule: Rule) -> Rule:
    """Each draft token is tested against the distribution after it (TensorRT-LLM 15098)."""
    return lambda p, *rest: rule(torch.cat([p[..., 1:, :], p[..., -1:, :]], -2), *rest)


def q_one_position_late(rule: Rule) -> Rule:
    return lambda p, q, *rest: rule(p, q.roll(-1, dims=-2), *rest)


def tokens_swapped(rule: Rule) -> Rule:
    """The draft tokens are tested in the reverse order."""
    return lambda p, q, tokens, *rest: rule(p, q, tokens.flip(-1), *rest)


def first_token_twice(rule: Rule) -> Rule:
    return lambda p, q, tokens, *rest: rule(p, q, tokens[..., [0, 0]], *rest)


def one_uniform(rule: Rule) -> Rule:
    """All tests read the first uniform."""
    return lambda p, q, tokens, accept, final: rule(p, q, tokens, accept[..., :1].expand_as(accept), final)


def final_from_p(rule: Rule) -> Rule:
    """The recovered token is sampled from p itself, or again (redraw)."""

    def wrong(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        outcome = rule(p, q, tokens, accept, final)
        return outcome._replace(token=sample(_at(p, outcome.accepted), final))

    return wrong


def final_from_the_residual(rule: Rule) -> Rule:
    """The recovered token comes from the residual of token verification."""

    def wrong(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        outcome = rule(p, q, tokens, accept, final)
        left = torch.cat([residual(p[..., :-1, :], q), p[..., -1:, :]], dim=-2)
        return outcome._replace(token=sample(_at(left, outcome.accepted), final))

    return wrong


def _at(rows: Tensor, position: Tensor) -> Tensor:
    return rows.take_along_dim(position[..., None, None], dim=-2)[..., 0, :]


BUGS: list[Callable[[Rule], Rule]] = [
    accepted_off_by_one, p_one_position_late, q_one_position_late, tokens_swapped, first_token_twice, one_uniform,
    final_from_p, final_from_the_residual,
]  # fmt: skip
HARMLESS = {  # what a rule does not read, or does anyway
    (token_verification, final_from_the_residual),
    (rejection_sampling, final_from_p),
    (exact_match, q_one_position_late),
    (greedy_verification, q_one_position_late),
    (greedy_verification, one_uniform),
    (greedy_verification, final_from_p),
    (greedy_verification, final_from_the_residual),
}


def is_found(rule: Rule, kind: str) -> bool:
    """Whether the joint distribution of a step is off for one of a few pairs, or an answer changes inside a cell."""
    for seed in range(4):
        p, q = distribution_pair(kind, 3, seed)
        try:
            have = completed(step_distribution(rule, p, q, GAMMA), p, GAMMA + 1)
        except ValueError:
            return True
        if float((have - joint_distribution(p, GAMMA + 1)).abs().sum()) / 2 > 1e-3:
            return True
    return False


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_without_a_bug_nothing_is_found(rule: Rule) -> None:
    assert not is_found(rule, RULES[rule])
    assert len([bug for bug in BUGS if (rule, bug) not in HARMLESS]) >= 3


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_bug_is_found(rule: Rule, bug: Callable[[Rule], Rule]) -> None:
    assert is_found(bug(rule), RULES[rule]) == ((rule, bug) not in HARMLESS)
