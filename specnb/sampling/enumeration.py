"""Exact enumeration: the joint distribution that a rule gives to everything a step emits, without sampling.

The function that the decoding loop calls is evaluated in float64 on every sequence of draft tokens and on every cell
of the uniforms within which its answer is constant; the volumes of the cells are the probabilities. The distributions
may depend on the tokens before them, because that is where implementations go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from jaxtyping import Float64
from torch import Tensor

from specnb.sampling.distributions import residual
from specnb.sampling.verification import Outcome, Rule

Conditional = Callable[[tuple[int, ...]], Tensor]
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

    >>> from specnb.sampling.verification import token_verification
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
