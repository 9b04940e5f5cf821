"""How far what a step emits is from the target's law, and bugs of carrying a plan out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from distributions_for_tests import distribution_pair
from torch import Tensor

from specnb.distributions import Conditional
from specnb.drafters import Drafter
from specnb.enumeration import Emissions, completed, drafter_step_distribution, joint_distribution
from specnb.rules import Outcome, Rule, token_verification


def off(emitted: Emissions, p: Conditional, length: int) -> float:
    """The total variation between what was emitted, completed by the target, and the target's joint
    distribution."""
    return float((completed(emitted, p, length) - joint_distribution(p, length)).abs().sum()) / 2


@torch.inference_mode()
def step_off(
    drafter: Drafter, prefix: tuple[int, ...], gamma: int = 2, rule: Rule = token_verification, seed: int = 0
) -> float:
    """The same for a step with `drafter` after `prefix`."""
    p, _ = distribution_pair("dense", drafter.vocab, seed)
    return off(drafter_step_distribution(drafter, p, prefix, gamma, rule), p, gamma + 1)


def _with(change: Callable[..., Outcome]) -> Callable[[Rule], Rule]:
    """The bug of a rule that `change` calls with other arguments, or whose outcome it changes."""

    def planted(rule: Rule) -> Rule:
        return lambda p, q, x, accept, final, *tree: change(rule, p, q, x, accept, final, *tree)

    planted.__name__ = change.__name__
    return planted


@_with
def one_uniform(rule: Rule, p: Tensor, q: Tensor, x: Tensor, accept: Tensor, final: Tensor, *tree: Any) -> Outcome:
    return rule(p, q, x, accept[..., :1].expand_as(accept), final, *tree)


@_with
def final_reused(rule: Rule, p: Tensor, q: Tensor, x: Tensor, accept: Tensor, final: Tensor, *tree: Any) -> Outcome:
    return rule(p, q, x, accept, accept[..., -1], *tree)


@_with
def one_too_few(rule: Rule, *given: Any) -> Outcome:
    outcome = rule(*given)
    return outcome._replace(accepted=(outcome.accepted - 1).clamp_min(0))


@_with
def after_the_root(rule: Rule, p: Tensor, *given: Any) -> Outcome:
    return rule(p, *given)._replace(token=rule(p[..., :1, :].expand_as(p), *given).token)


@_with
def always_accepting(rule: Rule, p: Tensor, q: Tensor, x: Tensor, accept: Tensor, *rest: Any) -> Outcome:
    return rule(p, q, x, accept * 0, *rest)


BUGS = [one_uniform, final_reused, one_too_few, after_the_root, always_accepting]
