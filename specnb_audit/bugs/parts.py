"""Parts of verification rules that rules with a bug share, so that each of them shows its own change alone.

A draft token of -1 stands for "no token proposed", as in `specnb.rules`: it is never accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.distributions import residual, sample
from specnb.rules import Outcome


def at_position(distributions: Tensor, position: Tensor) -> Tensor:
    """The distributions `(..., vocab)` of `distributions` `(..., positions, vocab)` at `position` `(...,)`."""
    return distributions.take_along_dim(position[..., None, None], dim=-2).squeeze(-2)


def probability_of(draft_tokens: Tensor, distributions: Tensor) -> Tensor:
    """The probability `(..., gamma)` of each draft token in `distributions` `(..., gamma or more, vocab)`."""
    gamma = draft_tokens.shape[-1]
    return distributions[..., :gamma, :].gather(-1, draft_tokens.clamp_min(0)[..., None])[..., 0]


def ratios(p: Tensor, q: Tensor, draft_tokens: Tensor) -> Tensor:
    """p/q `(..., gamma)` of each draft token; NaN, which no comparison accepts, where both are 0."""
    return probability_of(draft_tokens, p) / probability_of(draft_tokens, q)


def without_bonus(q: Tensor) -> Tensor:
    """q with a distribution of zeros at the position of the bonus token, `(..., gamma + 1, vocab)`."""
    return torch.cat([q, torch.zeros_like(q[..., :1, :])], dim=-2)


def leading(accepting: Tensor, draft_tokens: Tensor) -> Tensor:
    """The number `(...,)` of draft tokens before the first that `accepting` `(..., gamma)` does not mark."""
    return (accepting & (draft_tokens >= 0)).long().cumprod(dim=-1).sum(dim=-1)


def followed(p: Tensor, q: Tensor, accepted: Tensor, final: Tensor) -> Outcome:
    """After `accepted` `(...,)` draft tokens the correct recovered or bonus token."""
    return Outcome(accepted, sample(residual(at_position(p, accepted), at_position(without_bonus(q), accepted)), final))


def accepting_where(p: Tensor, q: Tensor, draft_tokens: Tensor, accepting: Tensor, final: Tensor) -> Outcome:
    """Accepts the leading draft tokens that `accepting` `(..., gamma)` marks; what follows them is correct."""
    return followed(p, q, leading(accepting, draft_tokens), final)
