"""Acceptance rules: pure functions of p, q, drafted tokens and uniforms.

No model, cache, generator or device in here, so that the same code is enumerated exactly in float64
and run in the loop. Every rule has the signature `Rule`:

    p               (..., gamma + 1, vocab)  the target's distributions, the last one after all drafts
    q               (..., gamma, vocab)      the distribution each draft was drawn from
    drafts          (..., gamma)             drafted tokens; -1 where none was proposed (its q is zero)
    accept_uniforms (..., gamma)             one per draft, in [0, 1)
    final_uniform   (...,)                   for the one token that every step adds

and returns an `Outcome`. A new rule is a new function, never a flag in an old one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.sampling.distributions import sample, unnormalised_residual


class Outcome(NamedTuple):
    """What a rule decides: the number of drafts accepted `(...,)` and the token that follows them `(...,)`."""

    accepted: Tensor
    token: Tensor


Rule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Outcome]


def token_verification(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> Outcome:
    """Algorithm 1: accept x with probability min(1, p(x)/q(x)); after a rejection draw from the residual.

    Exact for any p and q (appendix A.1). With zeros in q, disjoint supports and p = q it stays so.
    """
    accept = accept_uniforms * _at(q, draft_tokens) < _at(p, draft_tokens)
    accepted = _leading(accept & (draft_tokens >= 0))
    left = unnormalised_residual(_select(p, accepted), _select_or_nothing(q, accepted))
    return Outcome(accepted, sample(left, final_uniform))


def greedy_verification(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> Outcome:
    """Accept while the draft is the target's most probable token; then add that token itself.

    For one-hot p it is Algorithm 1 at temperature 0; q and the uniforms are not read.
    """
    best = p.argmax(dim=-1)
    accepted = _leading(draft_tokens == best[..., :-1])
    return Outcome(accepted, best.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))


def lenient_verification(lenience: float) -> Rule:
    """Algorithm 1 with q multiplied by `lenience` l before it is compared (appendix A.5): a rule that is not exact.

    Accepts x with probability min(1, p(x) / (l q(x))); after a rejection draws from Algorithm 1's residual.
    No token then has more than p(x)/l; its distribution and distance from p are in `specnb.sampling.lenience`. l = 1 is
    `token_verification`, bit for bit. Raises `ValueError` unless 0 < l <= 1.
    """
    _require_lenience(lenience)

    def lenient(p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, lenience * accept_uniforms, final_uniform)

    return lenient


def lenient_greedy_verification(lenience: float) -> Rule:
    """Accept the target's most probable token, and any x with p(x) > l max p (appendix A.5, its inequality turned).

    Reads p before it is made one-hot, so the loop is asked for temperature 1 and the drafter for 0; q and the
    uniforms are not read. The inequality is strict, and so l = 1 is `greedy_verification`, ties included.
    Raises `ValueError` unless 0 < l <= 1.
    """
    _require_lenience(lenience)

    def lenient_greedy(
        p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
    ) -> Outcome:
        best = p.argmax(dim=-1)
        head = p[..., :-1, :]
        near = (_at(head, draft_tokens) > lenience * head.amax(dim=-1)) & (draft_tokens >= 0)
        accepted = _leading((draft_tokens == best[..., :-1]) | near)
        return Outcome(accepted, best.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))

    return lenient_greedy


def rejection_sampling(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> Outcome:
    """Appendix A.2, one-shot: accept with probability p(x)/(M q(x)), M = max p/q, otherwise draw from p.

    Exact, but accepts with probability 1/M = min over x of q/p only, which is at most the overlap.
    """
    head = p[..., :-1, :]
    least_ratio = torch.where(head > 0, q / head, torch.inf).amin(dim=-1)
    accept = accept_uniforms * _at(q, draft_tokens) < _at(head, draft_tokens) * least_ratio
    accepted = _leading(accept & (draft_tokens >= 0))
    return Outcome(accepted, sample(_select(p, accepted), final_uniform))


def exact_match(p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor) -> Outcome:
    """Accept while the target's own sample equals the draft; at the first mismatch that sample is emitted.

    Exact, and accepts with probability sum p q, at most the overlap. The sample at the mismatch must
    not be drawn again: that would favour the tokens that the draft did not propose.
    """
    own = torch.cat(
        [sample(p[..., :-1, :], accept_uniforms), sample(p[..., -1, :], final_uniform).unsqueeze(-1)], dim=-1
    )
    accepted = _leading(draft_tokens == own[..., :-1])
    return Outcome(accepted, own.gather(-1, accepted.unsqueeze(-1)).squeeze(-1))


def _require_lenience(lenience: float) -> None:
    if not 0 < lenience <= 1:
        raise ValueError(f"lenience is {lenience}; it must lie in (0, 1], where 1 is exact and less accepts more")


def _leading(accept: Tensor) -> Tensor:
    """The number of true entries before the first false one, along the last axis."""
    return accept.cumprod(dim=-1).sum(dim=-1)


def _at(distributions: Tensor, tokens: Tensor) -> Tensor:
    """The probability of each token under the distribution at its place; that of token 0 where there is none (-1)."""
    return distributions.gather(-1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)


def _select_or_nothing(q: Tensor, position: Tensor) -> Tensor:
    """The distribution at `position` `(...,)` of `q` `(..., gamma, vocab)`; zero behind the last, where nothing is drafted."""
    gamma = q.shape[-2]
    if gamma == 0:
        return q.new_zeros(*position.shape, q.shape[-1])
    return _select(q, position.clamp_max(gamma - 1)).where((position < gamma).unsqueeze(-1), 0.0)


def _select(distributions: Tensor, position: Tensor) -> Tensor:
    """The distribution at `position` `(...,)` of `distributions` `(..., positions, vocab)`."""
    index = position[..., None, None].expand(*position.shape, 1, distributions.shape[-1])
    return distributions.gather(-2, index).squeeze(-2)
