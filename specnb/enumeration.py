"""Exact enumeration: the joint distribution that a rule gives to everything a step emits, without sampling.

The function that the decoding loop calls is evaluated in float64 on every sequence of draft tokens and on every cell
of the uniforms within which its answer is constant; the volumes of the cells are the probabilities. The distributions
may depend on the tokens before them, because that is where implementations go wrong.

Exact enumeration of rules that publish their thresholds: `ChainPlan`, `SelectionPlan` and `TreePlan`.

`specnb.enumeration` knows where a rule that compares uniforms with p/q can change its answer. The rules here
compare with other numbers, which their plans give. Two ways lead to the same distribution:

- *planned*: the probabilities that the plan states, multiplied out. Fast; used for tables.
- *asked*: the rule itself, evaluated in every cell of uniforms between the plan's thresholds. It finds a rule that
  does not do what its plan says, and is what exactness is tested with.

Exact enumeration of a drafter: the function that the decoding loop calls, on every cell of its uniforms.

A drafter's proposal is piecewise constant in its uniforms. The edges are found by bisection of the uniforms themselves,
so nothing is assumed about what the drafter reports, and a q that is not what was sampled from shows in the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from specnb.distributions import Conditional, normalise, one_hot, residual
from specnb.draft_schemes import DraftTuple
from specnb.drafting.base import Context, Drafter
from specnb.multi_draft import MultiDraftRule, SelectionPlan, SelectionPlanner
from specnb.rules import ChainPlan, Outcome, Planner, Rule, TreePlan, TreePlanner, TreeRule, token_verification
from specnb.trees import Scheme, draft_trees, prefix_of

"""From the tokens emitted so far to the float64 distribution `(vocab,)` of the next one."""

Emissions = dict[tuple[int, ...], float]
"""The probability of each sequence that one step can emit, of length 1 to gamma + 1."""

MIN_CELL_WIDTH = 1e-13  # edges closer than this are one: sums that should be equal differ in their last bits
CORNER_INSET = 2e-14  # how far inside a cell the rule is evaluated at both of its ends


def joint_distribution(probs: Conditional, length: int) -> Float64[Tensor, ...]:
    """The distribution `(vocab,) * length` of the next `length` tokens sampled one by one from `probs`.

    >>> joint_distribution(lambda prefix: torch.tensor([0.25, 0.75]).double(), length=2).tolist()
    [[0.0625, 0.1875], [0.1875, 0.5625]]
    """
    vocab = len(probs(()))
    joint = torch.empty((vocab,) * length, dtype=torch.float64)
    for tokens in product(range(vocab), repeat=length):
        joint[tokens] = _probability_from(0, probs, tokens)
    return joint


def step_distribution(
    rule: Rule, p: Conditional, q: Conditional, gamma: int, sampled: Conditional | None = None, lenience: float = 1.0
) -> Emissions:
    """The probability of each sequence that one step of `rule` emits (Algorithm 1 with `token_verification`).

    p and q are the target's and the drafter's distributions given the tokens of this step so far. `sampled` is the
    distribution that the draft tokens really come from, if a drafter reports another one (q). A rule that multiplies q
    by a `lenience` needs it here too, because the cells then have additional edges.

    Raises `ValueError` if the rule's answer changes inside a cell: then it uses a uniform for something other than a
    comparison with p/q, with p/(M q), or with a cumulative distribution. Each cell is evaluated at its centre and just
    inside its first and last corner, so that no overlap with a neighbouring cell is too small to be found.

    >>> from specnb.rules import token_verification
    >>> p = lambda prefix: torch.tensor([0.5, 0.5]).double()
    >>> q = lambda prefix: torch.tensor([0.0, 1.0]).double()
    >>> step_distribution(token_verification, p, q, gamma=1)
    {(0,): 0.5, (1, 0): 0.25, (1, 1): 0.25}
    """
    vocab = len(p(()))
    emitted: Emissions = {}
    for draft_tokens in product(range(vocab), repeat=gamma):
        probability = _probability_from(0, sampled or q, draft_tokens)
        if probability == 0:
            continue
        prefixes = [draft_tokens[:i] for i in range(gamma + 1)]
        p_along = torch.stack([p(prefix) for prefix in prefixes])
        q_along = torch.stack([q(prefix) for prefix in prefixes[:-1]]) if gamma else p_along[:0]
        for tokens, volume in _outcome_volumes(rule, p_along, q_along, draft_tokens, lenience).items():
            emitted[tokens] = emitted.get(tokens, 0.0) + probability * volume
    return emitted


def completed(emitted: Emissions, p: Conditional, length: int) -> Float64[Tensor, ...]:
    """The joint distribution `(vocab,) * length` if the target continues whatever a step emitted.

    A step is exact if and only if this equals `joint_distribution(p, length)` for `length` = gamma + 1: then what it
    emits, however long, is distributed as the beginning of a sequence sampled from the target.

    >>> p = lambda prefix: torch.tensor([0.5, 0.5]).double()
    >>> completed({(0,): 0.5, (1, 0): 0.25, (1, 1): 0.25}, p, length=2).tolist()
    [[0.25, 0.25], [0.25, 0.25]]
    """
    vocab = len(p(()))
    joint = torch.zeros((vocab,) * length, dtype=torch.float64)
    for tokens, probability in emitted.items():
        for rest in product(range(vocab), repeat=length - len(tokens)):
            joint[tokens + rest] += probability * _probability_from(len(tokens), p, tokens + rest)
    return joint


def count_distribution(emitted: Emissions, gamma: int) -> Float64[Tensor, " counts"]:
    """The distribution `(gamma + 1,)` of the number of tokens that a step emits, 1 to gamma + 1.

    >>> count_distribution({(0,): 0.5, (1, 0): 0.25, (1, 1): 0.25}, gamma=1).tolist()
    [0.5, 0.5]
    """
    counts = torch.zeros(gamma + 1, dtype=torch.float64)
    for tokens, probability in emitted.items():
        counts[len(tokens) - 1] += probability
    return counts


def _probability_from(start: int, probs: Conditional, tokens: tuple[int, ...]) -> float:
    """The probability of `tokens[start:]` given `tokens[:start]`."""
    probability = 1.0
    for at in range(start, len(tokens)):
        probability *= float(probs(tokens[:at])[tokens[at]])
    return probability


def _outcome_volumes(
    rule: Rule,
    p: Float64[Tensor, "positions vocab"],
    q: Float64[Tensor, "positions-1 vocab"],
    draft_tokens: tuple[int, ...],
    lenience: float,
) -> Emissions:
    """The probability of each emitted sequence given the draft tokens: the total volume of its cells."""
    accept_edges = [_accept_edges(p[i], q[i], x, lenience) for i, x in enumerate(draft_tokens)]
    edges = [*accept_edges, _final_edges(p, q, lenience)]
    lows = torch.cartesian_prod(*[edge[:-1] for edge in edges]).reshape(-1, len(edges))
    widths = torch.cartesian_prod(*[edge.diff() for edge in edges]).reshape(-1, len(edges))
    accepted, token = _evaluate(rule, p, q, draft_tokens, lows + widths / 2)
    for corner in (lows + CORNER_INSET, lows + widths - CORNER_INSET):
        other = _evaluate(rule, p, q, draft_tokens, corner)
        if not (torch.equal(other.accepted, accepted) and torch.equal(other.token, token)):
            raise ValueError(
                f"{getattr(rule, '__name__', rule)} changes its answer inside a cell: it uses a uniform for more "
                "than one ratio test or one sample, so its distribution cannot be enumerated this way"
            )
    volumes = p.new_zeros(len(draft_tokens) + 1, p.shape[-1]).index_put(
        (accepted, token), widths.prod(-1), accumulate=True
    )
    return {(*draft_tokens[:n], x): float(volumes[n, x]) for n, x in volumes.nonzero().tolist()}


def _evaluate(
    rule: Rule,
    p: Float64[Tensor, "positions vocab"],
    q: Float64[Tensor, "positions-1 vocab"],
    draft_tokens: tuple[int, ...],
    uniforms: Float64[Tensor, "cells positions"],
) -> Outcome:
    """The rule's answer in every cell, as one batch."""
    cells = len(uniforms)
    return rule(
        p.expand(cells, *p.shape),
        q.expand(cells, *q.shape),
        torch.tensor(draft_tokens, dtype=torch.int64).expand(cells, len(draft_tokens)),
        uniforms[:, :-1],
        uniforms[:, -1],
    )


