"""Bugs of a step in how many draft tokens are accepted; what follows them is sampled as it should be, if not said."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specnb.distributions import sample
from specnb.rules import Outcome, token_verification
from specnb_audit.bugs.bug import Bug
from specnb_audit.bugs.step import accepting_where, at_position, followed, leading, probability_of, ratios

ADDED = 0.05
EPSILON = 1e-3
CERTAIN = 0.2
DISCARDED = 0.05
TYPICAL, TYPICAL_OF_ENTROPY = 0.09, 0.3


def relative_to_the_largest(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token is accepted with probability p(x) / max p."""
    accept_prob = probability_of(draft_tokens, p) / p[..., :-1, :].amax(dim=-1)
    return accepting_where(p, q, draft_tokens, accept < accept_prob, final)


def first_not_verified(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The first draft token of a step is always accepted."""
    accepting = accept < ratios(p, q, draft_tokens)
    accepting[..., 0] = True
    return accepting_where(p, q, draft_tokens, accepting, final)


def acceptance_without_p(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token x is accepted if a uniform is at most q(x)/p(y), y the target's most probable token."""
    ratio = probability_of(draft_tokens, q) / p[..., :-1, :].amax(dim=-1)
    accepted = leading(accept <= ratio, draft_tokens)
    return Outcome(accepted, sample(at_position(p, accepted), final))


def threshold_added(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A constant is added to the acceptance probability."""
    return accepting_where(p, q, draft_tokens, accept < ratios(p, q, draft_tokens) + ADDED, final)


def epsilon_in_the_ratio(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """p is divided by q plus a constant against division by zero, which is not small beside most probabilities."""
    ratio = probability_of(draft_tokens, p) / (probability_of(draft_tokens, q) + EPSILON)
    return accepting_where(p, q, draft_tokens, accept < ratio, final)


def ratio_in_float8(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The acceptance probability is rounded to 8 bits, 3 of them after the leading one."""
    ratio = ratios(p, q, draft_tokens).clamp_max(1).to(torch.float8_e4m3fn).to(p.dtype)
    return accepting_where(p, q, draft_tokens, accept < ratio, final)


def cumulated_ratio(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """Each draft token is tested with the product of p/q up to it, as in block verification, without its residual."""
    return accepting_where(p, q, draft_tokens, accept < ratios(p, q, draft_tokens).cumprod(dim=-1), final)


def argmax_accepted(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token that is the target's most probable token is accepted without a test."""
    accepting = (accept < ratios(p, q, draft_tokens)) | (draft_tokens == p[..., :-1, :].argmax(dim=-1))
    return accepting_where(p, q, draft_tokens, accepting, final)


def probable_accepted(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token whose p reaches a threshold is accepted without a test."""
    accepting = (accept < ratios(p, q, draft_tokens)) | (probability_of(draft_tokens, p) >= CERTAIN)
    return accepting_where(p, q, draft_tokens, accepting, final)


def typical_acceptance(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token is accepted where p exceeds a threshold that falls with the entropy; p itself follows."""
    entropy = torch.special.entr(p[..., :-1, :]).sum(dim=-1)
    threshold = (TYPICAL_OF_ENTROPY * torch.exp(-entropy)).clamp_max(TYPICAL)
    accepted = leading(probability_of(draft_tokens, p) > threshold, draft_tokens)
    return Outcome(accepted, sample(at_position(p, accepted), final))


def all_accepted_counted(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """As many draft tokens are kept as passed their test, those after a rejected one included."""
    passed = (accept < ratios(p, q, draft_tokens)) & (draft_tokens >= 0)
    return followed(p, q, passed.sum(dim=-1), final)


def last_accepted_replaced(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The last accepted token is dropped, and a token is sampled from p in its place."""
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    kept = (accepted - 1).clamp_min(0)
    return Outcome(kept, torch.where(accepted > 0, sample(at_position(p, kept), final), token))


def improbable_discarded(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The draft ends before the first draft token whose q is low, as if it had not been sampled."""
    proposed = leading(probability_of(draft_tokens, q) >= DISCARDED, draft_tokens)
    accepted, token, _ = token_verification(p, q, draft_tokens, accept, final)
    return Outcome(
        torch.minimum(accepted, proposed),
        torch.where(accepted < proposed, token, sample(at_position(p, proposed), final)),
    )


_held_out = partial(Bug, kind="step", held_out=True)
_aimed_at = partial(Bug, kind="step")
_BUGS = [
    _held_out("relative-to-the-largest", "draft tokens are accepted with probability p(x) / max p", "1bit-MONSTER#637",
              rule=relative_to_the_largest),
    _held_out("first-not-verified", "the first draft token of a step is always accepted", "lattice#243",
              rule=first_not_verified),
    _aimed_at("acceptance-without-p", "acceptance never looks at p of the draft token", "OpenVINO GenAI 2026.4",
              rule=acceptance_without_p),
    _held_out("threshold-added", f"{ADDED} is added to every acceptance probability", "vLLM#35355 (an option)",
              rule=threshold_added),
    _held_out("epsilon-in-the-ratio", f"p is divided by q + {EPSILON}", "-", rule=epsilon_in_the_ratio),
    _held_out("ratio-in-float8", "the acceptance probability is rounded to float8", "-", rule=ratio_in_float8),
    _held_out("cumulated-ratio", "each draft token is tested with the product of p/q up to it", "-",
              rule=cumulated_ratio),
    _held_out("argmax-accepted", "the target's most probable token is accepted without a test", "-",
              rule=argmax_accepted),
    _held_out("probable-accepted", f"draft tokens with p of at least {CERTAIN} are accepted without a test",
              "sglang#7702 (an option)", rule=probable_accepted),
    _held_out("typical-acceptance", "draft tokens are accepted where p exceeds a threshold that falls with the entropy",
              "Medusa, vLLM#5131 (an option)", rule=typical_acceptance),
    _held_out("all-accepted-counted", "tokens that pass their test after a rejected one are counted as accepted",
              "vLLM#2658 (in a metric)", rule=all_accepted_counted),
    _held_out("last-accepted-replaced", "the last accepted token is replaced by a sample of p", "-",
              rule=last_accepted_replaced),
    _held_out("improbable-discarded", f"draft tokens with q below {DISCARDED} are discarded after they were sampled",
              "ik_llama.cpp#1820", rule=improbable_discarded),
]  # fmt: skip

ACCEPTANCE_BUGS = {bug.name: bug for bug in _BUGS}
"""These bugs by name."""
