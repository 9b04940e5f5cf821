"""Hierarchical verification as the file algorithm.py of its authors' repository has it; see `block_verification`.

Source: github.com/ZhouYuxuanYX/Hierarchical-Speculative-Decoding, algorithm.py at commit b8575e2, read. It uses names
that it does not define, so it does not run as it is; the code that does is `hierarchical_verification_code`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.rules import ChainPlan, Outcome, _or_target, _padded, _prefix_ratios, longest_accepted


def hierarchical_verification_file(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> Outcome:
    """HSD with p weighted by q(x_1..x_t) where the prefix ratio r_t is a new maximum, and by 1 elsewhere. Not exact.

    Where r_t is no new maximum, p is not multiplied by the probability of the prefix and q is, so prefix t is always
    accepted. The full draft is accepted with the uncapped min(1, r_gamma). Smallest example: that of
    `hierarchical_verification_code`, with a total variation of 1/3.
    """
    return longest_accepted(hierarchical_file_plan(p, q, draft_tokens), accept_uniforms, final_uniform)


def hierarchical_file_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> ChainPlan:
    """The plan of `hierarchical_verification_file`."""
    prefix_ratios = _prefix_ratios(p, q, draft_tokens)
    maxima = prefix_ratios.cummax(dim=-1).values.clamp_min(1)
    is_new = torch.cat([torch.zeros_like(maxima[..., :1]), maxima.diff(dim=-1)], dim=-1) > 0
    chances = q.gather(-1, draft_tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    drafted = torch.cat([torch.ones_like(p[..., :1, 0]), chances.cumprod(-1)], dim=-1)  # q(x_1..x_t), t = 0..gamma
    following = drafted[..., None] * _padded(q)
    weighted = drafted.where(is_new, 1.0)[..., None] * p
    forward, backward = (weighted - following).clamp_min(0), (following - weighted).clamp_min(0)
    inner = (forward.sum(-1) / backward.sum(-1)).nan_to_num(1.0).clamp_max(1)[..., 1:]
    last = following.sum(-1)[..., 1:] == 0
    return ChainPlan(torch.where(last, prefix_ratios[..., 1:].clamp_max(1), inner), _or_target(forward, p))
