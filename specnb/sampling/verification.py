"""Verification rules: pure functions of p, q, the draft tokens and uniforms.

A rule decides how many draft tokens of a step are accepted and which token follows them. It knows no model, cache,
generator or device, so the same code is enumerated exactly in float64 and called by the decoding loop. Every rule
has the signature `Rule`, where `positions` is gamma + 1:

    p                (..., gamma + 1, vocab)  the target's distributions; the last one follows all draft tokens
    q                (..., gamma, vocab)      the distribution that each draft token was sampled from
    draft_tokens     (..., gamma)             int64; -1 where no token was proposed (its q is zero)
    accept_uniforms  (..., gamma)             one uniform in [0, 1) for each draft token
    final_uniform    (...,)                   the uniform of the recovered or bonus token

A rule returns an `Outcome`. A new rule is a new function or class, not a flag in an existing one. A rule with
parameters is a frozen dataclass: equal parameters make equal rules, so a compiled step is reused.

>>> p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])  # gamma = 1, vocab = 3
>>> q = torch.tensor([[0.2, 0.2, 0.6]])
>>> token_verification(p, q, torch.tensor([2]), torch.tensor([0.3]), torch.tensor(0.5))  # 0.3 < p(2) / q(2) = 1/3
Outcome(accepted=tensor(1), token=tensor(1))
>>> token_verification(p, q, torch.tensor([2]), torch.tensor([0.4]), torch.tensor(0.5))
Outcome(accepted=tensor(0), token=tensor(0))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specnb.sampling.distributions import sample, unnormalised_residual

TargetProbs = Float[Tensor, "*batch positions vocab"]
DraftProbs = Float[Tensor, "*batch positions-1 vocab"]
DraftTokens = Int[Tensor, "*batch positions-1"]
AcceptUniforms = Float[Tensor, "*batch positions-1"]
FinalUniform = Float[Tensor, "*batch"]


class Outcome(NamedTuple):
    """The decision of a rule.

    accepted  (...,) int64  number of accepted draft tokens, 0 to gamma
    token     (...,) int64  the token that follows them: recovered after a rejection, bonus after full acceptance
    """

    accepted: Int[Tensor, "*batch"]
    token: Int[Tensor, "*batch"]


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Outcome]
"""A verification rule: `(p, q, draft_tokens, accept_uniforms, final_uniform) -> Outcome`, see the module."""


def token_verification(
    p: TargetProbs,
    q: DraftProbs,
    draft_tokens: DraftTokens,
    accept_uniforms: AcceptUniforms,
    final_uniform: FinalUniform,
) -> Outcome:
    """Algorithm 1: accept x with probability min(1, p(x)/q(x)); after a rejection sample from the residual.

    Exact for any p and q (appendix A.1), also where q has zeros, the supports are disjoint, or p = q.

    >>> p = torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    >>> q = torch.tensor([[0.0, 1.0]])
    >>> token_verification(p, q, torch.tensor([1]), torch.tensor([0.7]), torch.tensor(0.9))
    Outcome(accepted=tensor(0), token=tensor(0))
    """
    accept = accept_uniforms * _probability_of(draft_tokens, q) < _probability_of(draft_tokens, p[..., :-1, :])
    accepted = _count_leading(accept & (draft_tokens >= 0))
    final_probs = unnormalised_residual(_at_position(p, accepted), _at_position_or_zero(q, accepted))
    return Outcome(accepted, sample(final_probs, final_uniform))


def greedy_verification(
    p: TargetProbs,
    q: DraftProbs,
    draft_tokens: DraftTokens,
    accept_uniforms: AcceptUniforms,
    final_uniform: FinalUniform,
) -> Outcome:
    """Accept while the draft token is the target's argmax; then emit the argmax at the next position.

    For one-hot p this is Algorithm 1 at temperature 0. q and the uniforms are not read.

    >>> p = torch.tensor([[0.4, 0.6], [0.7, 0.3]])
    >>> greedy_verification(p, p[:1], torch.tensor([1]), torch.zeros(1), torch.tensor(0.0))
    Outcome(accepted=tensor(1), token=tensor(0))
    """
    best = p.argmax(dim=-1)
    accepted = _count_leading(draft_tokens == best[..., :-1])
    return Outcome(accepted, best.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))


@dataclass(frozen=True)
class LenientVerification:
    """Algorithm 1 with q multiplied by `lenience` l before the comparison (appendix A.5). Not exact for l < 1.

    Accepts x with probability min(1, p(x) / (l q(x))); after a rejection samples from Algorithm 1's residual.
    No token is emitted with probability above p(x)/l; the distribution of the emitted token and its distance from p
    are in `specnb.sampling.lenience`. l = 1 is `token_verification`, bit for bit.

    Raises `ValueError` unless 0 < l <= 1.

    >>> p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> lenient_verification(0.5)(p, q, torch.tensor([1]), torch.tensor([0.7]), torch.tensor(0.9))
    Outcome(accepted=tensor(1), token=tensor(0))
    >>> lenient_verification(0.5) == lenient_verification(0.5)
    True
    """

    lenience: float

    def __post_init__(self) -> None:
        _require_lenience(self.lenience)

    def __call__(
        self,
        p: TargetProbs,
        q: DraftProbs,
        draft_tokens: DraftTokens,
        accept_uniforms: AcceptUniforms,
        final_uniform: FinalUniform,
    ) -> Outcome:
        return token_verification(p, q, draft_tokens, self.lenience * accept_uniforms, final_uniform)


@dataclass(frozen=True)
class LenientGreedyVerification:
    """Accept the target's argmax, and any x with p(x) > l max p (appendix A.5 with its inequality reversed).

    Then emit the argmax at the next position. p must not be one-hot: call `generate` with temperature 1 and give the
    drafter temperature 0. q and the uniforms are not read. The inequality is strict, so l = 1 is
    `greedy_verification`, ties included.

    Raises `ValueError` unless 0 < l <= 1.

    >>> p = torch.tensor([[0.4, 0.6], [0.7, 0.3]])
    >>> lenient_greedy_verification(0.5)(p, p[:1], torch.tensor([0]), torch.zeros(1), torch.tensor(0.0))
    Outcome(accepted=tensor(1), token=tensor(0))
    >>> lenient_greedy_verification(0.9)(p, p[:1], torch.tensor([0]), torch.zeros(1), torch.tensor(0.0))
    Outcome(accepted=tensor(0), token=tensor(1))
    """

    lenience: float

    def __post_init__(self) -> None:
        _require_lenience(self.lenience)

    def __call__(
        self,
        p: TargetProbs,
        q: DraftProbs,
        draft_tokens: DraftTokens,
        accept_uniforms: AcceptUniforms,
        final_uniform: FinalUniform,
    ) -> Outcome:
        best = p.argmax(dim=-1)
        head = p[..., :-1, :]
        near_best = _probability_of(draft_tokens, head) > self.lenience * head.amax(dim=-1)
        accepted = _count_leading((draft_tokens == best[..., :-1]) | (near_best & (draft_tokens >= 0)))
        return Outcome(accepted, best.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))


lenient_verification = LenientVerification
lenient_greedy_verification = LenientGreedyVerification


def rejection_sampling(
    p: TargetProbs,
    q: DraftProbs,
    draft_tokens: DraftTokens,
    accept_uniforms: AcceptUniforms,
    final_uniform: FinalUniform,
) -> Outcome:
    """Appendix A.2, tried once: accept x with probability p(x)/(M q(x)), M = max p/q; otherwise sample from p.

    Exact. The acceptance probability is 1/M = min over x of q(x)/p(x), which is at most the overlap.

    >>> p, q = torch.tensor([[0.75, 0.25], [1.0, 0.0]]), torch.tensor([[0.5, 0.5]])  # M = 1.5
    >>> rejection_sampling(p, q, torch.tensor([1]), torch.tensor([0.4]), torch.tensor(0.9))  # 0.4 > 1/3
    Outcome(accepted=tensor(0), token=tensor(1))
    """
    head = p[..., :-1, :]
    least_ratio = torch.where(head > 0, q / head, torch.inf).amin(dim=-1)
    accept = accept_uniforms * _probability_of(draft_tokens, q) < _probability_of(draft_tokens, head) * least_ratio
    accepted = _count_leading(accept & (draft_tokens >= 0))
    return Outcome(accepted, sample(_at_position(p, accepted), final_uniform))


def exact_match(
    p: TargetProbs,
    q: DraftProbs,
    draft_tokens: DraftTokens,
    accept_uniforms: AcceptUniforms,
    final_uniform: FinalUniform,
) -> Outcome:
    """Accept while the target's own sample equals the draft token; at the first mismatch emit that sample.

    Exact. The acceptance probability is sum p q, at most the overlap. The sample at the mismatch must not be
    replaced by a new one: that would favour the tokens that the drafter did not propose. q is not read.

    >>> p = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    >>> exact_match(p, p[:1], torch.tensor([1]), torch.tensor([0.2]), torch.tensor(0.0))
    Outcome(accepted=tensor(0), token=tensor(0))
    """
    uniforms = torch.cat([accept_uniforms, final_uniform.unsqueeze(-1)], dim=-1)
    target_tokens = sample(p, uniforms)
    accepted = _count_leading(draft_tokens == target_tokens[..., :-1])
    return Outcome(accepted, target_tokens.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))


def _require_lenience(lenience: float) -> None:
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience is {lenience}; it must lie in (0, 1], where 1 is exact and less accepts more")


def _count_leading(accept: Bool[Tensor, "*batch gamma"]) -> Int[Tensor, "*batch"]:
    """The number of true entries before the first false one, along the last axis."""
    return accept.cumprod(dim=-1).sum(dim=-1)


def _probability_of(
    tokens: Int[Tensor, "*batch gamma"], probs: Float[Tensor, "*batch gamma vocab"]
) -> Float[Tensor, "*batch gamma"]:
    """The probability of each token at its position; that of token 0 where there is no token (-1)."""
    return probs.gather(-1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)


def _at_position_or_zero(
    q: Float[Tensor, "*batch gamma vocab"], position: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch vocab"]:
    """The distribution at `position`; zero at position gamma, where there is no draft token."""
    gamma = q.shape[-2]
    if gamma == 0:
        return q.new_zeros(*position.shape, q.shape[-1])
    return _at_position(q, position.clamp_max(gamma - 1)).where((position < gamma).unsqueeze(-1), 0.0)


def _at_position(
    probs: Float[Tensor, "*batch positions vocab"], position: Int[Tensor, "*batch"]
) -> Float[Tensor, "*batch vocab"]:
    index = position[..., None, None].expand(*position.shape, 1, probs.shape[-1])
    return probs.gather(-2, index).squeeze(-2)
