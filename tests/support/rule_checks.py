"""What tests of rules enumerate, and bugs of carrying a plan out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from distributions_for_tests import PAIRS, distribution_pair
from torch import Tensor

from specnb.distributions import Conditional
from specnb.enumeration import (
    Emissions,
    completed,
    draft_trees,
    integrated_distribution,
    joint_distribution,
    step_distribution,
)
from specnb.rules import Outcome, Plan, Planner, Rule
from specnb.trees import Scheme, independent_children, node_depths


class Method(NamedTuple):
    """A rule, the draft tokens that it verifies, and how they are sampled."""

    rule: Rule
    parents: tuple[int, ...]
    scheme: Scheme = independent_children
    may_miss: bool = True  # whether draft tokens may be -1

    @property
    def length(self) -> int:
        return max(node_depths(self.parents), default=0) + 1


def off(emitted: Emissions, p: Conditional, length: int) -> float:
    """The total variation between what was emitted, completed by the target, and the target's joint
    distribution."""
    return float((completed(emitted, p, length) - joint_distribution(p, length)).abs().sum()) / 2


def emitted_by(method: Method, p: Conditional, q: Conditional) -> Emissions:
    return step_distribution(method.rule, p, q, method.parents, scheme=method.scheme)


def error(method: Method, kind: str = "dense", vocab: int = 3, seed: int = 0) -> float:
    p, q = distribution_pair(kind, vocab, seed)
    return off(emitted_by(method, p, q), p, method.length)


def integrated(rule: Rule, method: Method, p: Conditional, q: Conditional) -> Emissions:
    """What `rule` answers in every cell of uniforms between the thresholds of the method's plan."""
    drafts = draft_trees(method.parents, q, method.scheme)
    return integrated_distribution(rule, drafts, p, method.parents, (method.rule,))  # type: ignore[arg-type]


def difference(one: Emissions, other: Emissions) -> float:
    return max(abs(one.get(tokens, 0.0) - other.get(tokens, 0.0)) for tokens in one.keys() | other.keys())


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


def is_found(rule: Rule, method: Method) -> bool:
    """Whether the cells are not as multiplied, or an answer changes inside a cell."""
    for seed in range(3):
        p, q = distribution_pair("dense", 3 if len(method.parents) < 4 else 2, seed)
        try:
            if difference(integrated(rule, method, p, q), emitted_by(method, p, q)) > 1e-3:
                return True
        except ValueError:
            return True
    return False


def changed(plan: Planner, change: Callable[..., Plan]) -> Planner:
    return lambda p, q, x, tree: change(plan(p, q, x, tree), p, q, x, tree)


def from_p(plan: Plan, p: Tensor, *_: Any) -> Plan:
    """After a rejection p itself is sampled."""
    return Plan(plan.accept, p)


@cache
def any_case(parents: tuple[int, ...], rows: int = 24, vocab: int = 4) -> tuple[Tensor, ...]:
    """p, q, tokens and uniforms `(rows, ...)`: distributions of every kind, impossible tokens, and
    missing ones."""
    generator, n = torch.Generator().manual_seed(len(parents)), len(parents)
    kinds = [kind for kind in PAIRS if kind != "nearly equal"]
    p, q = torch.zeros(rows, n + 1, vocab).double(), torch.zeros(rows, n, vocab).double()
    tokens = torch.randint(-1, vocab, (rows, n), generator=generator)
    for row in range(rows):
        p_of, q_of = distribution_pair(kinds[row % len(kinds)], vocab, seed=row)
        for entry in range(n + 1):
            p[row, entry] = p_of((entry,))
        for node in range(n):
            own = q_of((parents[node] + 1,))
            if tokens[row, node] > 0:  # mostly a token that can be proposed
                tokens[row, node] = int(torch.multinomial(own, 1, generator=generator))
            q[row, node] = own * (tokens[row, node] >= 0)
    uniforms = torch.rand(rows, n + 1, generator=generator, dtype=torch.float64)
    return p, q, tokens, uniforms[:, :-1], uniforms[:, -1]
