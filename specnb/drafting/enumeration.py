"""Exact enumeration of a drafter: the function that the decoding loop calls, on every cell of its uniforms.

A drafter's proposal is piecewise constant in its uniforms. The edges are found by bisection of the uniforms themselves,
so nothing is assumed about what the drafter reports, and a q that is not what was sampled from shows in the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.drafting.base import Context, Drafter
from specnb.sampling.enumeration import Conditional, Emissions, step_distribution
from specnb.sampling.verification import Outcome, Rule, token_verification

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

    >>> from specnb.drafting.uniform import UniformDrafter
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
    `specnb.sampling.enumeration.completed`.

    >>> from specnb.drafting.uniform import UniformDrafter
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
