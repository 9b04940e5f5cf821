"""Greedy multi-path block verification (GBV): of several independent chains, the one preferred by p/q is verified.

The chosen chain is no sample of q. At one position, if L(x) is the q of all tokens that x is preferred to, the chosen
token is x with probability s(x) = (L(x) + q(x))^k - L(x)^k. Verification of it with s in place of q is exact, provided
that the order behind s is the order by which it was chosen.

Source: Thomas and Pal, arXiv 2602.16961. Abstract, public reviews and the authors' function `gbv_verify`, in copies of
it in other repositories, were read. One copy orders by min(1, p/q), which is not exact (`best_draft_code`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.rules import Plan, PlannedRule, block_verification
from specnb.trees import TokenTree, chain, independent_children
from studies.rules.selection import AtEachNode


@partial(PlannedRule, up=True, schemes=(independent_children,))
def best_path_block(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Choose one of k sampled chains by the order p/q, then verify it. Exact for k independent chains of one length.

    After each prefix the tokens are ordered by decreasing p/q, lower ids first among equals; of the k chains the first
    in the lexicographic order is chosen. If L and M are the q of all chains behind a prefix in that order and of those
    that begin with it, the chosen chain begins with it with probability (L + M)^k - L^k. Block verification then takes
    the conditional distributions that follow for q. No token may be -1.
    Raises `ValueError` for a tree that is not k separate chains of one length.
    """
    chosen = chosen_path(p, q, draft_tokens, tree)
    vocab, depth = p.shape[-1], chosen.nodes.shape[-1]
    plan = block_verification.plan(*chosen[1:], TokenTree(chain(depth), p.device))
    entries = torch.cat([torch.zeros_like(chosen.nodes[..., :1]), chosen.nodes + 1], dim=-1)
    return Plan(
        torch.zeros_like(q[..., 0]).scatter(-1, chosen.nodes, plan.accept),
        p.scatter(-2, entries.unsqueeze(-1).expand(*entries.shape, vocab), plan.after),
    )


class ChosenPath(NamedTuple):
    """The nodes `(..., depth)` of the chosen chain, p `(..., depth + 1, vocab)`, its own q, and its tokens."""

    nodes: Tensor
    p: Tensor
    q: Tensor
    tokens: Tensor


def chosen_path(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> ChosenPath:
    """The chosen chain, with the distributions that its tokens have."""
    nodes = torch.tensor(paths(tree), device=p.device)  # (k, depth)
    k, depth = nodes.shape
    alive = torch.ones_like(draft_tokens[..., :k], dtype=torch.bool)
    below, own = torch.zeros_like(p[..., 0, 0].double()), torch.ones_like(p[..., 0, 0].double())  # L and M
    lead = alive.to(torch.int64).argmax(-1)
    p_rows, q_rows, tokens = [p[..., 0, :]], [], []
    for level in range(depth):
        here = nodes[:, level]
        q_here = _pick(q[..., here, :], lead)
        ratio = (p_rows[-1] / q_here).nan_to_num(-1.0, posinf=torch.inf)
        order = ratio.sort(dim=-1, descending=True, stable=True).indices
        rank = order.argsort(-1)
        ranks = rank.gather(-1, draft_tokens[..., here]).where(alive, rank.shape[-1])
        best = ranks.amin(-1, keepdim=True)
        alive = ranks == best
        lead = alive.to(torch.int64).argmax(-1)
        ordered = q_here.double().gather(-1, order)
        behind = (ordered.sum(-1, keepdim=True) - ordered.cumsum(-1)).clamp_min(0).gather(-1, rank)
        lower = below[..., None] + own[..., None] * behind
        each = own[..., None] * q_here
        skewed = q_here * _power_sum(lower + each, lower, k) / _power_sum(below + own, below, k)[..., None]
        token = _pick(draft_tokens[..., here, None], lead)
        below, own = (part.gather(-1, token)[..., 0] for part in (lower, each))
        q_rows.append(skewed.to(q.dtype))
        tokens.append(token[..., 0])
        p_rows.append(_pick(p[..., here + 1, :], lead))
    return ChosenPath(nodes[lead], torch.stack(p_rows, -2), torch.stack(q_rows, -2), torch.stack(tokens, -1))


def paths(tree: TokenTree) -> list[list[int]]:
    """The nodes of each chain of a tree that is k separate chains of one length from the root.

    >>> paths(TokenTree((-1, -1, 0, 1)))
    [[0, 2], [1, 3]]
    """
    ends = [node for node in range(len(tree.parents)) if node not in tree.parents]
    separate = not any(node >= 0 and tree.parents.count(node) > 1 for node in tree.parents)
    if not separate or {tree.node_depths[node] for node in ends} != {tree.depth}:
        raise ValueError(
            f"parents are {tree.parents}; this rule needs separate chains of one length, such as (-1, -1, 0, 1)"
        )
    return sorted([node for node in tree.paths[end + 1].tolist() if node >= 0] for end in ends)


def best_draft_code(p: Tensor, q: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """GBV at one position with min(1, p/q) in place of p/q, as one copy of its code has it. Not exact.

    All tokens with p >= q are equal then. The first of them in the tree is chosen, and s takes them in the order of
    their ids. Smallest example: k = 2, p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2).
    """
    shared, k = q[..., 0, :], draft_tokens.shape[-1]
    preference = (p / shared).nan_to_num(0.0).clamp_max(1)
    chosen = preference.gather(-1, draft_tokens).argmax(-1, keepdim=True)
    token = draft_tokens.gather(-1, chosen)
    order = preference.sort(dim=-1, stable=True).indices
    ordered = shared.gather(-1, order)
    below = torch.zeros_like(shared).scatter(-1, order, ordered.cumsum(-1) - ordered)
    skewed = (below + shared) ** k - below**k
    chance = (p.gather(-1, token) / skewed.gather(-1, token)).clamp_max(1)
    accept = torch.zeros_like(q[..., 0]).scatter(-1, chosen, chance)
    left = (p - skewed).clamp_min(0)
    return accept, left.where(left.sum(-1, keepdim=True) > 0, p)


best_draft_code_rule = PlannedRule(AtEachNode(best_draft_code), schemes=())


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """`rows` `(..., k, n)` at `index` `(...,)`."""
    return rows.take_along_dim(index[..., None, None], dim=-2)[..., 0, :]


def _power_sum(a: Tensor, b: Tensor, k: int) -> Tensor:
    """(a^k - b^k) / (a - b) without cancellation."""
    return torch.stack([a**j * b ** (k - 1 - j) for j in range(k)]).sum(0)
