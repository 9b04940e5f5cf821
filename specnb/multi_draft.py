"""Several draft tokens for one position: pure functions that accept one of them or sample another token.

Every rule has the signature `MultiDraftRule`:

    p               (..., vocab)     the target's distribution
    q               (..., k, vocab)  the distribution of each draft token, see `specnb.draft_schemes`
    draft_tokens    (..., k)         in the order in which they are tested; -1 where there is none
    accept_uniforms (..., k)         one per draft token, in [0, 1)
    final_uniform   (...,)           for the token sampled when all are rejected

and, as in `specnb.rules`, a plan with which the uniforms are compared.

Sources (none of these papers' algorithms could be read in full where this was written, unless said so)
- Iterative speculative sampling: Stratos' notes on speculative decoding, section 2, read. The same recursion is
  SpecInfer's multi-step speculative sampling (Miao et al., arXiv 2305.09781; as these notes restate it) if every
  sample is tested, and recursive rejection sampling (Jeon et al., RSD, arXiv 2402.14160; abstract read), which also
  samples the draft tokens without replacement.
- k-sequential selection: Sun et al., SpecTr, arXiv 2310.15141, from memory of its Algorithm 3.
- SpecHub: Sun et al., arXiv 2411.05289, from the comment above its verification in its authors' code,
  github.com/MasterGodzilla/Speculative_decoding_OT, EAGLE/eagle/model/utils.py, read.
- EAGLE's rule for top-k trees: its authors' answers in github.com/SafeAILab/EAGLE issues 93, 183 and 221, read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.distributions import normalise, one_hot, residual, sample

CERTAIN = 1e-3  # from SpecHub's code: a target this close to one-hot counts as one-hot


class SelectionOutcome(NamedTuple):
    """What a rule decides: the index of the accepted draft token `(...,)`, -1 if none, and the token `(...,)`."""

    accepted: Tensor
    token: Tensor


class SelectionPlan(NamedTuple):
    """What a rule does with one tuple of draft tokens.

    accept    (..., k)     that each is accepted, if all before it are rejected
    recovered (..., vocab) what is sampled from when all are rejected, up to a factor
    """

    accept: Tensor
    recovered: Tensor


MultiDraftRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], SelectionOutcome]
SelectionPlanner = Callable[[Tensor, Tensor, Tensor], SelectionPlan]
"""From p `(..., vocab)`, q `(..., k, vocab)` and draft tokens `(..., k)` to the plan."""


def recursive_rejection(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> SelectionOutcome:
    """Test each draft token against what is left of p; after a rejection subtract its q and renormalise.

    p_0 = p; x_i is accepted with probability min(1, p_{i-1}(x_i) / q_i(x_i)); p_i = norm(max(0, p_{i-1} - q_i)).
    Exact if, given those before it, x_i is sampled from q_i: independent samples (iterative speculative sampling),
    several draft models, and samples without replacement (RSD). Not exact if repeats are merged into one child.

    >>> p, q = torch.tensor([0.5, 0.5]), torch.tensor([[0.9, 0.1]] * 2)
    >>> recursive_rejection(p, q, torch.tensor([0, 1]), torch.tensor([0.9, 0.9]), torch.tensor(0.5))
    SelectionOutcome(accepted=tensor(1), token=tensor(1))
    """
    return first_accepted(recursive_plan(p, q, draft_tokens), draft_tokens, accept_uniforms, final_uniform)


def top_k_rejection(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> SelectionOutcome:
    """EAGLE's rule for top-k draft tokens: accept x with probability p(x); if rejected, set p(x) to 0, renormalise.

    It is `recursive_rejection` with one-hot q, which is the true distribution of a token that is not sampled. Exact
    for tokens chosen without looking at p, also if they are random; q is not read.
    """
    return first_accepted(top_k_plan(p, q, draft_tokens), draft_tokens, accept_uniforms, final_uniform)


def k_sequential(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> SelectionOutcome:
    """SpecTr's k-sequential selection for k independent samples from one q; exact.

    Each is accepted with probability min(1, p(x) / (rho q(x))), rho from `division_factor`. With
    beta = sum min(p / rho, q), all are rejected with probability (1 - beta)^k, and then the token is sampled from
    p - min(p / rho, q) (1 - (1 - beta)^k) / beta. Needs all k draft tokens: none may be -1.
    """
    return first_accepted(k_sequential_plan(p, q, draft_tokens), draft_tokens, accept_uniforms, final_uniform)


def spechub(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> SelectionOutcome:
    """SpecHub's rule for the pairs of `specnb.draft_schemes.hub_pairs`; exact for these.

    In (x, a), x is accepted with probability min(1, p(x) / q(x)); in (a, x), with min(1, (p(x) - q(x))+ / Q(a, x)).
    What is left of the pairs goes to the hub a, the pairs (a, x) first, as far as p(a) reaches.
    Raises `ValueError` unless there are two draft tokens.
    """
    return first_accepted(spechub_plan(p, q, draft_tokens), draft_tokens, accept_uniforms, final_uniform)


def spechub_code(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> SelectionOutcome:
    """SpecHub as its authors' code has it: `spechub`, but the hub a is always accepted where p(a) > 1 - 1e-3.

    Not exact: there the hub is the only token ever emitted. The total variation is 1 - p(a), below 1e-3.
    """
    return first_accepted(spechub_code_plan(p, q, draft_tokens), draft_tokens, accept_uniforms, final_uniform)


def first_accepted(
    plan: SelectionPlan, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> SelectionOutcome:
    """The first draft token whose uniform lies below its acceptance probability, or else a recovered token."""
    passed = accept_uniforms < plan.accept
    first = passed.to(torch.int64).argmax(-1)
    accepted = first.where(passed.any(-1), -1)
    chosen = draft_tokens.gather(-1, first.unsqueeze(-1)).squeeze(-1)
    return SelectionOutcome(accepted, chosen.where(accepted >= 0, sample(plan.recovered, final_uniform)))


def recursive_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> SelectionPlan:
    """The plan of `recursive_rejection`."""
    left, accept = p, []
    for q_i, x in zip(q.unbind(-2), draft_tokens.unbind(-1), strict=True):
        accept.append(_ratio(left, q_i, x))
        left = residual(left, q_i).where((x >= 0).unsqueeze(-1), left)
    return SelectionPlan(torch.stack(accept, dim=-1), left)


def top_k_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> SelectionPlan:
    """The plan of `top_k_rejection`."""
    return recursive_plan(p, one_hot(draft_tokens.clamp_min(0), p.shape[-1], p.dtype), draft_tokens)


def k_sequential_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> SelectionPlan:
    """The plan of `k_sequential`; q is the same in every row."""
    k, shared = q.shape[-2], q[..., 0, :]
    rho = division_factor(p, shared, k).unsqueeze(-1)
    served = torch.minimum(p / rho, shared)
    beta = served.sum(-1, keepdim=True)
    share = (_at_least_one(beta, k) / beta).nan_to_num(0.0)
    accept = torch.stack([_ratio(p / rho, shared, x) for x in draft_tokens.unbind(-1)], dim=-1)
    left = (p - served * share).clamp_min(0)
    return SelectionPlan(accept, left.where(left.sum(-1, keepdim=True) > 0, p))


def division_factor(p: Tensor, q: Tensor, k: int) -> Tensor:
    """The rho in [1, k] `(...,)` with 1 - (1 - beta)^k = rho beta: the smallest for which `k_sequential` is exact.

    A smaller rho would serve some tokens more often than p has them. Found by bisection to the last bit. Without
    common support beta is 0 and rho 1.
    """
    low, high = torch.ones_like(p[..., 0]), torch.full_like(p[..., 0], float(k))
    for _ in range(60):
        middle = (low + high) / 2
        beta = torch.minimum(p / middle.unsqueeze(-1), q).sum(-1)
        too_small = _at_least_one(beta, k) > middle * beta
        low, high = middle.where(too_small, low), high.where(too_small, middle)
    return high


def spechub_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> SelectionPlan:
    """The plan of `spechub`."""
    if draft_tokens.shape[-1] != 2:
        raise ValueError(f"SpecHub verifies 2 draft tokens; it was given {draft_tokens.shape[-1]}")
    shared = q[..., 0, :]
    hub = shared.argmax(-1, keepdim=True)
    is_hub = one_hot(hub.squeeze(-1), p.shape[-1], p.dtype)
    first = shared * (1 - is_hub)  # Q(x, a)
    second = (shared.gather(-1, hub) * normalise(first)).nan_to_num(0.0)  # Q(a, x)
    from_first = torch.minimum(p, first)
    from_second = torch.minimum(p - from_first, second) * (1 - is_hub)
    left_second, left_first = (second - from_second).sum(-1), (first - from_first).sum(-1)
    alone = first.sum(-1) == 0  # q is one-hot: the hub is the only draft token
    at_hub = p.gather(-1, hub).squeeze(-1)
    hub_second = (at_hub / left_second).clamp_max(1).nan_to_num(1.0)
    hub_first = ((at_hub - left_second).clamp_min(0) / left_first).clamp_max(1).nan_to_num(1.0)
    hub_taken = torch.minimum(at_hub, left_first + left_second + alone)
    other = draft_tokens[..., 0].where(draft_tokens[..., 0] != hub.squeeze(-1), draft_tokens[..., 1])
    starts_with_hub = draft_tokens[..., 0] == hub.squeeze(-1)
    other_first, other_second = _ratio(from_first, first, other), _ratio(from_second, second, other)
    # In (a, x) the code tests x and then a; the plan lists a first, with the same probabilities of both.
    hub_tested_first = torch.where(alone, at_hub, (1 - other_second) * hub_second)
    then_other = (other_second / (1 - hub_tested_first)).nan_to_num(1.0).clamp_max(1)
    accept = torch.stack(
        [
            torch.where(starts_with_hub, hub_tested_first, other_first),
            torch.where(starts_with_hub, then_other, hub_first),
        ],
        dim=-1,
    ).where(draft_tokens >= 0, 0.0)
    left = (p - from_first - from_second - hub_taken.unsqueeze(-1) * is_hub).clamp_min(0)
    return SelectionPlan(accept, left.where(left.sum(-1, keepdim=True) > 0, p))


def spechub_code_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> SelectionPlan:
    """The plan of `spechub_code`."""
    plan = spechub_plan(p, q, draft_tokens)
    hub = q[..., 0, :].argmax(-1, keepdim=True)
    only_hub = p.gather(-1, hub) > 1 - CERTAIN
    return SelectionPlan(torch.where(only_hub, (draft_tokens == hub).to(p.dtype), plan.accept), plan.recovered)


def _ratio(mass: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """min(1, mass(x) / q(x)) `(...,)`; 0 where there is no draft token."""
    index = x.clamp_min(0).unsqueeze(-1)
    ratio = (mass.gather(-1, index) / q.gather(-1, index)).squeeze(-1)
    return ratio.nan_to_num(0.0, posinf=1.0).clamp_max(1).where(x >= 0, 0.0)


def _at_least_one(beta: Tensor, k: int) -> Tensor:
    """1 - (1 - beta)^k, without cancellation for small beta."""
    return -torch.expm1(k * torch.log1p(-beta.clamp_max(1)))