def _accept_edges(
    p: Float64[Tensor, " vocab"], q: Float64[Tensor, " vocab"], token: int, lenience: float
) -> Float64[Tensor, " edges"]:
    """Where the decision about one draft token may change: at a ratio test, or between samples from p."""
    ratio = p[token] / q[token]
    least = torch.where(p > 0, q / p, torch.inf).min()
    return _edges(torch.stack([ratio, ratio / lenience, ratio * least]), p.cumsum(0))


def _final_edges(
    p: Float64[Tensor, "positions vocab"], q: Float64[Tensor, "positions-1 vocab"], lenience: float
) -> Float64[Tensor, " edges"]:
    """Where the final token may change: the cumulative sums of every distribution that it can be sampled from."""
    residuals = torch.cat([residual(p[:-1], q), residual(p[:-1], lenience * q)])
    return _edges(p.cumsum(-1).flatten(), residuals.cumsum(-1).flatten())


def _edges(*points: Float64[Tensor, " _"]) -> Float64[Tensor, " edges"]:
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    inside = torch.cat(points).nan_to_num(0.0).clamp(0, 1)  # NaN: p and q are both zero, there is no ratio
    edges = torch.cat([ends, inside]).unique()
    edges = edges[torch.cat([torch.tensor([True]), edges.diff() > MIN_CELL_WIDTH])]
    return torch.cat([edges[edges < 1 - MIN_CELL_WIDTH], ends[1:]])


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


