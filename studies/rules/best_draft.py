"""One of k independent draft tokens is chosen before it is verified: GBV at one position, and a copy of its code.

The chosen token is no sample of q. If L(x) is the q of all tokens that x is preferred to, it is x with probability
s(x) = (L(x) + q(x))^k - L(x)^k. Token verification of the chosen token with s in place of q is exact, provided that the
order behind s is the order by which the token was chosen. `specnb.rules` has the rule for longer paths.

Source: Thomas and Pal, arXiv 2602.16961, see `specnb.rules`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.multi_draft import SelectionOutcome, SelectionPlan, first_accepted


def best_draft(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> SelectionOutcome:
    """GBV at one position: of k independent samples from one q, verify the one with the largest p/q; exact.

    Equals `traversal.best_path_block` for k chains of one token, up to the order of tokens with equal p/q.
    """
    return first_accepted(best_draft_plan(p, q, draft_tokens), draft_tokens, accept_uniforms, final_uniform)


def best_draft_code(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> SelectionOutcome:
    """The same with min(1, p/q) in place of p/q, as one copy of GBV's code has it. Not exact.

    All tokens with p >= q are equal then. The first of them in the tree is chosen, and s takes them in the order of
    their ids. Smallest example: k = 2, p = (1/2, 1/2, 0), q = (1/4, 1/4, 1/2).
    """
    return first_accepted(best_draft_code_plan(p, q, draft_tokens), draft_tokens, accept_uniforms, final_uniform)


def best_draft_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> SelectionPlan:
    """The plan of `best_draft`; a draft token that is not chosen is accepted with probability 0."""
    ratio = (p / q[..., 0, :]).nan_to_num(0.0, posinf=torch.inf)
    rank = ratio.sort(dim=-1, stable=True).indices.argsort(-1)  # a strict order: later ids preferred among equals
    return _plan(p, q, draft_tokens, rank)


def best_draft_code_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> SelectionPlan:
    """The plan of `best_draft_code`."""
    return _plan(p, q, draft_tokens, (p / q[..., 0, :]).nan_to_num(0.0).clamp_max(1))


def _plan(p: Tensor, q: Tensor, draft_tokens: Tensor, preference: Tensor) -> SelectionPlan:
    """Chooses the draft token with the largest `preference` `(..., vocab)`, the first among equals."""
    chosen = preference.gather(-1, draft_tokens).argmax(-1, keepdim=True)
    skewed = _distribution_of_the_best(q[..., 0, :], preference, draft_tokens.shape[-1])
    token = draft_tokens.gather(-1, chosen)
    chance = (p.gather(-1, token) / skewed.gather(-1, token)).clamp_max(1)
    accept = torch.zeros_like(q[..., 0]).scatter(-1, chosen, chance)
    left = (p - skewed).clamp_min(0)
    return SelectionPlan(accept, left.where(left.sum(-1, keepdim=True) > 0, p))


def _distribution_of_the_best(q: Tensor, preference: Tensor, k: int) -> Tensor:
    """s `(..., vocab)`: how the best of k samples from q is distributed, later ids preferred among equals."""
    order = preference.sort(dim=-1, stable=True).indices
    ordered = q.gather(-1, order)
    below = torch.zeros_like(q).scatter(-1, order, ordered.cumsum(-1) - ordered)
    return (below + q) ** k - below**k
