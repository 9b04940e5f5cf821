"""Exact enumeration of rules that publish their thresholds: `ChainPlan`, `SelectionPlan` and `TreePlan`.

`specnb.sampling.enumeration` knows where a rule that compares uniforms with p/q can change its answer. The rules here
compare with other numbers, which their plans give. Two ways lead to the same distribution:

- *planned*: the probabilities that the plan states, multiplied out. Fast; used for tables.
- *asked*: the rule itself, evaluated in every cell of uniforms between the plan's thresholds. It finds a rule that
  does not do what its plan says, and is what exactness is tested with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor

from specnb.sampling.block_verification import ChainPlan, Planner
from specnb.sampling.distributions import normalise, one_hot
from specnb.sampling.draft_schemes import DraftTuple
from specnb.sampling.enumeration import CORNER_INSET, MIN_CELL_WIDTH, Conditional, Emissions
from specnb.sampling.multi_draft import MultiDraftRule, SelectionPlan, SelectionPlanner
from specnb.sampling.tree_schemes import Scheme, draft_trees, prefix_of
from specnb.sampling.tree_verification import TreePlan, TreePlanner, TreeRule
from specnb.sampling.verification import Rule

CELLS = 20_000  # cells of a batch, so that memory stays small


def planned_step_distribution(plan: Planner, p: Conditional, q: Conditional, gamma: int) -> Emissions:
    """The distribution of everything that one step of a chain rule emits, by its plan's probabilities."""
    emitted: Emissions = {}
    for tokens, chance, p_along, q_along in _chains(p, q, gamma):
        accept, recovered = plan(p_along, q_along, torch.tensor(tokens, dtype=torch.int64))
        token_probs = normalise(recovered)
        left = chance
        for n in range(gamma, -1, -1):
            stopped = left * (float(accept[n - 1]) if n else 1.0)
            left -= stopped
            for x, share in enumerate(token_probs[n].tolist()):
                key = (*tokens[:n], x)
                emitted[key] = emitted.get(key, 0.0) + stopped * share
    return emitted


def asked_step_distribution(rule: Rule, plan: Planner, p: Conditional, q: Conditional, gamma: int) -> Emissions:
    """The same distribution from the rule's own answers in every cell between the thresholds of `plan`.

    Raises `ValueError` if an answer changes inside a cell: then the rule does not follow `plan`.
    """
    emitted: Emissions = {}
    chains = _chains(p, q, gamma)
    parts = [(p_along, q_along, torch.tensor(tokens, dtype=torch.int64)) for tokens, _, p_along, q_along in chains]
    for (tokens, chance, *_), answers in zip(chains, _answers(rule, parts, plan), strict=True):
        for (n, x), volume in answers.items():
            key = (*tokens[:n], x)
            emitted[key] = emitted.get(key, 0.0) + chance * volume
    return emitted


def expected_accepted(emitted: Emissions) -> float:
    """The expected number of accepted draft tokens in a step; the added token is not counted."""
    return sum(chance * (len(tokens) - 1) for tokens, chance in emitted.items())


def planned_selection(plan: SelectionPlanner, p: Tensor, drafts: Sequence[DraftTuple]) -> tuple[Tensor, float]:
    """The emitted distribution `(vocab,)` and the probability that a draft token is accepted, by the plan."""
    tokens, chances, q = _stacked(drafts)
    accept, recovered = plan(p.expand(len(drafts), -1), q, tokens)
    rejected_before = torch.cat([torch.ones_like(accept[:, :1]), (1 - accept).cumprod(-1)], dim=-1)
    taken = (accept * rejected_before[:, :-1])[..., None] * one_hot(tokens.clamp_min(0), len(p), p.dtype)
    emitted = taken.sum(1) + rejected_before[:, -1:] * normalise(recovered)
    return chances @ emitted, float(chances @ taken.sum((1, 2)))


def asked_selection(
    rule: MultiDraftRule, plan: SelectionPlanner, p: Tensor, drafts: Sequence[DraftTuple]
) -> tuple[Tensor, float]:
    """The same from the rule's own answers in every cell. Raises `ValueError` if it does not follow `plan`."""
    emitted, accepted = torch.zeros_like(p), 0.0
    parts = [(p, draft.q, torch.tensor(draft.tokens, dtype=torch.int64)) for draft in drafts]
    for draft, answers in zip(drafts, _answers(rule, parts, plan), strict=True):
        for (index, x), volume in answers.items():
            emitted[x] += draft.probability * volume
            accepted += draft.probability * volume * (index >= 0)
    return emitted, accepted