def _threshold_edges(points: Tensor) -> Tensor:
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
    edges = [
        *(_threshold_edges(threshold) for threshold in plan.accept),
        _threshold_edges(normalise(plan.recovered).cumsum(-1)),
    ]
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


GRID = 128
"""Points at which each uniform is tried first; tokens with a probability below 1 / GRID may be overlooked."""
HALVINGS = 42


class Draft(NamedTuple):
    """What a drafter proposes with some probability: `tokens` `(gamma,)` and their `q` `(gamma, vocab)`."""

    tokens: tuple[int, ...]
    q: Tensor
    probability: float


def drafts_of(drafter: Drafter, prefix: tuple[int, ...], gamma: int) -> list[Draft]:
    """Every proposal of `drafter` after `prefix`, with its probability; the probabilities sum to 1.

    `start` is called before each proposal. Raises `ValueError` if a draft token depends on the uniform of a later one,
    or if a cell is too narrow to be found (see `GRID`).

    >>> from specnb.drafting.ngram import UniformDrafter
    >>> [(draft.tokens, round(draft.probability, 3)) for draft in drafts_of(UniformDrafter(2), (0,), 1)]
    [((0,), 0.5), ((1,), 0.5)]
    """
    cells = torch.full((1, gamma), 0.5, dtype=torch.float64)
    volumes = torch.ones(1, dtype=torch.float64)
    for position in range(gamma):
        found = [_split(drafter, prefix, cell, position) for cell in cells]
        volumes = torch.cat([volume * widths for volume, (_, widths) in zip(volumes, found, strict=True)])
        cells = torch.cat([split for split, _ in found])
    tokens, q = _proposed(drafter, prefix, cells)
    return [
        Draft(tuple(one), own.double(), float(volume))
        for one, own, volume in zip(tokens.tolist(), q, volumes, strict=True)
    ]


