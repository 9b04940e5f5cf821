"""Tree rules that weigh whole paths: from the leaves up (traversal verification), and one path chosen of several.

Both are block verification (`specnb.sampling.block_verification`) on a chain.

Sources
- Traversal verification: Weng et al., "Traversal Verification for Speculative Tree Decoding", arXiv 2505.12398. Its
  abstract was read. The recursion below is derived from block verification and proved here by enumeration; it is not
  a transcription of the paper's algorithm.
- Greedy multi-path block verification (GBV): Thomas and Pal, arXiv 2602.16961. Abstract, public reviews and the
  authors' function `gbv_verify`, in copies of it in other repositories, were read: choose one of several sampled paths
  by the largest p/q at each node, then apply block verification with the distribution that the chosen path has. One
  copy orders by min(1, p/q), which is not exact (`specnb.sampling.best_draft`); the rule below is that of the other.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from specnb.sampling.block_verification import ChainPlan, block_plan, longest_accepted
from specnb.sampling.distributions import sample
from specnb.sampling.tree_selection import children_of, path_to
from specnb.sampling.tree_verification import TreeOutcome, TreePlan, TreeRule


def _traversal(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    parents: tuple[int, ...],
    accept_uniforms: Tensor,
    final_uniform: Tensor,
) -> TreeOutcome:
    plan = traversal_thresholds(p, q, draft_tokens, parents)
    order = list(leaves_first(parents))
    node = torch.full_like(final_uniform, -1, dtype=torch.int64)
    target = plan.recovered[..., 0, :]
    for i in reversed(order):  # the first that passes is assigned last
        passed = accept_uniforms[..., i] < plan.accept[..., i]
        node = torch.where(passed, i, node)
        target = plan.recovered[..., i + 1, :].where(passed[..., None], target)
    return path_to(node, parents, sample(target, final_uniform))


traversal_verification = TreeRule(_traversal)
"""Test the nodes from the leaves up, subtree after subtree; the first that passes is accepted with all its ancestors.

Each node has a weight w, 1 for the root, and r, to begin with p after it. Its children x, in their order, begin with
the weight min(1, w r(x) / q(x)). When the whole subtree of x has been rejected, with m = sum max(0, w r - q) the node
goes on with r = norm(max(0, w r - q)) and w = m / (m + 1 - w). When no child is left, the node itself is accepted with
probability w, and then the last token is sampled from r. Exact if each q is the distribution of that node's token given
the tokens of all nodes before it. On a chain it is block verification, at depth 1 recursive rejection.
"""


def traversal_thresholds(p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> TreePlan:
    """The plan of `traversal_verification`; `recovered` `(..., nodes + 1, vocab)` belong to the root and each node."""
    children = children_of(parents)
    accept: list[Tensor] = [torch.empty(0)] * len(parents)
    recovered: list[Tensor] = [torch.empty(0)] * (len(parents) + 1)

    def visit(node: int, weight: Tensor) -> None:
        left = p[..., node + 1, :]
        for child in children.get(node, []):
            own, token = q[..., child, :], draft_tokens[..., child]
            index = token.clamp_min(0)[..., None]
            ratio = (left.gather(-1, index) / own.gather(-1, index))[..., 0].nan_to_num(0.0)
            visit(child, (weight * ratio).nan_to_num(0.0).clamp_max(1).where(token >= 0, 0.0))
            mass = _remaining(weight, left, own).where((token >= 0)[..., None], 0.0)
            kept = mass.sum(-1)
            after = (kept / (kept + 1 - weight)).nan_to_num(1.0)  # 0/0: the child is accepted with certainty
            weight = after.where(token >= 0, weight)
            left = (mass / kept[..., None]).where((kept > 0)[..., None], left)  # or nothing is ever sampled from it
        recovered[node + 1] = left
        if node >= 0:
            accept[node] = weight

    visit(-1, torch.ones_like(p[..., 0, 0]))
    return TreePlan(torch.stack(accept, dim=-1) if accept else q[..., 0], torch.stack(recovered, dim=-2))


def _remaining(weight: Tensor, left: Tensor, own: Tensor) -> Tensor:
    """max(0, w r - q) `(..., vocab)`: what a rejected child leaves of its parent."""
    return (weight[..., None] * left - own).clamp_min(0)


@lru_cache
def leaves_first(parents: tuple[int, ...]) -> tuple[int, ...]:
    """All nodes, every subtree before its node, earlier siblings first.

    >>> leaves_first((-1, -1, 0, 0, 1))
    (2, 3, 0, 4, 1)
    """
    children = children_of(parents)

    def below(node: int) -> list[int]:
        return [found for child in children.get(node, []) for found in (*below(child), child)]

    return tuple(below(-1))


def _best_path(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    parents: tuple[int, ...],
    accept_uniforms: Tensor,
    final_uniform: Tensor,
) -> TreeOutcome:
    plan, nodes = chosen_path(p, q, draft_tokens, parents)
    accepted, token = longest_accepted(plan, accept_uniforms[..., : plan.accept.shape[-1]], final_uniform)
    last = torch.cat([torch.full_like(nodes[..., :1], -1), nodes], dim=-1).gather(-1, accepted[..., None])[..., 0]
    return path_to(last, parents, token)


best_path_block = TreeRule(_best_path)
"""Greedy multi-path block verification (GBV) with the order p/q: choose one of k sampled chains, then verify it.

After each prefix the tokens are ordered by decreasing p/q, lower ids first among equals; of the k chains the first in
the lexicographic order is chosen. If L and M are the q of all chains behind a prefix in that order and of those that
begin with it, the chosen chain begins with it with probability (L + M)^k - L^k. Block verification then takes the
conditional distributions that follow for q. Exact for k independent chains of one length (`paths`), no token -1.
"""


def paths(parents: tuple[int, ...]) -> list[list[int]]:
    """The nodes of each chain of a tree that is k separate chains of one length from the root.

    Raises `ValueError` for any other tree.

    >>> paths((-1, -1, 0, 1))
    [[0, 2], [1, 3]]
    """
    children = children_of(parents)
    found = [[node] for node in children.get(-1, [])]
    for path in found:
        while path[-1] in children:
            path += children[path[-1]][:1]
    if sum(map(len, found)) != len(parents) or len(set(map(len, found))) > 1:
        raise ValueError(
            f"parents are {parents}; this rule needs separate chains of one length, such as (-1, -1, 0, 1)"
        )
    return found


def chosen_path(p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> tuple[ChainPlan, Tensor]:
    """The plan of block verification for the chosen chain, and its nodes `(..., depth)`."""
    nodes = torch.tensor(paths(parents), device=p.device)  # (k, depth)
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
    plan = block_plan(torch.stack(p_rows, dim=-2), torch.stack(q_rows, dim=-2), torch.stack(tokens, dim=-1))
    return plan, nodes[lead]


def best_path_thresholds(p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> TreePlan:
    """The plan of `best_path_block`; uniforms after the first `depth` are not read."""
    plan, _ = chosen_path(p, q, draft_tokens, parents)
    unused = torch.zeros_like(q[..., plan.accept.shape[-1] :, 0])
    return TreePlan(torch.cat([plan.accept, unused], dim=-1), plan.recovered)


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """`rows` `(..., k, n)` at `index` `(...,)`."""
    return rows.take_along_dim(index[..., None, None], dim=-2)[..., 0, :]


def _power_sum(a: Tensor, b: Tensor, k: int) -> Tensor:
    """(a^k - b^k) / (a - b) without cancellation."""
    return torch.stack([a**j * b ** (k - 1 - j) for j in range(k)]).sum(0)