def asked_tree_distribution(
    rule: TreeRule, plan: TreePlanner, p: Conditional, q: Conditional, parents: tuple[int, ...], scheme: Scheme
) -> Emissions:
    """The distribution of everything that one step of a tree rule emits, from its own answers in every cell.

    The trees have the shape `parents` and children sampled by `scheme`; p and q are given the tokens of this step.
    Raises `ValueError` if the rule does not follow `plan`.
    """
    trees = draft_trees(parents, q, scheme)
    parts = []
    for tree in trees:
        paths = [prefix_of(node, parents, tree.tokens) for node in range(-1, len(parents))]
        p_tree = torch.stack([p(path) if -1 not in path else p(()) for path in paths])
        parts.append((p_tree, tree.q, torch.tensor(tree.tokens, dtype=torch.int64)))

    def columns(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, final: Tensor) -> tuple[Tensor, ...]:
        accepted, token, path = rule(p, q, tokens, parents, accept, final)
        return accepted, token, *path.unbind(-1)

    emitted: Emissions = {}
    for tree, answers in zip(
        trees, _answers(columns, parts, lambda p, q, tokens: plan(p, q, tokens, parents)), strict=True
    ):
        for (accepted, x, *path), volume in answers.items():
            key = (*(tree.tokens[node] for node in path[:accepted]), x)
            emitted[key] = emitted.get(key, 0.0) + tree.probability * volume
    return emitted


def _chains(p: Conditional, q: Conditional, gamma: int) -> list[tuple[tuple[int, ...], float, Tensor, Tensor]]:
    """Every possible draft, its probability, and p `(gamma + 1, vocab)` and q `(gamma, vocab)` along it."""
    found = []
    for tokens in product(range(len(p(()))), repeat=gamma):
        q_along = [q(tokens[:i]) for i in range(gamma)]
        chance = 1.0
        for probs, token in zip(q_along, tokens, strict=True):
            chance *= float(probs[token])
        if chance > 0:
            p_along = torch.stack([p(tokens[:i]) for i in range(gamma + 1)])
            found.append((tokens, chance, p_along, torch.stack(q_along) if gamma else p_along[:0]))
    return found


def _stacked(drafts: Sequence[DraftTuple]) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.tensor([draft.tokens for draft in drafts], dtype=torch.int64)
    chances = torch.tensor([draft.probability for draft in drafts], dtype=torch.float64)
    return tokens, chances, torch.stack([draft.q for draft in drafts])


def _edges(points: Tensor) -> Tensor:
    inside = points.flatten().sort().values
    inside = inside[(inside > MIN_CELL_WIDTH) & (inside < 1 - MIN_CELL_WIDTH)]
    edges = torch.cat([inside.new_zeros(1), inside])
    edges = edges[torch.cat([torch.tensor([True]), edges.diff() > MIN_CELL_WIDTH])]
    return torch.cat([edges, edges.new_ones(1)])


def _answers(
    rule: Callable[..., tuple[Tensor, ...]],
    parts: Sequence[tuple[Tensor, Tensor, Tensor]],
    plan: Callable[..., ChainPlan | SelectionPlan | TreePlan],
) -> list[dict[tuple[int, ...], float]]:
    """For each p, q and draft tokens the volume of uniforms for each answer, asked at three points of every cell.

    All cells of a batch are one call of `rule`; a batch has at most about `CELLS` cells.
    """
    found: list[dict[tuple[int, ...], float]] = []
    batch: list[tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]] = []
    size = 0
    for part in parts:
        batch.append((part, *_cells(plan(*part))))
        size += len(batch[-1][1])
        if size > CELLS:
            found, batch, size = [*found, *_volumes(rule, batch)], [], 0
    return [*found, *_volumes(rule, batch)] if batch else found


def _cells(plan: ChainPlan | SelectionPlan | TreePlan) -> tuple[Tensor, Tensor]:
    """The lower corner and the widths `(cells, uniforms)` of the cells between the thresholds of `plan`."""
    edges = [*(_edges(threshold) for threshold in plan.accept), _edges(normalise(plan.recovered).cumsum(-1))]
    lows = torch.cartesian_prod(*[edge[:-1] for edge in edges]).reshape(-1, len(edges))
    return lows, torch.cartesian_prod(*[edge.diff() for edge in edges]).reshape(-1, len(edges))


def _volumes(
    rule: Callable[..., tuple[Tensor, ...]], batch: Sequence[tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor]]
) -> list[dict[tuple[int, ...], float]]:
    counts = [len(cells) for _, cells, _ in batch]
    lows, widths = (torch.cat(columns) for columns in zip(*((low, width) for _, low, width in batch), strict=True))
    p, q, tokens = (
        torch.cat([part.expand(count, *part.shape) for part, count in zip(column, counts, strict=True)])
        for column in zip(*(part for part, _, _ in batch), strict=True)
    )

    def ask(uniforms: Tensor) -> Tensor:
        return torch.stack(rule(p, q, tokens, uniforms[:, :-1], uniforms[:, -1]), dim=-1)

    answers = ask(lows + widths / 2)
    for corner in (lows + CORNER_INSET, lows + widths - CORNER_INSET):
        if not torch.equal(ask(corner), answers):
            raise ValueError(
                "the rule changes its answer inside a cell between its plan's thresholds: pass the plan that the rule "
                "follows, and let each uniform serve one comparison or one sample"
            )
    found = []
    for rows, sizes in zip(answers.split(counts), widths.prod(-1).split(counts), strict=True):
        volumes: dict[tuple[int, ...], float] = {}
        for answer, volume in zip(rows.tolist(), sizes.tolist(), strict=True):
            volumes[tuple(answer)] = volumes.get(tuple(answer), 0.0) + volume
        found.append(volumes)
    return found
