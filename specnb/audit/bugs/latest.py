"""Bugs that were collected last: filters that nobody claimed, biased tokens, and the last token of a step.

The bets of *tail-cut* on exact top-p and min-p, and of *token-bias*, were designed with those that are not held out.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specnb.audit.bugs.bug import Bug, Change
from specnb.audit.bugs.step import sampled_as
from specnb.audit.claimed import Claimed, claimed_probs
from specnb.sampling.distributions import Sampling, normalise, sample
from specnb.sampling.verification import Outcome, token_verification

FIRST = 0  # the token that is biased or suppressed
BIAS = 1.0


def claimed_as(sampling: Claimed) -> Change:
    """The change of a distribution at temperature 1 into the one under `sampling`."""
    return lambda distributions: claimed_probs(distributions.log(), sampling)


def without_the_crossing_token(distributions: Tensor, top_p: float = 0.9) -> Tensor:
    """Top-p that drops the token which crosses the limit; the likeliest token always stays."""
    ordered, index = distributions.sort(dim=-1, descending=True)
    kept = ordered.cumsum(dim=-1) <= top_p
    kept[..., 0] = True
    return normalise(distributions * torch.zeros_like(distributions).scatter(-1, index, kept.to(distributions.dtype)))


def biased(distributions: Tensor) -> Tensor:
    """A bias on the logit of one token."""
    factor = torch.ones_like(distributions)
    factor[..., FIRST] = torch.tensor(BIAS).exp()
    return normalise(distributions * factor)


def suppressed(distributions: Tensor) -> Tensor:
    """One token is impossible, as an end token is until a minimum length is reached."""
    possible = distributions.clone()
    possible[..., FIRST] = 0.0
    return normalise(possible.where(possible.sum(dim=-1, keepdim=True) > 0, distributions))


def bonus_from_draft(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """After full acceptance the bonus token is sampled from the draft's last distribution."""
    accepted, token = token_verification(p, q, draft_tokens, accept, final)
    is_full = accepted == draft_tokens.shape[-1]
    return Outcome(accepted, torch.where(is_full, sample(q[..., -1, :], final), token))


def residual_not_normalised(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    """max(0, p - q) is inverted as if it summed to 1: uniforms beyond its mass give the last token."""
    accepted = token_verification(p, q, draft_tokens, accept, final).accepted
    padded = torch.cat([q, torch.zeros_like(p[..., :1, :])], dim=-2)
    here, drafted = (probs.take_along_dim(accepted[..., None, None], dim=-2).squeeze(-2) for probs in (p, padded))
    cumulated = (here - drafted).clamp_min(0).cumsum(dim=-1)
    beyond = final >= cumulated[..., -1]
    inverted = torch.searchsorted(cumulated, final[..., None].contiguous(), right=True)[..., 0]
    return Outcome(accepted, torch.where(beyond, here.shape[-1] - 1, inverted.clamp_max(here.shape[-1] - 1)))


_held_out = partial(Bug, kind="step", held_out=True)
_aimed_at = partial(Bug, kind="step")
_BUGS = [
    _aimed_at("top-p-left-on", "a top-p of 0.98 is applied and not claimed", "-", p=sampled_as(Sampling(top_p=0.98))),
    _aimed_at("min-p-left-on", "a min-p of 0.05 is applied and not claimed", "default of llama.cpp",
              p=claimed_as(Claimed(min_p=0.05))),
    _aimed_at("tail-truncated", "the sampler stops at a cumulative probability of 0.999", "-",
              p=sampled_as(Sampling(top_p=0.999))),
    _aimed_at("token-suppressed", "one token, such as the end token, is suppressed", "-", p=suppressed),
    _aimed_at("logit-bias-left-on", f"the logit of one token has a bias of {BIAS}", "-", p=biased),
    _held_out("crossing-token-dropped", "top-p drops the token that crosses the limit", "-",
              claimed=Sampling(top_p=0.9), p=without_the_crossing_token),
    _held_out("temperature-off-by-3%", "the temperature is 0.97 in place of 1", "-", p=sampled_as(Sampling(0.97))),
    _held_out("bonus-from-draft", "the bonus token is sampled from the draft's last distribution", "-",
              rule=bonus_from_draft),
    _held_out("residual-not-normalised", "max(0, p - q) is inverted without its normalisation", "-",
              rule=residual_not_normalised),
]  # fmt: skip

LATEST_BUGS = {bug.name: bug for bug in _BUGS}
"""These bugs by name."""
