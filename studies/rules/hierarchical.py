"""Hierarchical speculative decoding (HSD): the rule of its paper, and two that its authors' repository has.

Source: Zhou et al., arXiv 2601.05724, Definitions 4 to 6, equations (16) to (20) and Algorithm 2 (capped), read in a
text conversion of the whole paper that cites work of 2026, so probably version 2. Naive HSD (Algorithm 1) resamples
with further forward passes, so it is no rule of one step and is not here.
The code: github.com/ZhouYuxuanYX/Hierarchical-Speculative-Decoding, the file transformers/generation/utils.py at commit
f3adf7f (at b8575e2, the newest commit read, it mixes tabs and spaces and is no valid Python), and algorithm.py at
b8575e2, which uses names that it does not define, so it does not run as it is.

All are plans for chains. Here r_i = p(x_1..x_i)/q(x_1..x_i).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specnb.rules import Plan, PlannedRule
from specnb.trees import TokenTree


@partial(PlannedRule, up=True)
def hierarchical_verification(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """HSD as its paper has it (Algorithm 2), with the capped prefix ratio r*: the same rule as block verification.

    m is the position before t of the largest prefix ratio, 0 if none exceeds 1, and r*_t = r_t / max(1, r_m).
    Prefix t < gamma is accepted with probability D(p, q) / D(q, p), the sums over the next token of max(0, r* - 1) q
    and of max(0, 1 - r*) q; all gamma with min(1, r*_gamma). Since min(1, r*_t) = w_t, and D(q, p) - D(p, q) = 1 - w_t
    up to the factor q(x_1..x_t), the probabilities are those of block verification. The paper's Theorem 7 states that
    it accepts more for gamma > 1; its proof takes r_t / max(1, r_m) for larger than the least of the r_t / r_s, s <= t,
    and the two are equal.
    """
    ratios = _prefix_ratios(p, q, draft_tokens, tree)
    caps = _maxima(ratios)
    return _branching((ratios / caps)[..., None] * p, _padded(q), ratios[..., 1:] / caps[..., :-1], p)


@partial(PlannedRule, up=True)
def hierarchical_verification_code(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """HSD as its authors' code has it: as above, but all drafts are accepted with the uncapped min(1, r_gamma).

    Not exact: where some r_i > 1, sequences beginning with x_1..x_i are accepted too often. Smallest example:
    p = (1/3, 2/3), q = (2/3, 1/3) at every position and gamma = 2 give a total variation of 1/9.
    """
    ratios = _prefix_ratios(p, q, draft_tokens, tree)
    return _branching((ratios / _maxima(ratios))[..., None] * p, _padded(q), ratios[..., 1:], p)


@partial(PlannedRule, up=True)
def hierarchical_verification_file(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """HSD with p weighted by q(x_1..x_t) where the prefix ratio r_t is a new maximum, and by 1 elsewhere. Not exact.

    Where r_t is no new maximum, p is not multiplied by the probability of the prefix and q is, so prefix t is always
    accepted. The full draft is accepted with the uncapped min(1, r_gamma). Smallest example: that of
    `hierarchical_verification_code`, with a total variation of 1/3.
    """
    ratios = _prefix_ratios(p, q, draft_tokens, tree)
    maxima = _maxima(ratios)
    is_new = torch.cat([torch.zeros_like(maxima[..., :1]), maxima.diff(dim=-1)], dim=-1) > 0
    chances = q.gather(-1, draft_tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    drafted = torch.cat([torch.ones_like(p[..., :1, 0]), chances.cumprod(-1)], dim=-1)  # q(x_1..x_t), t = 0..gamma
    weighted = drafted.where(is_new, 1.0)[..., None] * p
    return _branching(weighted, drafted[..., None] * _padded(q), ratios[..., 1:], p)


def _branching(mine: Tensor, theirs: Tensor, full: Tensor, p: Tensor) -> Plan:
    """Branch divergences between `mine` and `theirs`; `full` `(..., gamma)` is the ratio tested at the last draft."""
    forward, backward = (mine - theirs).clamp_min(0), (theirs - mine).clamp_min(0)
    inner = (forward.sum(-1) / backward.sum(-1)).nan_to_num(1.0).clamp_max(1)[..., 1:]
    last = theirs.sum(-1)[..., 1:] == 0
    after = forward.where(forward.sum(-1, keepdim=True) > 0, p)
    return Plan(torch.where(last, full.clamp_max(1), inner), after)


def _prefix_ratios(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Tensor:
    """r_0 = 1, r_1, ..., r_gamma `(..., gamma + 1)`: finite, so that they can be divided by each other."""
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
