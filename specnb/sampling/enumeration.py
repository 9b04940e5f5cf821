"""Exact enumeration: the joint distribution that a rule gives to everything a step emits, without sampling.

The very function that the loop calls is evaluated in float64 on every draft and on every cell of the
uniforms in which its answer cannot change; the cells' volumes are the probabilities. The distributions may
depend on the tokens before them, since that is where implementations go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from specnb.sampling.distributions import residual
from specnb.sampling.verification import Outcome, Rule

Conditional = Callable[[tuple[int, ...]], Tensor]
"""From the tokens emitted so far to the float64 distribution `(vocab,)` of the next one."""

Emissions = dict[tuple[int, ...], float]
"""The probability of each sequence that one step can emit, of length 1 to gamma + 1."""

MIN_CELL_WIDTH = 1e-13  # edges closer than this are one: sums that should be equal differ in their last bits
CORNER_INSET = 2e-14  # how far inside a cell the rule is asked at both of its ends


def joint_distribution(probs: Conditional, length: int) -> Tensor:
    """The distribution `(vocab,) * length` of the next `length` tokens drawn one by one from `distribution`."""
    vocab = len(probs(()))
    joint = torch.empty((vocab,) * length, dtype=torch.float64)
    for tokens in product(range(vocab), repeat=length):
        joint[tokens] = _chain(probs, tokens, 0)
    return joint


def step_distribution(
    rule: Rule, p: Conditional, q: Conditional, gamma: int, sampled: Conditional | None = None, lenience: float = 1.0
) -> Emissions:
    """The distribution of everything that one step of `rule` emits (Algorithm 1 with `token_verification`).

    p and q are the target's and the drafter's distributions given the tokens of this step so far. `drawn` is
    where the drafts really come from, if a drafter breaks its contract and reports another distribution q.
    A rule that reads `lenience` times q, in its test or in its residual, needs cells that end there too.

    Raises `ValueError` if the rule's answer changes inside a cell of uniforms: then it reads a uniform
    for something other than comparing it with p/q, with p/(M q), or with a cumulated distribution. Each cell is
    asked in its middle and, so that no leak is too small, just inside its first and its last corner.
    """
    vocab = len(p(()))
    emitted: Emissions = {}
    for draft_tokens in product(range(vocab), repeat=gamma):
        chance = _chain(sampled or q, draft_tokens, 0)
        if chance == 0:
            continue
        prefixes = [draft_tokens[:i] for i in range(gamma + 1)]
        p_distributions = torch.stack([p(prefix) for prefix in prefixes])
        q_distributions = torch.stack([q(prefix) for prefix in prefixes[:-1]]) if gamma else p_distributions[:0]
        for tokens, volume in _outcomes(rule, p_distributions, q_distributions, draft_tokens, lenience).items():
            emitted[tokens] = emitted.get(tokens, 0.0) + chance * volume
    return emitted


def completed(emitted: Emissions, p: Conditional, length: int) -> Tensor:
    """The joint distribution `(vocab,) * length` if the target continues whatever a step emitted.

    A step is exact if and only if this equals `joint_law(p, length)` for `length` = gamma + 1: then
    what it emits, however much that is, is always a true beginning of a text of the target.
    """
    vocab = len(p(()))
    joint = torch.zeros((vocab,) * length, dtype=torch.float64)
    for tokens, chance in emitted.items():
        for rest in product(range(vocab), repeat=length - len(tokens)):
            joint[tokens + rest] += chance * _chain(p, tokens + rest, len(tokens))
    return joint


def count_distribution(emitted: Emissions, gamma: int) -> Tensor:
    """The distribution `(gamma + 1,)` of the number of tokens a step emits, 1 to gamma + 1."""
    counts = torch.zeros(gamma + 1, dtype=torch.float64)
    for tokens, chance in emitted.items():
        counts[len(tokens) - 1] += chance
    return counts


def _chain(probs: Conditional, tokens: tuple[int, ...], start: int) -> float:
    chance = 1.0
    for at in range(start, len(tokens)):
        chance *= float(probs(tokens[:at])[tokens[at]])
    return chance


def _outcomes(rule: Rule, p: Tensor, q: Tensor, draft_tokens: tuple[int, ...], lenience: float) -> Emissions:
    """The distribution of the emitted tokens given the drafts: the rule's answers weighted by cell volume."""
    accept_edges = [_accept_edges(p[i], q[i], x, lenience) for i, x in enumerate(draft_tokens)]
    edges = [*accept_edges, _final_edges(p, q, lenience)]
    lows = torch.cartesian_prod(*[edge[:-1] for edge in edges]).reshape(-1, len(edges))
    widths = torch.cartesian_prod(*[edge.diff() for edge in edges]).reshape(-1, len(edges))
    accepted, token = _ask(rule, p, q, draft_tokens, lows + widths / 2)
    for corner in (lows + CORNER_INSET, lows + widths - CORNER_INSET):
        other = _ask(rule, p, q, draft_tokens, corner)
        if not (torch.equal(other.accepted, accepted) and torch.equal(other.token, token)):
            raise ValueError(
                f"{getattr(rule, '__name__', rule)} changes its answer inside a cell: it reads a uniform "
                "for more than one ratio test or one draw, so its distribution cannot be enumerated this way"
            )
    volumes = p.new_zeros(len(draft_tokens) + 1, p.shape[-1]).index_put(
        (accepted, token), widths.prod(-1), accumulate=True
    )
    return {(*draft_tokens[:n], x): float(volumes[n, x]) for n, x in volumes.nonzero().tolist()}


def _ask(rule: Rule, p: Tensor, q: Tensor, draft_tokens: tuple[int, ...], uniforms: Tensor) -> Outcome:
    cells = len(uniforms)
    return rule(
        p.expand(cells, *p.shape),
        q.expand(cells, *q.shape),
        torch.tensor(draft_tokens, dtype=torch.int64).expand(cells, len(draft_tokens)),
        uniforms[:, :-1],
        uniforms[:, -1],
    )


def _accept_edges(p: Tensor, q: Tensor, draft: int, lenience: float) -> Tensor:
    """Where a rule may change its mind about one draft: the ratio tests, or a draw from p."""
    ratio = p[draft] / q[draft]
    least = torch.where(p > 0, q / p, torch.inf).min()
    return _edges(torch.stack([ratio, ratio / lenience, ratio * least]), p.cumsum(0))


def _final_edges(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """Where the last draw may change: the steps of every distribution that it can be drawn from."""
    residuals = torch.cat([residual(p[:-1], q), residual(p[:-1], lenience * q)])
    return _edges(p.cumsum(-1).flatten(), residuals.cumsum(-1).flatten())


def _edges(*points: Tensor) -> Tensor:
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    inside = torch.cat(points).nan_to_num(0.0).clamp(0, 1)  # NaN: p and q are both zero, there is no ratio
    edges = torch.cat([ends, inside]).unique()
    edges = edges[torch.cat([torch.tensor([True]), edges.diff() > MIN_CELL_WIDTH])]
    return torch.cat([edges[edges < 1 - MIN_CELL_WIDTH], ends[1:]])
