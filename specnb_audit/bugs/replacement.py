"""Bugs of a step in the recovered or the bonus token, or in the uniform that samples it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specnb.distributions import residual, sample
from specnb.rules import Outcome, block_verification, token_verification
from specnb_audit.bugs.bug import Bug, registered
from specnb_audit.bugs.step import at_position, followed, without_bonus

TOLERANCE = 0.005
BITS = 8
REPLACEMENT_BUGS: dict[str, Bug] = {}
"""These bugs by name."""
_rule = partial(registered, REPLACEMENT_BUGS)


@_rule("xLLM#2175")
def residual_of_one_token(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The residual subtracts q at the rejected draft token alone."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    at_draft_token = q * torch.zeros_like(q).scatter(-1, draft_tokens.clamp_min(0)[..., None], 1.0)
    return followed(p, at_draft_token, accepted, final)


@_rule("openvino.genai#4190")
def replaced_from_the_next_position(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor
) -> Outcome:
    """After a rejection a token is sampled from the target's distribution after the rejected draft token."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    following = (accepted + 1).clamp_max(p.shape[-2] - 1)
    return Outcome(accepted, sample(at_position(p, following), final))


@_rule("-")
def residual_not_normalised(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """max(0, p - q) is inverted as if it summed to 1: uniforms beyond its mass give the last token."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    here, drafted = at_position(p, accepted), at_position(without_bonus(q), accepted)
    cumulated = (here - drafted).clamp_min(0).cumsum(dim=-1)
    beyond = final >= cumulated[..., -1]
    inverted = torch.searchsorted(cumulated, final[..., None].contiguous(), right=True)[..., 0]
    return Outcome(accepted, torch.where(beyond, here.shape[-1] - 1, inverted.clamp_max(here.shape[-1] - 1)))


@_rule("transformers#28508")
def softmax_of_the_residual(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After a rejection softmax(max(0, p - q)) is sampled, which is nearly uniform."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    difference = at_position(p, accepted) - at_position(without_bonus(q), accepted)
    wrong = sample(torch.softmax(difference.clamp_min(0), dim=-1), final)
    return Outcome(accepted, torch.where(accepted < draft_tokens.shape[-1], wrong, token))


@_rule("-")
def absolute_residual(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After a rejection |p - q| is sampled."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    difference = at_position(p, accepted) - at_position(without_bonus(q), accepted)
    return Outcome(accepted, sample(difference.abs(), final))


@_rule("-")
def residual_with_the_first_q(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The residual subtracts q of the step's first position, wherever the rejection is."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    return followed(p, q[..., :1, :].expand_as(q), accepted, final)


@_rule("-")
def small_differences_dropped(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The residual leaves out the tokens where p - q is below a tolerance for rounding, unless it would be empty."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    difference = (at_position(p, accepted) - at_position(without_bonus(q), accepted)).clamp_min(0)
    large = difference.where(difference >= TOLERANCE, 0.0)
    replaced = sample(large.where(large.sum(dim=-1, keepdim=True) > 0, difference), final)
    return Outcome(accepted, torch.where(accepted < draft_tokens.shape[-1], replaced, token))


@_rule("vllm-ascend#7807")
def block_with_the_residual_of_tokens(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor
) -> Outcome:
    """The acceptance of block verification with the residual of token verification."""
    return followed(p, q, block_verification(p, q, draft_tokens, accept, final).accepted, final)


@_rule("-")
def last_not_tested(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The last draft token counts as rejected without a test: a token of its residual is in its place."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    return followed(p, q, accepted.clamp_max(draft_tokens.shape[-1] - 1), final)


@_rule("-")
def bonus_from_draft(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After full acceptance the bonus token is sampled from the draft's last distribution."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    is_full = accepted == draft_tokens.shape[-1]
    return Outcome(accepted, torch.where(is_full, sample(q[..., -1, :], final), token))


@_rule("-")
def bonus_argmax(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After full acceptance the bonus token is the target's most probable token."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    return Outcome(accepted, torch.where(accepted == draft_tokens.shape[-1], p[..., -1, :].argmax(dim=-1), token))


@_rule("-")
def few_bits(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The uniform of the recovered or bonus token has few bits, so that improbable tokens are lost or too frequent."""
    return token_verification(p, q, draft_tokens, accept, (final * 2**BITS).floor() / 2**BITS)


@_rule("-")
def averaged_uniforms(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Two workers average their uniforms to agree on one, so that it is not uniform."""
    return token_verification(p, q, draft_tokens, _mean_of_two(accept), _mean_of_two(final))


@_rule("Megatron-LM#7182, lmdeploy#1239")
def cumulated_in_bfloat16(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The recovered or bonus token is found among cumulative sums that were rounded to bfloat16."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    probs = residual(at_position(p, accepted), at_position(without_bonus(q), accepted))
    cumulated = probs.cumsum(dim=-1).bfloat16().to(p.dtype)
    return Outcome(accepted, sample(cumulated.diff(dim=-1, prepend=torch.zeros_like(cumulated[..., :1])), final))


@_rule("-")
def bonus_reuses_a_uniform(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The uniform that accepted the last draft token also samples the bonus token."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    reused = torch.where(accepted == draft_tokens.shape[-1], accept[..., -1], final)
    return token_verification(p, q, draft_tokens, accept, reused)


def _mean_of_two(uniform: Tensor) -> Tensor:
    """A sample of the mean of two uniforms, which is triangular on [0, 1]: its inverse distribution function."""
    return torch.where(uniform < 0.5, (uniform / 2).sqrt(), 1 - ((1 - uniform) / 2).sqrt())
