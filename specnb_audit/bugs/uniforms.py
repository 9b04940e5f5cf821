"""Bugs of a step in its uniforms, and in how a uniform becomes a token."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specnb.distributions import residual, sample
from specnb.rules import Outcome, token_verification
from specnb_audit.bugs.bug import Bug
from specnb_audit.bugs.step import at_position, without_bonus

BITS = 8


def few_bits(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The uniform of the recovered or bonus token has few bits, so that improbable tokens are lost or too frequent."""
    return token_verification(p, q, draft_tokens, accept, (final * 2**BITS).floor() / 2**BITS)


def averaged(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Two workers average their uniforms to agree on one, so that it is not uniform."""
    return token_verification(p, q, draft_tokens, _mean_of_two(accept), _mean_of_two(final))


def cumulated_in_bfloat16(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The recovered or bonus token is found among cumulative sums that were rounded to bfloat16."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    probs = residual(at_position(p, accepted), at_position(without_bonus(q), accepted))
    cumulated = probs.cumsum(dim=-1).bfloat16().to(p.dtype)
    return Outcome(accepted, sample(cumulated.diff(dim=-1, prepend=torch.zeros_like(cumulated[..., :1])), final))


def bonus_reuses_a_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The uniform that accepted the last draft token also samples the bonus token."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    reused = torch.where(accepted == draft_tokens.shape[-1], accept[..., -1], final)
    return token_verification(p, q, draft_tokens, accept, reused)


def _mean_of_two(uniform: Tensor) -> Tensor:
    """A sample of the mean of two uniforms, which is triangular on [0, 1]: its inverse distribution function."""
    return torch.where(uniform < 0.5, (uniform / 2).sqrt(), 1 - ((1 - uniform) / 2).sqrt())


_held_out = partial(Bug, kind="step", held_out=True)
_BUGS = [
    _held_out("few-bits", f"the uniform of the token after the accepted ones has {BITS} bits", "-", rule=few_bits),
    _held_out("averaged-uniforms", "each uniform is the mean of two", "-", rule=averaged),
    _held_out("cumulated-in-bfloat16", "tokens are found among cumulative sums in bfloat16",
              "Megatron-LM#7182, lmdeploy#1239", rule=cumulated_in_bfloat16),
    _held_out("bonus-reuses-a-uniform", "the uniform that accepted the last draft token also samples the bonus token",
              "-", rule=bonus_reuses_a_uniform),
]  # fmt: skip

UNIFORM_BUGS = {bug.name: bug for bug in _BUGS}
"""These bugs by name."""
