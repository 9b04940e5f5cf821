"""Verification rules of other papers: some exact, some only as their paper has them and not as
their code does.

Four families, each below with its source and what of that was read: rules that look at all children
of a node at once, with SpecTr's k-sequential selection; SpecHub; greedy multi-path block
verification (GBV); and hierarchical speculative decoding (HSD). Notebook 08 enumerates all of them.
A rule of one's own is added in the same way: a plan, or a selection that `AtEachNode` applies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.distributions import normalise, one_hot
from specnb.rules import Plan, PlannedRule, acceptance_ratio, block_verification
from specnb.trees import TokenTree, chain, independent_children, top_children

# All children of a node at once, and SpecTr's k-sequential selection.
#
# Source: Sun et al., SpecTr, 2310.15141, from memory of its Algorithm 3 and as restated in 2602.16994,
# appendix B.3; the paper itself was not at hand.

Selection = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""From p `(..., vocab)` after a node, q `(..., k, vocab)` and the tokens `(..., k)` of its children
to the probability `(..., k)` that each is accepted if all before it are rejected, and what is
sampled from `(..., vocab)` if all are."""


@dataclass(frozen=True)
class AtEachNode:
    """The plan that applies `select` to the children of every node."""

    select: Selection

    def __call__(self, p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
        accept, after = torch.zeros_like(draft_tokens, dtype=p.dtype), p.clone()
        for parent in sorted(set(tree.parents)):
            nodes = [node for node, above in enumerate(tree.parents) if above == parent]
            chances, left = self.select(after[..., parent + 1, :], q[..., nodes, :], draft_tokens[..., nodes])
            accept[..., nodes], after[..., parent + 1, :] = chances.to(p.dtype), left.to(p.dtype)
        return Plan(accept, after)

    def __repr__(self) -> str:
        return getattr(self.select, "__name__", repr(self.select))


def k_sequential(p: Tensor, q: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """SpecTr's k-sequential selection for k independent samples from one q, none of them -1; exact.

    Each is accepted with probability min(1, p(x) / (rho q(x))), rho from `division_factor`. With
    beta = sum min(p / rho, q), all are rejected with probability (1 - beta)^k, and then the token
    is sampled from p - min(p / rho, q) (1 - (1 - beta)^k) / beta.
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
    """The rho in [1, k] `(...,)` with 1 - (1 - beta)^k = rho beta: the smallest for which
    `k_sequential` is exact.

    A smaller rho would serve some tokens more often than p has them. Found by bisection to the last
    bit. Without common support beta is 0 and rho 1.
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


# SpecHub's rule for pairs of draft tokens, and as its authors' code has it.
#
# Source: Sun et al., 2411.05289, from the comment above the verification in the authors' code
# (github.com/MasterGodzilla/Speculative_decoding_OT, EAGLE/eagle/model/utils.py), read at 7d592b7.

CERTAIN = 1e-3  # a target this close to one-hot counts as one-hot


def hub_children(q: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """SpecHub's pair: a sample from q, then the most probable token a; after a itself, one of the
    others.

    Nothing after a if q is one-hot. Raises `ValueError` for a third child.

    >>> hub_children(torch.tensor([0.5, 0.25, 0.25]), [torch.tensor(0)])
    tensor([0.0000, 0.5000, 0.5000])
    """
    if not earlier:
        return q
    if len(earlier) > 1:
        raise ValueError(f"SpecHub proposes 2 children; child {len(earlier) + 1} was asked for")
    hub = q.argmax(-1)
    is_hub = one_hot(hub, q.shape[-1], q.dtype)
    others = normalise(q * (1 - is_hub)).nan_to_num(0.0)
    return others.where((earlier[0] == hub).unsqueeze(-1), is_hub)


def spechub(p: Tensor, q: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """SpecHub's rule for the pairs of `hub_children`; exact for these.

    In (x, a), x is accepted with probability min(1, p(x) / q(x)); in (a, x), with min(1, (p(x) -
    q(x))+ / Q(a, x)). What is left of the pairs goes to the hub a, the pairs (a, x) first, as far
    as p(a) reaches. Raises `ValueError` unless there are two draft tokens.
    """
    if draft_tokens.shape[-1] != 2:
        raise ValueError(f"SpecHub verifies 2 draft tokens; it was given {draft_tokens.shape[-1]}")
    shared = q[..., 0, :]
    hub = shared.argmax(-1, keepdim=True)
    is_hub = one_hot(hub.squeeze(-1), p.shape[-1], p.dtype)
    first = shared * (1 - is_hub)  # Q(x, a)
    second = (shared.gather(-1, hub) * normalise(first)).nan_to_num(0.0)  # Q(a, x)
    from_first = torch.minimum(p, first)
    from_second = torch.minimum(p - from_first, second) * (1 - is_hub)
    left_second, left_first = (second - from_second).sum(-1), (first - from_first).sum(-1)
    alone = first.sum(-1) == 0  # q is one-hot: the hub is the only draft token
    at_hub = p.gather(-1, hub).squeeze(-1)
    hub_second = (at_hub / left_second).clamp_max(1).nan_to_num(1.0)
    hub_first = ((at_hub - left_second).clamp_min(0) / left_first).clamp_max(1).nan_to_num(1.0)
    hub_taken = torch.minimum(at_hub, left_first + left_second + alone)
    starts_with_hub = draft_tokens[..., 0] == hub.squeeze(-1)
    other = draft_tokens[..., 1].where(starts_with_hub, draft_tokens[..., 0])
    other_first = acceptance_ratio(from_first, first, other).nan_to_num(0.0).clamp_max(1)
    other_second = acceptance_ratio(from_second, second, other).nan_to_num(0.0).clamp_max(1)
    # In (a, x) the code tests x and then a; the plan lists a first, with the same probabilities of
    # both.
    hub_tested_first = torch.where(alone, at_hub, (1 - other_second) * hub_second)
    then_other = (other_second / (1 - hub_tested_first)).nan_to_num(1.0).clamp_max(1)
    accept = torch.stack(
        [
            torch.where(starts_with_hub, hub_tested_first, other_first),
            torch.where(starts_with_hub, then_other, hub_first),
        ],
        dim=-1,
    ).where(draft_tokens >= 0, 0.0)
    left = (p - from_first - from_second - hub_taken.unsqueeze(-1) * is_hub).clamp_min(0)
    return accept, left.where(left.sum(-1, keepdim=True) > 0, p)


spechub_tree = PlannedRule(AtEachNode(spechub), schemes=(hub_children, top_children))
"""`spechub` at every node, two children at each that has any."""


def with_shortcut(p: Tensor, q: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`spechub`, but the hub a is always accepted where p(a) > 1 - 1e-3.

    Not exact: there the hub is the only token ever emitted. The total variation is 1 - p(a), below
    1e-3.
    """
    accept, after = spechub(p, q, draft_tokens)
    hub = q[..., 0, :].argmax(-1, keepdim=True)
    only_hub = p.gather(-1, hub) > 1 - CERTAIN
    return torch.where(only_hub, (draft_tokens == hub).to(p.dtype), accept), after


spechub_code = PlannedRule(AtEachNode(with_shortcut), schemes=())


# Greedy multi-path block verification (GBV): of several independent chains, the one preferred by
# p/q is verified.
#
# The chosen chain is no sample of q. At one position, if L(x) is the q of all tokens that x is
# preferred to, the chosen token is x with probability s(x) = (L(x) + q(x))^k - L(x)^k. Verification
# of it with s in place of q is exact, provided that the order behind s is the order by which it was
# chosen.
#
# Source: Thomas and Pal, arXiv 2602.16961. Abstract, public reviews and the authors' function
# `gbv_verify`, in copies of it in other repositories, were read. One copy orders by min(1, p/q),
# which is not exact (`best_draft_code`).


@partial(PlannedRule, up=True, schemes=(independent_children,))
def best_path_block(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Choose one of k sampled chains by the order p/q, then verify it. Exact for k independent
    chains of one length.

    After each prefix the tokens are ordered by decreasing p/q, lower ids first among equals; of the
    k chains the first in the lexicographic order is chosen. If L and M are the q of all chains
    behind a prefix in that order and of those that begin with it, the chosen chain begins with it
    with probability (L + M)^k - L^k. Block verification then takes the conditional distributions
    that follow for q. No token may be -1. Raises `ValueError` for a tree that is not k separate
    chains of one length.
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
    """The nodes `(..., depth)` of the chosen chain, p `(..., depth + 1, vocab)`, its own q, and its
    tokens."""

    nodes: Tensor
    p: Tensor
    q: Tensor
    tokens: Tensor


def chosen_path(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> ChosenPath:
    """The chosen chain, with the distributions that its tokens have."""
    nodes = torch.tensor(paths(tree), device=p.device)  # (k, depth)
    k, depth = nodes.shape
    alive = torch.ones_like(draft_tokens[..., :k], dtype=torch.bool)
    # L and M.
    below, own = torch.zeros_like(p[..., 0, 0].double()), torch.ones_like(p[..., 0, 0].double())
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
    """GBV at one position with min(1, p/q) in place of p/q, as one copy of its code has it. Not
    exact.

    All tokens with p >= q are equal then. The first of them in the tree is chosen, and s takes them
    in the order of their ids. Smallest example: k = 2, p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2).
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


# Hierarchical speculative decoding (HSD): the rule of its paper, and two that its authors'
# repository has.
#
# Source: Zhou et al., arXiv 2601.05724, Definitions 4 to 6, equations (16) to (20) and Algorithm 2
# (capped), read in a text conversion of the whole paper that cites work of 2026, so probably
# version 2. Naive HSD (Algorithm 1) resamples with further forward passes, so it is no rule of one
# step and is not here. The code: github.com/ZhouYuxuanYX/Hierarchical-Speculative-Decoding, the
# file transformers/generation/utils.py at commit f3adf7f (at b8575e2, the newest commit read, it
# mixes tabs and spaces and is no valid Python), and algorithm.py at b8575e2, which uses names that
# it does not define, so it does not run as it is.
#
# All are plans for chains. Here r_i = p(x_1..x_i)/q(x_1..x_i).


@partial(PlannedRule, up=True)
def hierarchical_verification(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """HSD as its paper has it (Algorithm 2), with the capped prefix ratio r*: the same rule as
    block verification.

    m is the position before t of the largest prefix ratio, 0 if none exceeds 1, and r*_t = r_t /
    max(1, r_m). Prefix t < gamma is accepted with probability D(p, q) / D(q, p), the sums over the
    next token of max(0, r* - 1) q and of max(0, 1 - r*) q; all gamma with min(1, r*_gamma). Since
    min(1, r*_t) = w_t, and D(q, p) - D(p, q) = 1 - w_t up to the factor q(x_1..x_t), the
    probabilities are those of block verification. The paper's Theorem 7 states that it accepts more
    for gamma > 1; its proof takes r_t / max(1, r_m) for larger than the least of the r_t / r_s, s
    <= t, and the two are equal.
    """
    ratios = _prefix_ratios(p, q, draft_tokens, tree)
    caps = _maxima(ratios)
    return _branching((ratios / caps)[..., None] * p, _padded(q), ratios[..., 1:] / caps[..., :-1], p)


@partial(PlannedRule, up=True)
def hierarchical_verification_code(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """HSD as its authors' code has it: as above, but all drafts are accepted with the uncapped
    min(1, r_gamma).

    Not exact: where some r_i > 1, sequences beginning with x_1..x_i are accepted too often.
    Smallest example: p = (1/3, 2/3), q = (2/3, 1/3) at every position and gamma = 2 give a total
    variation of 1/9.
    """
    ratios = _prefix_ratios(p, q, draft_tokens, tree)
    return _branching((ratios / _maxima(ratios))[..., None] * p, _padded(q), ratios[..., 1:], p)


@partial(PlannedRule, up=True)
def hierarchical_verification_file(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """HSD with p weighted by q(x_1..x_t) where the prefix ratio r_t is a new maximum, and by 1
    elsewhere. Not exact.

    Where r_t is no new maximum, p is not multiplied by the probability of the prefix and q is, so
    prefix t is always accepted. The full draft is accepted with the uncapped min(1, r_gamma).
    Smallest example: that of `hierarchical_verification_code`, with a total variation of 1/3.
    """
    ratios = _prefix_ratios(p, q, draft_tokens, tree)
    maxima = _maxima(ratios)
    is_new = torch.cat([torch.zeros_like(maxima[..., :1]), maxima.diff(dim=-1)], dim=-1) > 0
    chances = q.gather(-1, draft_tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    # q(x_1..x_t), t = 0..gamma.
    drafted = torch.cat([torch.ones_like(p[..., :1, 0]), chances.cumprod(-1)], dim=-1)
    weighted = drafted.where(is_new, 1.0)[..., None] * p
    return _branching(weighted, drafted[..., None] * _padded(q), ratios[..., 1:], p)


def _branching(mine: Tensor, theirs: Tensor, full: Tensor, p: Tensor) -> Plan:
    """Branch divergences between `mine` and `theirs`; `full` `(..., gamma)` is the ratio tested at
    the last draft."""
    forward, backward = (mine - theirs).clamp_min(0), (theirs - mine).clamp_min(0)
    inner = (forward.sum(-1) / backward.sum(-1)).nan_to_num(1.0).clamp_max(1)[..., 1:]
    last = theirs.sum(-1)[..., 1:] == 0
    after = forward.where(forward.sum(-1, keepdim=True) > 0, p)
    return Plan(torch.where(last, full.clamp_max(1), inner), after)


def _prefix_ratios(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Tensor:
    """r_0 = 1, r_1, ..., r_gamma `(..., gamma + 1)`: finite, so that they can be divided by each
    other."""
    if not tree.is_chain:
        raise ValueError(f"parents are {tree.parents}; hierarchical verification is for chains, (-1, 0, 1, ...)")
    index = draft_tokens.clamp_min(0).unsqueeze(-1)
    ratios = (p[..., :-1, :].gather(-1, index) / q.gather(-1, index)).squeeze(-1)
    ratios = ratios.where(draft_tokens >= 0, 0.0).nan_to_num(0.0)
    return torch.cat([torch.ones_like(p[..., :1, 0]), ratios.cumprod(-1).nan_to_num(0.0)], dim=-1)


def _maxima(ratios: Tensor) -> Tensor:
    return ratios.cummax(dim=-1).values.clamp_min(1)


def _padded(q: Tensor) -> Tensor:
    return torch.cat([q, q.new_zeros(*q.shape[:-2], 1, q.shape[-1])], dim=-2)
