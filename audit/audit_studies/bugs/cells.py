"""The distribution that a rule gives to what a step emits, from its answers: for rules without a plan.

A rule is asked in every cell between the thresholds of some plans, in which the answer of a rule
that compares uniforms with these thresholds is constant; or on quasi-random points.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from specnb.distributions import Conditional
from specnb.enumeration import Drafts, Emissions, distributions_of, draft_trees, emissions, target_along
from specnb.rules import PlannedRule, Rule, exact_match, rejection_sampling, require_outcome, token_verification
from specnb.trees import TokenTree, chain, independent_children

MIN_CELL_WIDTH = 1e-13  # closer edges are one, because equal sums differ in their last bits
CORNER_INSET = 2e-14  # how far inside a cell the rule is evaluated at both of its ends
CELLS = 20_000  # cells of a batch, so that memory stays small
POINTS = 2**13


class ChangesInsideError(ValueError):
    """A rule changes its answer inside a cell, whose volume is then not a probability."""


def chain_distribution(
    rule: Rule, p: Conditional, q: Conditional, gamma: int, sampled: Conditional | None = None
) -> Emissions:
    """`specnb.enumeration.step_distribution` of any rule, for a chain."""
    drafts, parents = draft_trees(chain(gamma), q, independent_children, sampled), chain(gamma)
    if isinstance(rule, PlannedRule):
        return emissions(rule, drafts, p, parents)
    return integrated_distribution(rule, drafts, p, parents)


def integrated_distribution(
    rule: Rule,
    drafts: Drafts,
    p: Conditional,
    parents: tuple[int, ...],
    thresholds: Sequence[PlannedRule] = (token_verification, rejection_sampling, exact_match),
) -> Emissions:
    """`specnb.enumeration.emissions` of any rule, from its answers in every cell between the thresholds of some plans.

    Each cell is asked at its centre and just inside two corners. If the answers differ, the rule
    compares a uniform with something else, and `ChangesInsideError` is raised.
    """
    tree, count = TokenTree(parents), len(drafts.tokens)
    target = target_along(drafts, p, tree)
    plans = [rule_with_plan.plan(target, drafts.q, drafts.tokens, tree) for rule_with_plan in thresholds]
    samples = target[:, tree.parent_entries].cumsum(-1)  # of p after each parent
    accept = torch.cat([torch.stack([plan.accept.double() for plan in plans], dim=-1), samples], dim=-1)
    final = torch.cat([distributions_of(plan).cumsum(-1).flatten(1) for plan in plans], dim=-1)
    emitted, batch, size = Emissions(), list[tuple[int, Tensor, Tensor]](), 0
    for draft in range(count):
        edges = [*map(_edges, accept[draft]), _edges(final[draft])]
        lows = torch.cartesian_prod(*[edge[:-1] for edge in edges]).reshape(-1, len(edges))
        batch.append((draft, lows, torch.cartesian_prod(*[edge.diff() for edge in edges]).reshape(-1, len(edges))))
        size += len(lows)
        if size > CELLS or draft == count - 1:
            for tokens, volume in _volumes(rule, batch, target, drafts, None if tree.is_chain else tree):
                emitted[tokens] = emitted.get(tokens, 0.0) + volume
            batch, size = [], 0
    return emitted


def _edges(points: Tensor) -> Tensor:
    inside = points.nan_to_num(0.0).sort().values
    inside = inside[(inside > MIN_CELL_WIDTH) & (inside < 1 - MIN_CELL_WIDTH)]
    edges = torch.cat([inside.new_zeros(1), inside])
    edges = edges[torch.cat([torch.tensor([True]), edges.diff() > MIN_CELL_WIDTH])]
    return torch.cat([edges, edges.new_ones(1)])


def _volumes(
    rule: Rule, batch: list[tuple[int, Tensor, Tensor]], p: Tensor, drafts: Drafts, tree: TokenTree | None
) -> Iterator[tuple[tuple[int, ...], float]]:
    which = torch.cat([torch.full((len(lows),), draft) for draft, lows, _ in batch])
    lows, widths = (torch.cat(parts) for parts in list(zip(*batch, strict=True))[1:])
    answers = _answers(rule, which, lows + widths / 2, p, drafts, tree)
    for corner in (lows + CORNER_INSET, lows + widths - CORNER_INSET):
        if not torch.equal(_answers(rule, which, corner, p, drafts, tree), answers):
            raise ChangesInsideError(
                f"{getattr(rule, '__name__', rule)} changes its answer inside a cell, because its thresholds are those "
                "of none of the plans; write it as a PlannedRule"
            )
    yield from _summed(answers, widths.prod(-1) * drafts.probability[which])


def _answers(
    rule: Rule, which: Tensor, uniforms: Tensor, p: Tensor, drafts: Drafts, tree: TokenTree | None
) -> Int[Tensor, "asked numbers"]:
    """The rule's answers for the drafts `which`: number accepted, last token, accepted tokens."""
    tokens, shape = drafts.tokens[which], () if tree is None else (tree,)
    outcome = rule(p[which], drafts.q[which], tokens, uniforms[:, :-1], uniforms[:, -1], *shape)
    require_outcome(outcome, len(which), tree)
    accepted, token, path = outcome
    nodes = torch.arange(tokens.shape[1]) if path is None else path.clamp_min(0)
    emitted = tokens.gather(1, nodes.expand(len(tokens), -1))
    emitted = emitted.where(torch.arange(emitted.shape[1]) < accepted[:, None], -1)
    for name, answer, most in (("accepted", accepted, emitted.shape[1]), ("token", token, p.shape[-1] - 1)):
        if bool(((answer < 0) | (answer > most)).any()):
            raise ValueError(f"the rule returned {name} from {answer.min()} to {answer.max()}; 0 to {most} can be")
    return torch.cat([accepted[:, None], token[:, None], emitted], dim=1)


def _summed(answers: Tensor, shares: Tensor) -> Iterator[tuple[tuple[int, ...], float]]:
    # Answers are coded as numbers, because torch needs many times as long for unique rows.
    weights = (int(answers.max()) + 2) ** torch.arange(answers.shape[1]).flip(0)
    numbers, inverse = ((answers + 1) @ weights).unique(return_inverse=True)
    sums = torch.zeros(len(numbers)).double().index_add(0, inverse, shares)
    distinct = torch.zeros(len(numbers), answers.shape[1]).long().index_copy(0, inverse, answers)
    for (accepted, token, *emitted), share in zip(distinct.tolist(), sums.tolist(), strict=True):
        yield (*emitted[:accepted], token), share


def estimated_distribution(
    rule: Rule, drafts: Drafts, p: Conditional, parents: tuple[int, ...], points: int = POINTS
) -> Emissions:
    """`emissions` of any rule, estimated on quasi-random points; `token_verification` is off by about 1e-3 on these."""
    tree, count = TokenTree(parents), len(drafts.tokens)
    target = target_along(drafts, p, tree)
    which = torch.arange(count).repeat_interleave(points)
    uniforms = torch.quasirandom.SobolEngine(len(parents) + 1).draw(points + 1, dtype=torch.float64)[1:]
    answers = _answers(rule, which, uniforms.repeat(count, 1), target, drafts, None if tree.is_chain else tree)
    return dict(_summed(answers, drafts.probability[which] / points))