def drafter_step_distribution(
    drafter: Drafter, p: Conditional, prefix: tuple[int, ...], gamma: int, rule: Rule = token_verification
) -> Emissions:
    """The probability of each sequence that one step with `drafter` emits after `prefix`.

    `p` is the target's distribution given the tokens of this step so far. To be compared with the target's by
    `specnb.enumeration.completed`.

    >>> from specnb.drafting.ngram import UniformDrafter
    >>> p = lambda tokens: torch.tensor([0.25, 0.75]).double()
    >>> made = drafter_step_distribution(UniformDrafter(2), p, (0,), gamma=1)
    >>> {tokens: round(chance, 4) for tokens, chance in sorted(made.items())}
    {(0, 0): 0.0625, (0, 1): 0.1875, (1,): 0.25, (1, 0): 0.125, (1, 1): 0.375}
    """
    emitted: Emissions = {}
    for draft in drafts_of(drafter, prefix, gamma):
        for tokens, volume in _emissions(draft, p, rule):
            emitted[tokens] = emitted.get(tokens, 0.0) + draft.probability * volume
    return emitted


def _emissions(draft: Draft, p: Conditional, rule: Rule) -> Iterator[tuple[tuple[int, ...], float]]:
    """What a step emits, given its draft. The rule sees missing draft tokens as the loop shows them: -1 with q = 0."""
    vocab, missing = draft.q.shape[1], sum(token < 0 for token in draft.tokens)
    proposed = len(draft.tokens) - missing
    if any(token < 0 for token in draft.tokens[:proposed]):
        raise ValueError(f"the draft tokens {draft.tokens} go on after a missing one")

    def with_missing(p: Tensor, q: Tensor, tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        after = p[:, -1:].expand(-1, missing, -1)
        return rule(
            torch.cat([p, after], dim=1),
            torch.nn.functional.pad(q, (0, 0, 0, missing)),
            torch.nn.functional.pad(tokens, (0, missing), value=-1),
            torch.nn.functional.pad(accept, (0, missing), value=0.5),
            final,
        )

    def sampled(before: tuple[int, ...]) -> Tensor:
        return torch.eye(vocab, dtype=torch.float64)[draft.tokens[len(before)]]

    made = step_distribution(
        with_missing, p, lambda before: draft.q[len(before)], proposed, sampled=sampled if proposed else None
    )
    yield from made.items()


def _split(drafter: Drafter, prefix: tuple[int, ...], cell: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """The cells `(n, gamma)` into which uniform number `position` divides `cell`, a point of each, and their widths."""
    points = (torch.arange(GRID, dtype=torch.float64) + 0.5) / GRID
    tokens = _tokens_at(drafter, prefix, cell, position, points)
    low, high = points[:-1][tokens.diff() != 0], points[1:][tokens.diff() != 0]
    left, right = tokens[:-1][tokens.diff() != 0], tokens[1:][tokens.diff() != 0]
    for _ in range(HALVINGS if len(low) else 0):
        middle = (low + high) / 2
        found = _tokens_at(drafter, prefix, cell, position, middle)
        if bool(((found != left) & (found != right)).any()):
            raise ValueError(f"a draft token has a probability below 1/{GRID}; choose distributions without such")
        low, high = middle.where(found == left, low), middle.where(found == right, high)
    edges = torch.cat([torch.zeros(1).double(), high, torch.ones(1).double()])
    cells = cell.repeat(len(edges) - 1, 1)
    cells[:, position] = (edges[1:] + edges[:-1]) / 2
    return cells, edges.diff()


def _tokens_at(drafter: Drafter, prefix: tuple[int, ...], cell: Tensor, position: int, points: Tensor) -> Tensor:
    """Draft token number `position` with its uniform at each of `points`."""
    uniforms = cell.repeat(len(points), 1)
    uniforms[:, position] = points
    tokens = _proposed(drafter, prefix, uniforms)[0]
    if bool((tokens[:, :position] != tokens[:1, :position]).any()):
        raise ValueError(f"draft tokens before number {position} depend on its uniform")
    return tokens[:, position]


def _proposed(drafter: Drafter, prefix: tuple[int, ...], uniforms: Tensor) -> tuple[Tensor, Tensor]:
    rows, gamma = uniforms.shape
    tokens = torch.tensor([[*prefix, *[0] * (gamma + 1)]]).repeat(rows, 1)
    context = Context(tokens, torch.full((rows,), len(prefix)))
    drafter.start(context)
    return drafter.propose(context, uniforms)
