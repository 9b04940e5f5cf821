"""Bugs of a step that were collected after the bug suite; most are held out, to judge the audit's power.

No bet of the audit was designed for a bug that is held out; the bug suite has those that the bets are aimed at. Do not
aim a bet at a held-out bug without taking the mark away.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specnb.audit.bugs.bug import Bug
from specnb.audit.bugs.step import in_bfloat16, sampled_as
from specnb.sampling.distributions import Sampling, normalise, residual, sample
from specnb.sampling.verification import Outcome, token_verification

COLD = Sampling(0.7)
ROUNDED = 0.25


def residual_of_one_token(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The residual subtracts q at the rejected draft token alone."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    at_draft_token = q * torch.zeros_like(q).scatter(-1, draft_tokens[..., None], 1.0)
    padded = torch.cat([at_draft_token, torch.zeros_like(p[..., :1, :])], dim=-2)
    return Outcome(accepted, sample(residual(_at(p, accepted), _at(padded, accepted)), final))


def relative_to_the_largest(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token is accepted with probability p(x) / max p."""
    drafted = p[..., :-1, :]
    accept_prob = drafted.gather(-1, draft_tokens[..., None])[..., 0] / drafted.amax(dim=-1)
    return _accepting(p, q, accept < accept_prob, final)


def first_not_verified(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """The first draft token of a step is always accepted."""
    ratio = _at_tokens(p[..., :-1, :], draft_tokens) / _at_tokens(q, draft_tokens)
    accepting = accept < ratio
    accepting[..., 0] = True
    return _accepting(p, q, accepting, final)


def replaced_from_the_next_position(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor
) -> Outcome:
    """After a rejection a token is sampled from the target's distribution after the rejected draft token."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    following = (accepted + 1).clamp_max(p.shape[-2] - 1)
    return Outcome(accepted, sample(_at(p, following), final))


def acceptance_without_p(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """A draft token x is accepted if a uniform is at most q(x)/p(y), y the target's most probable token."""
    ratio = _at_tokens(q, draft_tokens) / p[..., :-1, :].amax(dim=-1)
    accepted = _leading(accept <= ratio)
    return Outcome(accepted, sample(_at(p, accepted), final))


def ascending_top_p(distributions: Tensor, top_p: float = 0.9) -> Tensor:
    """Top-p over tokens sorted the wrong way: the least probable ones are kept first."""
    ordered, index = distributions.sort(dim=-1)
    kept = ordered.cumsum(dim=-1) - ordered < top_p
    return normalise(distributions * torch.zeros_like(distributions).scatter(-1, index, kept.to(distributions.dtype)))


def stale_temperatures(distributions: Tensor) -> Tensor:
    """The first position has its temperature, those after it that of uninitialised memory: here 0.2 and 5 in turn."""
    positions = torch.arange(distributions.shape[-2])
    power = torch.where(positions % 2 == 1, 5.0, 0.2).to(distributions.dtype)
    power[0] = 1.0
    return torch.softmax(distributions.log() * power[:, None], dim=-1)


def rounded_logits(distributions: Tensor) -> Tensor:
    """Logits rounded to multiples of 0.25, as coarse quantisation does: noise without direction."""
    return torch.softmax((distributions.log() / ROUNDED).round() * ROUNDED, dim=-1)


def _at(distributions: Tensor, position: Tensor) -> Tensor:
    return distributions.take_along_dim(position[..., None, None], dim=-2).squeeze(-2)


def _at_tokens(distributions: Tensor, tokens: Tensor) -> Tensor:
    return distributions.gather(-1, tokens[..., None])[..., 0]


def _leading(accepting: Tensor) -> Tensor:
    return accepting.long().cumprod(dim=-1).sum(dim=-1)


def _accepting(p: Tensor, q: Tensor, accepting: Tensor, final: Tensor) -> Outcome:
    """Accepts the leading draft tokens marked, and replaces the next one correctly."""
    accepted = _leading(accepting)
    padded = torch.cat([q, torch.zeros_like(p[..., :1, :])], dim=-2)
    return Outcome(accepted, sample(residual(_at(p, accepted), _at(padded, accepted)), final))


_bug = partial(Bug, kind="step", held_out=True)
_aimed_at = partial(Bug, kind="step")
_BUGS = [
    _bug("residual-of-one-token", "the residual subtracts q at the rejected draft token alone", "xLLM#2175",
         rule=residual_of_one_token),
    _bug("relative-to-the-largest", "draft tokens are accepted with probability p(x) / max p", "1bit-MONSTER#637",
         rule=relative_to_the_largest),
    _bug("first-not-verified", "the first draft token of a step is always accepted", "lattice#243",
         rule=first_not_verified),
    _bug("replaced-from-the-next-position",
         "after a rejection a token is sampled from the target's distribution at the following position",
         "openvino.genai#4190", rule=replaced_from_the_next_position),
    _aimed_at("acceptance-without-p", "acceptance never looks at p of the draft token", "OpenVINO GenAI 2026.4",
              rule=acceptance_without_p),
    _bug("ascending-top-p", "top-p keeps the least probable tokens first when verifying", "vllm-ascend#4860",
         claimed=Sampling(top_p=0.9), p=ascending_top_p),
    _aimed_at("stale-temperatures", "the temperatures of drafted positions are uninitialised memory", "vLLM#55005",
         p=stale_temperatures),
    _bug("temperature-at-1", "verification has a temperature of 1 whatever is claimed", "lattice#388",
         claimed=COLD, p=sampled_as(Sampling())),
    _bug("rounded-logits", f"the target's logits are rounded to multiples of {ROUNDED}", "coarse quantisation",
         p=rounded_logits),
    _bug("verified-in-bfloat16", "verification reads p in bfloat16", "-", p=in_bfloat16),
]  # fmt: skip

LATER_BUGS = {bug.name: bug for bug in _BUGS}
"""These bugs by name."""
HELD_OUT_BUGS = {name: bug for name, bug in LATER_BUGS.items() if bug.held_out}
"""Those that no bet was designed for."""
