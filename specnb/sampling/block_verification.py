"""Block verification of one chain of draft tokens, and hierarchical verification: rules that weigh whole prefixes.

Each rule is a `Rule` (see `specnb.sampling.verification`) made of two parts. Its *plan* computes from p, q and the
draft tokens with which probability each prefix is accepted and from what the next token is sampled; the rule compares
the uniforms with the plan. `specnb.sampling.threshold_enumeration` reads the same plan to find the cells of uniforms
in which the rule is asked.

Sources
- Block verification: Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, Algorithm 2
  and equation (4). Here r_i = p(x_1..x_i)/q(x_1..x_i), w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)).
- Hierarchical speculative decoding (HSD): Zhou et al., arXiv 2601.05724: Definitions 4 to 6, equations (16) to (20) and
  Algorithm 2 (capped), read in a text conversion of the whole paper that cites work of 2026, so probably version 2.
  Naive HSD (Algorithm 1) resamples with further forward passes, so it is no rule of one step and is not here.
- HSD as its authors' code has it: github.com/ZhouYuxuanYX/Hierarchical-Speculative-Decoding, the file
  transformers/generation/utils.py at commit f3adf7f (at b8575e2, the newest commit read, it mixes tabs and spaces and
  is no valid Python). Its file algorithm.py differs: `specnb.sampling.hierarchical_file`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.sampling.distributions import sample
from specnb.sampling.verification import Outcome


class ChainPlan(NamedTuple):
    """What a rule does with one chain: its acceptance probabilities and the distributions of the added token.

    accept    (..., gamma)            that the first i draft tokens are accepted, if no longer prefix is; i = 1..gamma
    recovered (..., gamma + 1, vocab) what is sampled from after i accepted tokens, up to a factor; i = 0..gamma
    """

    accept: Tensor
    recovered: Tensor


Planner = Callable[[Tensor, Tensor, Tensor], ChainPlan]
"""From p `(..., gamma + 1, vocab)`, q `(..., gamma, vocab)` and draft tokens `(..., gamma)` to the plan."""


def block_verification(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> Outcome:
    """Accept the longest prefix that passes its own test (Sun et al., Algorithm 2); exact for any p and q.

    Prefix i is accepted with probability h_i = S_i / (S_i + 1 - w_i), S_i = sum max(0, w_i p - q) over the next
    token, and h_gamma = w_gamma. The next token comes from max(0, w_i p - q), after all drafts from p.
    No exact rule accepts more tokens in expectation (`specnb.sampling.optimal_acceptance.optimal_block`).

    >>> p, q = torch.tensor([[0.2, 0.8]] * 3), torch.tensor([[0.8, 0.2]] * 2)
    >>> block_verification(p, q, torch.tensor([0, 1]), torch.tensor([0.9, 0.9]), torch.tensor(0.5))
    Outcome(accepted=tensor(2), token=tensor(1))
    """
    return longest_accepted(block_plan(p, q, draft_tokens), accept_uniforms, final_uniform)


def hierarchical_verification(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> Outcome:
    """HSD as its paper has it (Algorithm 2), with the capped prefix ratio r*: the same rule as `block_verification`.

    m is the position before t of the largest prefix ratio, 0 if none exceeds 1, and r*_t = r_t / max(1, r_m).
    Prefix t < gamma is accepted with probability D(p, q) / D(q, p), the sums over the next token of max(0, r* - 1) q
    and of max(0, 1 - r*) q; all gamma with min(1, r*_gamma). Since min(1, r*_t) = w_t, and D(q, p) - D(p, q) = 1 - w_t
    up to the factor q(x_1..x_t), the probabilities are those of block verification. The paper's Theorem 7 states that
    it accepts more for gamma > 1; its proof takes r_t / max(1, r_m) for larger than the least of the r_t / r_s, s <= t,
    and the two are equal.
    """
    return longest_accepted(hierarchical_plan(p, q, draft_tokens), accept_uniforms, final_uniform)


def hierarchical_verification_code(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> Outcome:
    """HSD as its authors' code has it: as above, but all drafts are accepted with the uncapped min(1, r_gamma).

    Not exact: where some r_i > 1, sequences beginning with x_1..x_i are accepted too often. Smallest example:
    p = (1/3, 2/3), q = (2/3, 1/3) at every position and gamma = 2 give a total variation of 1/9.
    """
    return longest_accepted(hierarchical_code_plan(p, q, draft_tokens), accept_uniforms, final_uniform)


def block_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> ChainPlan:
    """The plan of `block_verification`."""
    ratios = _ratios(p, q, draft_tokens)
    weight = torch.ones_like(p[..., 0, 0])
    weights = [weight]
    for ratio in ratios.unbind(-1):
        weight = (weight * ratio).clamp_max(1)
        weights.append(weight)
    w = torch.stack(weights, dim=-1)
    excess = _excess(w, p, q)
    kept = excess.sum(-1)
    accept = (kept / (kept + 1 - w)).nan_to_num(1.0)  # 0/0: w = 1 and p = q next, so a longer prefix is accepted
    return ChainPlan(accept[..., 1:], _or_target(excess, p))


def hierarchical_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> ChainPlan:
    """The plan of `hierarchical_verification`; r* is written as its definitions have it, not as w."""
    prefix_ratios = _prefix_ratios(p, q, draft_tokens)
    caps = prefix_ratios.cummax(dim=-1).values.clamp_min(1)
    return _hierarchical(p, q, prefix_ratios, caps, prefix_ratios[..., 1:] / caps[..., :-1])


def hierarchical_code_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> ChainPlan:
    """The plan of `hierarchical_verification_code`."""
    prefix_ratios = _prefix_ratios(p, q, draft_tokens)
    caps = prefix_ratios.cummax(dim=-1).values.clamp_min(1)
    return _hierarchical(p, q, prefix_ratios, caps, prefix_ratios[..., 1:])


def longest_accepted(plan: ChainPlan, accept_uniforms: Tensor, final_uniform: Tensor) -> Outcome:
    """The longest prefix whose uniform lies below its acceptance probability, and the token after it.

    Every position is tested: stopping at the first failure would make the accepted prefixes too short.
    """
    passed = accept_uniforms < plan.accept
    lengths = torch.arange(1, passed.shape[-1] + 1, device=passed.device)
    accepted = torch.cat([torch.zeros_like(passed[..., :0].sum(-1, keepdim=True)), passed * lengths], -1).amax(-1)
    index = accepted[..., None, None].expand(*accepted.shape, 1, plan.recovered.shape[-1])
    return Outcome(accepted, sample(plan.recovered.gather(-2, index).squeeze(-2), final_uniform))


def _hierarchical(p: Tensor, q: Tensor, prefix_ratios: Tensor, caps: Tensor, full: Tensor) -> ChainPlan:
    """Branch divergences between the capped p and q; `full` `(..., gamma)` is the ratio tested at the last draft."""
    capped = (prefix_ratios / caps)[..., None] * p
    following = _padded(q)
    forward, backward = (capped - following).clamp_min(0), (following - capped).clamp_min(0)
    inner = (forward.sum(-1) / backward.sum(-1)).nan_to_num(1.0).clamp_max(1)[..., 1:]
    last = following.sum(-1)[..., 1:] == 0
    return ChainPlan(torch.where(last, full.clamp_max(1), inner), _or_target(forward, p))


def _ratios(p: Tensor, q: Tensor, draft_tokens: Tensor) -> Tensor:
    """p/q `(..., gamma)` of each draft token; 0 where none was proposed, so that nothing there is accepted.

    Finite where only q is 0, so that ratios of prefixes can be divided by each other.
    """
    index = draft_tokens.clamp_min(0).unsqueeze(-1)
    ratios = (p[..., :-1, :].gather(-1, index) / q.gather(-1, index)).squeeze(-1)
    return ratios.where(draft_tokens >= 0, 0.0).nan_to_num(0.0)


def _prefix_ratios(p: Tensor, q: Tensor, draft_tokens: Tensor) -> Tensor:
    """r_0 = 1, r_1, ..., r_gamma `(..., gamma + 1)`."""
    ratios = _ratios(p, q, draft_tokens)
    return torch.cat([torch.ones_like(p[..., :1, 0]), ratios.cumprod(-1).nan_to_num(0.0)], dim=-1)


def _excess(weights: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """max(0, w_i p - q) `(..., gamma + 1, vocab)`; q counts as zero after the last draft token."""
    return (weights[..., None] * p - _padded(q)).clamp_min(0)


def _padded(q: Tensor) -> Tensor:
    return torch.cat([q, q.new_zeros(*q.shape[:-2], 1, q.shape[-1])], dim=-2)


def _or_target(mass: Tensor, p: Tensor) -> Tensor:
    """`mass`, or p where it is zero: there nothing is ever sampled, up to rounding."""
    return mass.where(mass.sum(-1, keepdim=True) > 0, p)
