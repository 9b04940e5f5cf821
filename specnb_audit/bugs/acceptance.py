"""Bugs of a step in how many draft tokens are accepted; what follows them is sampled as it should be, if not said."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specnb.distributions import sample
from specnb.rules import Outcome, token_verification
from specnb_audit.bugs.bug import Bug, registered
from specnb_audit.bugs.step import accepting_where, at_position, followed, leading, probability_of, ratios

ADDED = 0.05
EPSILON = 1e-3
CERTAIN = 0.2
DISCARDED = 0.05
TYPICAL, TYPICAL_OF_ENTROPY = 0.09, 0.3
ACCEPTANCE_BUGS: dict[str, Bug] = {}
"""These bugs by name."""
_rule = partial(registered, ACCEPTANCE_BUGS)


@_rule("1bit-MONSTER#637")
def relative_to_the_largest(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token is accepted with probability p(x) / max p."""
    accept_prob = probability_of(draft_tokens, p) / p[..., :-1, :].amax(dim=-1)
    return accepting_where(p, q, draft_tokens, accept < accept_prob, final)


@_rule("lattice#243")
def first_not_verified(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The first draft token of a step is always accepted."""
    accepting = accept < ratios(p, q, draft_tokens)
    accepting[..., 0] = True
    return accepting_where(p, q, draft_tokens, accepting, final)


@_rule("OpenVINO GenAI 2026.4", held_out=False)
def acceptance_without_p(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token x is accepted if a uniform is at most q(x)/p(y), y the target's most probable token."""
    ratio = probability_of(draft_tokens, q) / p[..., :-1, :].amax(dim=-1)
    accepted = leading(accept <= ratio, draft_tokens)
    return Outcome(accepted, sample(at_position(p, accepted), final))


@_rule("vLLM#35355 (an option)")
def threshold_added(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A constant is added to the acceptance probability."""
    return accepting_where(p, q, draft_tokens, accept < ratios(p, q, draft_tokens) + ADDED, final)


@_rule("-")
def epsilon_in_the_ratio(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """p is divided by q plus a constant against division by zero, which is not small beside most probabilities."""
    ratio = probability_of(draft_tokens, p) / (probability_of(draft_tokens, q) + EPSILON)
    return accepting_where(p, q, draft_tokens, accept < ratio, final)


@_rule("-")
def ratio_in_float8(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The acceptance probability is rounded to 8 bits, 3 of them after the leading one."""
    ratio = ratios(p, q, draft_tokens).clamp_max(1).to(torch.float8_e4m3fn).to(p.dtype)
    return accepting_where(p, q, draft_tokens, accept < ratio, final)


@_rule("-")
def cumulated_ratio(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Each draft token is tested with the product of p/q up to it, as in block verification, without its residual."""
    return accepting_where(p, q, draft_tokens, accept < ratios(p, q, draft_tokens).cumprod(dim=-1), final)


@_rule("-")
def argmax_accepted(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token that is the target's most probable token is accepted without a test."""
    accepting = (accept < ratios(p, q, draft_tokens)) | (draft_tokens == p[..., :-1, :].argmax(dim=-1))
    return accepting_where(p, q, draft_tokens, accepting, final)


@_rule("sglang#7702 (an option)")
def probable_accepted(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token whose p reaches a threshold is accepted without a test."""
    accepting = (accept < ratios(p, q, draft_tokens)) | (probability_of(draft_tokens, p) >= CERTAIN)
    return accepting_where(p, q, draft_tokens, accepting, final)


@_rule("Medusa, vLLM#5131 (an option)")
def typical_acceptance(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token is accepted where p exceeds a threshold that falls with the entropy; p itself follows."""
    entropy = torch.special.entr(p[..., :-1, :]).sum(dim=-1)
    threshold = (TYPICAL_OF_ENTROPY * torch.exp(-entropy)).clamp_max(TYPICAL)
    accepted = leading(probability_of(draft_tokens, p) > threshold, draft_tokens)
    return Outcome(accepted, sample(at_position(p, accepted), final))


@_rule("vLLM#2658 (in a metric)")
def all_accepted_counted(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """As many draft tokens are kept as passed their test, those after a rejected one included."""
    passed = (accept < ratios(p, q, draft_tokens)) & (draft_tokens >= 0)
    return followed(p, q, passed.sum(dim=-1), final)


@_rule("-")
def last_accepted_replaced(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The last accepted token is dropped, and a token is sampled from p in its place."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    kept = (accepted - 1).clamp_min(0)
    return Outcome(kept, torch.where(accepted > 0, sample(at_position(p, kept), final), token))


@_rule("ik_llama.cpp#1820")
def improbable_discarded(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The draft ends before the first draft token whose q is low, as if it had not been sampled."""
    proposed = leading(probability_of(draft_tokens, q) >= DISCARDED, draft_tokens)
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    return Outcome(
        torch.minimum(accepted, proposed),
        torch.where(accepted < proposed, token, sample(at_position(p, proposed), final)),
    )
