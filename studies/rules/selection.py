"""Rules that look at all children of a node at once, and SpecTr's k-sequential selection.

Source: Sun et al., SpecTr, 2310.15141, from memory of its Algorithm 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specnb.rules import Plan, PlannedRule, acceptance_ratio
from specnb.trees import TokenTree, independent_children

Selection = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From p `(..., vocab)` after a node, q `(..., k, vocab)` and the tokens `(..., k)` of its children to the probability
`(..., k)` that each is accepted if all before it are rejected, and what is sampled from `(..., vocab)` if all are."""


@dataclass(frozen=True)
class AtEachNode:
    """The plan that applies `select` to the children of every node."""

    select: Selection

    def __call__(self, p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
        accept, after = torch.zeros_like(draft_tokens, dtype=p.dtype), p.clone()
        for _, nodes, parent in tree.families:
            own = after[..., parent, :].squeeze(-2)
            chances, left = self.select(own, q[..., nodes, :], draft_tokens[..., nodes])
            accept[..., nodes], after[..., parent, :] = chances.to(p.dtype), left.unsqueeze(-2).to(p.dtype)
        return Plan(accept, after)

    def __repr__(self) -> str:
        return getattr(self.select, "__name__", repr(self.select))


def k_sequential(p: Tensor, q: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """SpecTr's k-sequential selection for k independent samples from one q, none of them -1; exact.

    Each is accepted with probability min(1, p(x) / (rho q(x))), rho from `division_factor`. With
    beta = sum min(p / rho, q), all are rejected with probability (1 - beta)^k, and then the token is sampled from
    p - min(p / rho, q) (1 - (1 - beta)^k) / beta.
    """
    k, shared = q.shape[-2], q[..., 0, :]
    rho = division_factor(p, shared, k).unsqueeze(-1)
    served = torch.minimum(p / rho, shared)
    beta = served.sum(-1, keepdim=True)
    share = (_at_least_one(beta, k) / beta).nan_to_num(0.0)
    accept = acceptance_ratio((p / rho).unsqueeze(-2).expand(q.shape), q, draft_tokens).nan_to_num(0.0).clamp_max(1)
    left = (p - served * share).clamp_min(0)
    return accept, left.where(left.sum(-1, keepdim=True) > 0, p)


def division_factor(p: Tensor, q: Tensor, k: int) -> Tensor:
    """The rho in [1, k] `(...,)` with 1 - (1 - beta)^k = rho beta: the smallest for which `k_sequential` is exact.

    A smaller rho would serve some tokens more often than p has them. Found by bisection to the last bit. Without
    common support beta is 0 and rho 1.
    """
    low, high = torch.ones_like(p[..., 0]), torch.full_like(p[..., 0], float(k))
    for _ in range(60):
        middle = (low + high) / 2
        beta = torch.minimum(p / middle.unsqueeze(-1), q).sum(-1)
        too_small = _at_least_one(beta, k) > middle * beta
        low, high = middle.where(too_small, low), high.where(too_small, middle)
    return high


k_sequential_tree = PlannedRule(AtEachNode(k_sequential), schemes=(independent_children,))
"""`k_sequential` at every node."""


def _at_least_one(beta: Tensor, k: int) -> Tensor:
    """1 - (1 - beta)^k, without cancellation for small beta."""
    return -torch.expm1(k * torch.log1p(-beta.clamp_max(1)))
