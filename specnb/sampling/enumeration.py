"""Exact enumeration: the joint law that a rule gives to everything a step emits, without sampling.

The very function that the loop calls is evaluated in float64 on every draft and on every cell of the
uniforms in which its answer cannot change; the cells' volumes are the probabilities. The laws may
depend on the tokens before them, since that is where implementations go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from specnb.law import residual
from specnb.verify import Outcome, Rule

Laws = Callable[[tuple[int, ...]], Tensor]
"""From the tokens emitted so far to the float64 law `(vocab,)` of the next one."""

Emissions = dict[tuple[int, ...], float]
"""The probability of each sequence that one step can emit, of length 1 to gamma + 1."""

THIN = 1e-13  # edges closer than this are one: sums that should be equal differ in their last bits
INSET = 2e-14  # how far inside a cell the rule is asked at both of its ends


def joint_law(law: Laws, length: int) -> Tensor:
    """The law `(vocab,) * length` of the next `length` tokens drawn one by one from `law`."""
    vocab = len(law(()))
    joint = torch.empty((vocab,) * length, dtype=torch.float64)
    for tokens in product(range(vocab), repeat=length):
        joint[tokens] = _chain(law, tokens, 0)
    return joint


def step_law(rule: Rule, p: Laws, q: Laws, gamma: int, drawn: Laws | None = None, lenience: float = 1.0) -> Emissions:
    """The law of everything that one step of `rule` emits (Algorithm 1 with `token_verification`).

    p and q are the target's and the drafter's laws given the tokens of this step so far. `drawn` is
    where the drafts really come from, if a drafter breaks its contract and reports another law q.
    A rule that reads `lenience` times q, in its test or in its residual, needs cells that end there too.

    Raises `ValueError` if the rule's answer changes inside a cell of uniforms: then it reads a uniform
    for something other than comparing it with p/q, with p/(M q), or with a cumulated law. Each cell is
    asked in its middle and, so that no leak is too small, just inside its first and its last corner.
    """
    vocab = len(p(()))
    emitted: Emissions = {}
    for drafts in product(range(vocab), repeat=gamma):
        chance = _chain(drawn or q, drafts, 0)
        if chance == 0:
            continue
        prefixes = [drafts[:i] for i in range(gamma + 1)]
        p_laws = torch.stack([p(prefix) for prefix in prefixes])
        q_laws = torch.stack([q(prefix) for prefix in prefixes[:-1]]) if gamma else p_laws[:0]
        for tokens, volume in _outcomes(rule, p_laws, q_laws, drafts, lenience).items():
            emitted[tokens] = emitted.get(tokens, 0.0) + chance * volume
    return emitted


def completed(emitted: Emissions, p: Laws, length: int) -> Tensor:
    """The joint law `(vocab,) * length` if the target continues whatever a step emitted.

    A step is exact if and only if this equals `joint_law(p, length)` for `length` = gamma + 1: then
    what it emits, however much that is, is always a true beginning of a text of the target.
    """
    vocab = len(p(()))
    joint = torch.zeros((vocab,) * length, dtype=torch.float64)
    for tokens, chance in emitted.items():
        for rest in product(range(vocab), repeat=length - len(tokens)):
            joint[tokens + rest] += chance * _chain(p, tokens + rest, len(tokens))
    return joint


def count_law(emitted: Emissions, gamma: int) -> Tensor:
    """The law `(gamma + 1,)` of the number of tokens a step emits, 1 to gamma + 1."""
    counts = torch.zeros(gamma + 1, dtype=torch.float64)
    for tokens, chance in emitted.items():
        counts[len(tokens) - 1] += chance
    return counts


def _chain(law: Laws, tokens: tuple[int, ...], start: int) -> float:
    chance = 1.0
    for at in range(start, len(tokens)):
        chance *= float(law(tokens[:at])[tokens[at]])
    return chance


def _outcomes(rule: Rule, p: Tensor, q: Tensor, drafts: tuple[int, ...], lenience: float) -> Emissions:
    """The law of the emitted tokens given the drafts: the rule's answers weighted by cell volume."""
    accept_edges = [_accept_edges(p[i], q[i], x, lenience) for i, x in enumerate(drafts)]
    edges = [*accept_edges, _final_edges(p, q, lenience)]
    lows = torch.cartesian_prod(*[edge[:-1] for edge in edges]).reshape(-1, len(edges))
    widths = torch.cartesian_prod(*[edge.diff() for edge in edges]).reshape(-1, len(edges))
    accepted, token = _ask(rule, p, q, drafts, lows + widths / 2)
    for corner in (lows + INSET, lows + widths - INSET):
        other = _ask(rule, p, q, drafts, corner)
        if not (torch.equal(other.accepted, accepted) and torch.equal(other.token, token)):
            raise ValueError(
                f"{getattr(rule, '__name__', rule)} changes its answer inside a cell: it reads a uniform "
                "for more than one ratio test or one draw, so its law cannot be enumerated this way"
            )
    volumes = p.new_zeros(len(drafts) + 1, p.shape[-1]).index_put((accepted, token), widths.prod(-1), accumulate=True)
    return {(*drafts[:n], x): float(volumes[n, x]) for n, x in volumes.nonzero().tolist()}


def _ask(rule: Rule, p: Tensor, q: Tensor, drafts: tuple[int, ...], uniforms: Tensor) -> Outcome:
    cells = len(uniforms)
    return rule(
        p.expand(cells, *p.shape),
        q.expand(cells, *q.shape),
        torch.tensor(drafts, dtype=torch.int64).expand(cells, len(drafts)),
        uniforms[:, :-1],
        uniforms[:, -1],
    )


def _accept_edges(p: Tensor, q: Tensor, draft: int, lenience: float) -> Tensor:
    """Where a rule may change its mind about one draft: the ratio tests, or a draw from p."""
    ratio = p[draft] / q[draft]
    least = torch.where(p > 0, q / p, torch.inf).min()
    return _edges(torch.stack([ratio, ratio / lenience, ratio * least]), p.cumsum(0))


def _final_edges(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """Where the last draw may change: the steps of every law that it can be drawn from."""
    residuals = torch.cat([residual(p[:-1], q), residual(p[:-1], lenience * q)])
    return _edges(p.cumsum(-1).flatten(), residuals.cumsum(-1).flatten())


def _edges(*points: Tensor) -> Tensor:
    ends = torch.tensor([0.0, 1.0], dtype=torch.float64)
    inside = torch.cat(points).nan_to_num(0.0).clamp(0, 1)  # NaN: p and q are both zero, there is no ratio
    edges = torch.cat([ends, inside]).unique()
    edges = edges[torch.cat([torch.tensor([True]), edges.diff() > THIN])]
    return torch.cat([edges[edges < 1 - THIN], ends[1:]])
