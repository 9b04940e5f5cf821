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

Block verification of one chain of draft tokens, and hierarchical verification: rules that weigh whole prefixes.

Each rule is a `Rule` (see `specnb.rules`) made of two parts. Its *plan* computes from p, q and the
draft tokens with which probability each prefix is accepted and from what the next token is sampled; the rule compares
the uniforms with the plan. `specnb.enumeration` reads the same plan to find the cells of uniforms
in which the rule is asked.

Sources
- Block verification: Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, Algorithm 2
  and equation (4). Here r_i = p(x_1..x_i)/q(x_1..x_i), w_0 = 1 and w_i = min(1, w_{i-1} p(x_i)/q(x_i)).
- Hierarchical speculative decoding (HSD): Zhou et al., arXiv 2601.05724: Definitions 4 to 6, equations (16) to (20) and
  Algorithm 2 (capped), read in a text conversion of the whole paper that cites work of 2026, so probably version 2.
  Naive HSD (Algorithm 1) resamples with further forward passes, so it is no rule of one step and is not here.
- HSD as its authors' code has it: github.com/ZhouYuxuanYX/Hierarchical-Speculative-Decoding, the file
  transformers/generation/utils.py at commit f3adf7f (at b8575e2, the newest commit read, it mixes tabs and spaces and
  is no valid Python). Its file algorithm.py differs: `studies.rules.hierarchical_file`.

Verification rules for trees of draft tokens; two or more drafts of one token are a tree of depth 1.

A tree rule is a pure function, like the rules for chains in `specnb.rules`:

    p               (..., nodes + 1, vocab)  the target's distributions after the root and after each node
    q               (..., nodes, vocab)      the distribution each node was sampled from, given all nodes before it
    draft_tokens    (..., nodes)             the token of each node; -1 where none was proposed (its q is zero)
    parents         nodes integers           the parent of each node: an earlier node, or -1 for the root
    accept_uniforms (..., nodes)             one per node, in [0, 1)
    final_uniform   (...,)                   for the token that every step adds

Tree rules that weigh whole paths: from the leaves up (traversal verification), and one path chosen of several.

Both are block verification (`specnb.rules`) on a chain.

Sources
- Traversal verification: Weng et al., "Traversal Verification for Speculative Tree Decoding", arXiv 2505.12398. Its
  abstract was read. The recursion below is derived from block verification and proved here by enumeration; it is not
  a transcription of the paper's algorithm.
- Greedy multi-path block verification (GBV): Thomas and Pal, arXiv 2602.16961. Abstract, public reviews and the
  authors' function `gbv_verify`, in copies of it in other repositories, were read: choose one of several sampled paths
  by the largest p/q at each node, then apply block verification with the distribution that the chosen path has. One
  copy orders by min(1, p/q), which is not exact (`studies.rules.best_draft`); the rule below is that of the other.

Tree rules from the root down: at each accepted node one child is chosen, or none, and then the step ends.

`SelectionTree` makes a tree rule of any plan of `specnb.multi_draft`. Two rules compare tokens only,
`greedy_tree` and `exact_match_tree`; they read no q and serve every tree of draft tokens, also merged ones.

Sources: SpecInfer, Miao et al., arXiv 2305.09781, whose naive sampling is `exact_match_tree`, as Stratos' notes restate
it; those of the plans are in `specnb.multi_draft`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from specnb.distributions import residual, sample, unnormalised_residual
from specnb.multi_draft import SelectionPlanner, k_sequential_plan, spechub_plan, top_k_plan
from specnb.trees import node_depths

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
    are in `specnb.theory`. l = 1 is `token_verification`, bit for bit.

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


class ChainPlan(NamedTuple):
    """What a rule does with one chain: its acceptance probabilities and the distributions of the added token.

    accept    (..., gamma)            that the first i draft tokens are accepted, if no longer prefix is; i = 1..gamma
    recovered (..., gamma + 1, vocab) what is sampled from after i accepted tokens, up to a factor; i = 0..gamma
    """

    accept: Tensor
    recovered: Tensor


Planner = Callable[[Tensor, Tensor, Tensor], ChainPlan]
"""From p `(..., gamma + 1, vocab)`, q `(..., gamma, vocab)` and draft tokens `(..., gamma)` to the plan."""


def block_verification(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> Outcome:
    """Accept the longest prefix that passes its own test (Sun et al., Algorithm 2); exact for any p and q.

    Prefix i is accepted with probability h_i = S_i / (S_i + 1 - w_i), S_i = sum max(0, w_i p - q) over the next
    token, and h_gamma = w_gamma. The next token comes from max(0, w_i p - q), after all drafts from p.
    No exact rule accepts more tokens in expectation (`studies.rules.optimal_acceptance.optimal_block`).

    >>> p, q = torch.tensor([[0.2, 0.8]] * 3), torch.tensor([[0.8, 0.2]] * 2)
    >>> block_verification(p, q, torch.tensor([0, 1]), torch.tensor([0.9, 0.9]), torch.tensor(0.5))
    Outcome(accepted=tensor(2), token=tensor(1))
    """
    return longest_accepted(block_plan(p, q, draft_tokens), accept_uniforms, final_uniform)


def hierarchical_verification(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> Outcome:
    """HSD as its paper has it (Algorithm 2), with the capped prefix ratio r*: the same rule as `block_verification`.

    m is the position before t of the largest prefix ratio, 0 if none exceeds 1, and r*_t = r_t / max(1, r_m).
    Prefix t < gamma is accepted with probability D(p, q) / D(q, p), the sums over the next token of max(0, r* - 1) q
    and of max(0, 1 - r*) q; all gamma with min(1, r*_gamma). Since min(1, r*_t) = w_t, and D(q, p) - D(p, q) = 1 - w_t
    up to the factor q(x_1..x_t), the probabilities are those of block verification. The paper's Theorem 7 states that
    it accepts more for gamma > 1; its proof takes r_t / max(1, r_m) for larger than the least of the r_t / r_s, s <= t,
    and the two are equal.
    """
    return longest_accepted(hierarchical_plan(p, q, draft_tokens), accept_uniforms, final_uniform)


def hierarchical_verification_code(
    p: Tensor, q: Tensor, draft_tokens: Tensor, accept_uniforms: Tensor, final_uniform: Tensor
) -> Outcome:
    """HSD as its authors' code has it: as above, but all drafts are accepted with the uncapped min(1, r_gamma).

    Not exact: where some r_i > 1, sequences beginning with x_1..x_i are accepted too often. Smallest example:
    p = (1/3, 2/3), q = (2/3, 1/3) at every position and gamma = 2 give a total variation of 1/9.
    """
    return longest_accepted(hierarchical_code_plan(p, q, draft_tokens), accept_uniforms, final_uniform)


def block_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> ChainPlan:
    """The plan of `block_verification`."""
    ratios = _ratios(p, q, draft_tokens)
    weight = torch.ones_like(p[..., 0, 0])
    weights = [weight]
    for ratio in ratios.unbind(-1):
        weight = (weight * ratio).clamp_max(1)
        weights.append(weight)
    w = torch.stack(weights, dim=-1)
    excess = _excess(w, p, q)
    kept = excess.sum(-1)
    accept = (kept / (kept + 1 - w)).nan_to_num(1.0)  # 0/0: w = 1 and p = q next, so a longer prefix is accepted
    return ChainPlan(accept[..., 1:], _or_target(excess, p))


def hierarchical_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> ChainPlan:
    """The plan of `hierarchical_verification`; r* is written as its definitions have it, not as w."""
    prefix_ratios = _prefix_ratios(p, q, draft_tokens)
    caps = prefix_ratios.cummax(dim=-1).values.clamp_min(1)
    return _hierarchical(p, q, prefix_ratios, caps, prefix_ratios[..., 1:] / caps[..., :-1])


def hierarchical_code_plan(p: Tensor, q: Tensor, draft_tokens: Tensor) -> ChainPlan:
    """The plan of `hierarchical_verification_code`."""
    prefix_ratios = _prefix_ratios(p, q, draft_tokens)
    caps = prefix_ratios.cummax(dim=-1).values.clamp_min(1)
    return _hierarchical(p, q, prefix_ratios, caps, prefix_ratios[..., 1:])


def longest_accepted(plan: ChainPlan, accept_uniforms: Tensor, final_uniform: Tensor) -> Outcome:
    """The longest prefix whose uniform lies below its acceptance probability, and the token after it.

    Every position is tested: stopping at the first failure would make the accepted prefixes too short.
    """
    passed = accept_uniforms < plan.accept
    lengths = torch.arange(1, passed.shape[-1] + 1, device=passed.device)
    accepted = torch.cat([torch.zeros_like(passed[..., :0].sum(-1, keepdim=True)), passed * lengths], -1).amax(-1)
    index = accepted[..., None, None].expand(*accepted.shape, 1, plan.recovered.shape[-1])
    return Outcome(accepted, sample(plan.recovered.gather(-2, index).squeeze(-2), final_uniform))


def _hierarchical(p: Tensor, q: Tensor, prefix_ratios: Tensor, caps: Tensor, full: Tensor) -> ChainPlan:
    """Branch divergences between the capped p and q; `full` `(..., gamma)` is the ratio tested at the last draft."""
    capped = (prefix_ratios / caps)[..., None] * p
    following = _padded(q)
    forward, backward = (capped - following).clamp_min(0), (following - capped).clamp_min(0)
    inner = (forward.sum(-1) / backward.sum(-1)).nan_to_num(1.0).clamp_max(1)[..., 1:]
    last = following.sum(-1)[..., 1:] == 0
    return ChainPlan(torch.where(last, full.clamp_max(1), inner), _or_target(forward, p))


def _ratios(p: Tensor, q: Tensor, draft_tokens: Tensor) -> Tensor:
    """p/q `(..., gamma)` of each draft token; 0 where none was proposed, so that nothing there is accepted.

    Finite where only q is 0, so that ratios of prefixes can be divided by each other.
    """
    index = draft_tokens.clamp_min(0).unsqueeze(-1)
    ratios = (p[..., :-1, :].gather(-1, index) / q.gather(-1, index)).squeeze(-1)
    return ratios.where(draft_tokens >= 0, 0.0).nan_to_num(0.0)


def _prefix_ratios(p: Tensor, q: Tensor, draft_tokens: Tensor) -> Tensor:
    """r_0 = 1, r_1, ..., r_gamma `(..., gamma + 1)`."""
    ratios = _ratios(p, q, draft_tokens)
    return torch.cat([torch.ones_like(p[..., :1, 0]), ratios.cumprod(-1).nan_to_num(0.0)], dim=-1)


def _excess(weights: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """max(0, w_i p - q) `(..., gamma + 1, vocab)`; q counts as zero after the last draft token."""
    return (weights[..., None] * p - _padded(q)).clamp_min(0)


def _padded(q: Tensor) -> Tensor:
    return torch.cat([q, q.new_zeros(*q.shape[:-2], 1, q.shape[-1])], dim=-2)


def _or_target(mass: Tensor, p: Tensor) -> Tensor:
    """`mass`, or p where it is zero: there nothing is ever sampled, up to rounding."""
    return mass.where(mass.sum(-1, keepdim=True) > 0, p)


class TreeOutcome(NamedTuple):
    """What a tree rule decides.

    accepted  (...,)        number of draft tokens accepted
    token     (...,)        the token that follows them
    path      (..., depth)  the nodes accepted, from the root down; -1 after the last
    """

    accepted: Tensor
    token: Tensor
    path: Tensor


class TreePlan(NamedTuple):
    """What a tree rule compares its uniforms with, given p, q and the tokens.

    accept    (..., nodes)     for each acceptance uniform the number that it is compared with; 0 if it is not read
    recovered (..., n, vocab)  the distributions from which the last token can be sampled, up to a factor
    """

    accept: Tensor
    recovered: Tensor


TreePlanner = Callable[[Tensor, Tensor, Tensor, tuple[int, ...]], TreePlan]
"""From p, q, draft tokens and parents to the plan."""
TreeFunction = Callable[[Tensor, Tensor, Tensor, tuple[int, ...], Tensor, Tensor], TreeOutcome]


@dataclass(frozen=True)
class TreeRule:
    """A function with the arguments listed above, marked as a rule for trees. Rules of equal functions are equal."""

    function: TreeFunction

    def __call__(
        self,
        p: Tensor,
        q: Tensor,
        draft_tokens: Tensor,
        parents: tuple[int, ...],
        accept_uniforms: Tensor,
        final_uniform: Tensor,
    ) -> TreeOutcome:
        return self.function(p, q, draft_tokens, parents, accept_uniforms, final_uniform)


def _recursive_rejection(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    parents: tuple[int, ...],
    accept_uniforms: Tensor,
    final_uniform: Tensor,
) -> TreeOutcome:
    depth = max(node_depths(parents), default=0)
    current = torch.full_like(final_uniform, -1, dtype=torch.int64)  # the last node accepted; -1 is the root
    accepted = torch.zeros_like(current)
    path = current[..., None].expand(*current.shape, depth)
    place = torch.arange(depth, device=p.device)
    target = p[..., 0, :]  # what the next token has to be distributed as, given what was rejected
    for node, parent in enumerate(parents):
        # Parents come before their children, so one pass in this order visits all children of each accepted node.
        token, own = draft_tokens[..., node], q[..., node, :]
        tested = (current == parent) & (token >= 0)
        chance, proposed = (d.gather(-1, token.clamp_min(0)[..., None])[..., 0] for d in (target, own))
        accept = tested & (accept_uniforms[..., node] * proposed < chance)
        target = residual(target, own).where((tested & ~accept)[..., None], target)
        target = p[..., node + 1, :].where(accept[..., None], target)
        path = torch.where(accept[..., None] & (place == accepted[..., None]), node, path)
        current = torch.where(accept, node, current)
        accepted = accepted + accept
    return TreeOutcome(accepted, sample(target, final_uniform), path)


def recursive_thresholds(p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> TreePlan:
    """The plan of `recursive_rejection`."""
    left, accept, recovered = list(p.unbind(-2)), [], [p]
    for node, parent in enumerate(parents):
        token, own = draft_tokens[..., node], q[..., node, :]
        index = token.clamp_min(0)[..., None]
        ratio = (left[parent + 1].gather(-1, index) / own.gather(-1, index))[..., 0].nan_to_num(0.0)
        accept.append(ratio.where(token >= 0, 0.0))
        left[parent + 1] = residual(left[parent + 1], own).where((token >= 0)[..., None], left[parent + 1])
        recovered.append(left[parent + 1][..., None, :])
    return TreePlan(torch.stack(accept, dim=-1), torch.cat(recovered, dim=-2))


recursive_rejection = TreeRule(_recursive_rejection)
"""Recursive rejection: test the children of the last accepted node one after the other, in their order.

A child x is accepted with probability min(1, r(x)/q(x)), where r is p after the parent to begin with, and becomes
norm(max(0, r - q)) with each rejection. If none is accepted, the last token is sampled from r. Exact if each q is the
distribution of that node's token given the tokens of all nodes before it, as for independent samples. On a chain it is
Algorithm 1.

>>> p = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]])
>>> q = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
>>> uniforms = torch.tensor([0.7, 0.1])
>>> recursive_rejection(p, q, torch.tensor([0, 1]), (-1, -1), uniforms, torch.tensor(0.3))
TreeOutcome(accepted=tensor(1), token=tensor(1), path=tensor([1]))
"""


def _traversal(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    parents: tuple[int, ...],
    accept_uniforms: Tensor,
    final_uniform: Tensor,
) -> TreeOutcome:
    plan = traversal_thresholds(p, q, draft_tokens, parents)
    order = list(leaves_first(parents))
    node = torch.full_like(final_uniform, -1, dtype=torch.int64)
    target = plan.recovered[..., 0, :]
    for i in reversed(order):  # the first that passes is assigned last
        passed = accept_uniforms[..., i] < plan.accept[..., i]
        node = torch.where(passed, i, node)
        target = plan.recovered[..., i + 1, :].where(passed[..., None], target)
    return path_to(node, parents, sample(target, final_uniform))


traversal_verification = TreeRule(_traversal)
"""Test the nodes from the leaves up, subtree after subtree; the first that passes is accepted with all its ancestors.

Each node has a weight w, 1 for the root, and r, to begin with p after it. Its children x, in their order, begin with
the weight min(1, w r(x) / q(x)). When the whole subtree of x has been rejected, with m = sum max(0, w r - q) the node
goes on with r = norm(max(0, w r - q)) and w = m / (m + 1 - w). When no child is left, the node itself is accepted with
probability w, and then the last token is sampled from r. Exact if each q is the distribution of that node's token given
the tokens of all nodes before it. On a chain it is block verification, at depth 1 recursive rejection.
"""


def traversal_thresholds(p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> TreePlan:
    """The plan of `traversal_verification`; `recovered` `(..., nodes + 1, vocab)` belong to the root and each node."""
    children = children_of(parents)
    accept: list[Tensor] = [torch.empty(0)] * len(parents)
    recovered: list[Tensor] = [torch.empty(0)] * (len(parents) + 1)

    def visit(node: int, weight: Tensor) -> None:
        left = p[..., node + 1, :]
        for child in children.get(node, []):
            own, token = q[..., child, :], draft_tokens[..., child]
            index = token.clamp_min(0)[..., None]
            ratio = (left.gather(-1, index) / own.gather(-1, index))[..., 0].nan_to_num(0.0)
            visit(child, (weight * ratio).nan_to_num(0.0).clamp_max(1).where(token >= 0, 0.0))
            mass = _remaining(weight, left, own).where((token >= 0)[..., None], 0.0)
            kept = mass.sum(-1)
            after = (kept / (kept + 1 - weight)).nan_to_num(1.0)  # 0/0: the child is accepted with certainty
            weight = after.where(token >= 0, weight)
            left = (mass / kept[..., None]).where((kept > 0)[..., None], left)  # or nothing is ever sampled from it
        recovered[node + 1] = left
        if node >= 0:
            accept[node] = weight

    visit(-1, torch.ones_like(p[..., 0, 0]))
    return TreePlan(torch.stack(accept, dim=-1) if accept else q[..., 0], torch.stack(recovered, dim=-2))


def _remaining(weight: Tensor, left: Tensor, own: Tensor) -> Tensor:
    """max(0, w r - q) `(..., vocab)`: what a rejected child leaves of its parent."""
    return (weight[..., None] * left - own).clamp_min(0)


@lru_cache
def leaves_first(parents: tuple[int, ...]) -> tuple[int, ...]:
    """All nodes, every subtree before its node, earlier siblings first.

    >>> leaves_first((-1, -1, 0, 0, 1))
    (2, 3, 0, 4, 1)
    """
    children = children_of(parents)

    def below(node: int) -> list[int]:
        return [found for child in children.get(node, []) for found in (*below(child), child)]

    return tuple(below(-1))


def _best_path(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    parents: tuple[int, ...],
    accept_uniforms: Tensor,
    final_uniform: Tensor,
) -> TreeOutcome:
    plan, nodes = chosen_path(p, q, draft_tokens, parents)
    accepted, token = longest_accepted(plan, accept_uniforms[..., : plan.accept.shape[-1]], final_uniform)
    last = torch.cat([torch.full_like(nodes[..., :1], -1), nodes], dim=-1).gather(-1, accepted[..., None])[..., 0]
    return path_to(last, parents, token)


best_path_block = TreeRule(_best_path)
"""Greedy multi-path block verification (GBV) with the order p/q: choose one of k sampled chains, then verify it.

After each prefix the tokens are ordered by decreasing p/q, lower ids first among equals; of the k chains the first in
the lexicographic order is chosen. If L and M are the q of all chains behind a prefix in that order and of those that
begin with it, the chosen chain begins with it with probability (L + M)^k - L^k. Block verification then takes the
conditional distributions that follow for q. Exact for k independent chains of one length (`paths`), no token -1.
"""


def paths(parents: tuple[int, ...]) -> list[list[int]]:
    """The nodes of each chain of a tree that is k separate chains of one length from the root.

    Raises `ValueError` for any other tree.

    >>> paths((-1, -1, 0, 1))
    [[0, 2], [1, 3]]
    """
    children = children_of(parents)
    found = [[node] for node in children.get(-1, [])]
    for path in found:
        while path[-1] in children:
            path += children[path[-1]][:1]
    if sum(map(len, found)) != len(parents) or len(set(map(len, found))) > 1:
        raise ValueError(
            f"parents are {parents}; this rule needs separate chains of one length, such as (-1, -1, 0, 1)"
        )
    return found


def chosen_path(p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> tuple[ChainPlan, Tensor]:
    """The plan of block verification for the chosen chain, and its nodes `(..., depth)`."""
    nodes = torch.tensor(paths(parents), device=p.device)  # (k, depth)
    k, depth = nodes.shape
    alive = torch.ones_like(draft_tokens[..., :k], dtype=torch.bool)
    below, own = torch.zeros_like(p[..., 0, 0].double()), torch.ones_like(p[..., 0, 0].double())  # L and M
    lead = alive.to(torch.int64).argmax(-1)
    p_rows, q_rows, tokens = [p[..., 0, :]], [], []
    for level in range(depth):
        here = nodes[:, level]
        q_here = _pick(q[..., here, :], lead)
        ratio = (p_rows[-1] / q_here).nan_to_num(-1.0, posinf=torch.inf)
        order = ratio.sort(dim=-1, descending=True, stable=True).indices
        rank = order.argsort(-1)
        ranks = rank.gather(-1, draft_tokens[..., here]).where(alive, rank.shape[-1])
        best = ranks.amin(-1, keepdim=True)
        alive = ranks == best
        lead = alive.to(torch.int64).argmax(-1)
        ordered = q_here.double().gather(-1, order)
        behind = (ordered.sum(-1, keepdim=True) - ordered.cumsum(-1)).clamp_min(0).gather(-1, rank)
        lower = below[..., None] + own[..., None] * behind
        each = own[..., None] * q_here
        skewed = q_here * _power_sum(lower + each, lower, k) / _power_sum(below + own, below, k)[..., None]
        token = _pick(draft_tokens[..., here, None], lead)
        below, own = (part.gather(-1, token)[..., 0] for part in (lower, each))
        q_rows.append(skewed.to(q.dtype))
        tokens.append(token[..., 0])
        p_rows.append(_pick(p[..., here + 1, :], lead))
    plan = block_plan(torch.stack(p_rows, dim=-2), torch.stack(q_rows, dim=-2), torch.stack(tokens, dim=-1))
    return plan, nodes[lead]


def best_path_thresholds(p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> TreePlan:
    """The plan of `best_path_block`; uniforms after the first `depth` are not read."""
    plan, _ = chosen_path(p, q, draft_tokens, parents)
    unused = torch.zeros_like(q[..., plan.accept.shape[-1] :, 0])
    return TreePlan(torch.cat([plan.accept, unused], dim=-1), plan.recovered)


def _pick(rows: Tensor, index: Tensor) -> Tensor:
    """`rows` `(..., k, n)` at `index` `(...,)`."""
    return rows.take_along_dim(index[..., None, None], dim=-2)[..., 0, :]


def _power_sum(a: Tensor, b: Tensor, k: int) -> Tensor:
    """(a^k - b^k) / (a - b) without cancellation."""
    return torch.stack([a**j * b ** (k - 1 - j) for j in range(k)]).sum(0)


@dataclass(frozen=True)
class SelectionTree:
    """The function of a tree rule that applies `plan` to the children of the root, of the child accepted, and so on."""

    plan: SelectionPlanner

    def __call__(
        self,
        p: Tensor,
        q: Tensor,
        draft_tokens: Tensor,
        parents: tuple[int, ...],
        accept_uniforms: Tensor,
        final_uniform: Tensor,
    ) -> TreeOutcome:
        current = torch.full_like(final_uniform, -1, dtype=torch.int64)  # the last node accepted; -1 is the root
        target = p[..., 0, :]  # what the last token is sampled from
        for parent, children in children_of(parents).items():  # parents come before their children
            plan = self.plan(p[..., parent + 1, :], q[..., children, :], draft_tokens[..., children])
            passed = (accept_uniforms[..., children] < plan.accept) & (current == parent)[..., None]
            target = plan.recovered.where((current == parent)[..., None], target)
            for i, child in reversed(list(enumerate(children))):  # the first that passes is assigned last
                target = p[..., child + 1, :].where(passed[..., i, None], target)
                current = torch.where(passed[..., i], child, current)
        return path_to(current, parents, sample(target, final_uniform))

    def thresholds(self, p: Tensor, q: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> TreePlan:
        """What the uniforms are compared with, for `specnb.enumeration`."""
        accept, recovered = torch.zeros_like(q[..., 0]), [p]
        for parent, children in children_of(parents).items():
            plan = self.plan(p[..., parent + 1, :], q[..., children, :], draft_tokens[..., children])
            accept[..., children] = plan.accept
            recovered.append(plan.recovered[..., None, :])
        return TreePlan(accept, torch.cat(recovered, dim=-2))


top_k_tree = TreeRule(SelectionTree(top_k_plan))
"""EAGLE's rule for top-k trees, q = 1: accept a child x with r(x), else set r(x) to 0 and renormalise. Exact for trees
whose tokens were chosen without looking at p."""
k_sequential_tree = TreeRule(SelectionTree(k_sequential_plan))
"""SpecTr's k-sequential selection at every node; exact for `tree_schemes.independent_children`, none of them -1."""
spechub_tree = TreeRule(SelectionTree(spechub_plan))
"""SpecHub at every node; exact for `tree_schemes.hub_children`, two at each node that has any."""


def _greedy_tree(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    parents: tuple[int, ...],
    accept_uniforms: Tensor,
    final_uniform: Tensor,
) -> TreeOutcome:
    return _matching(p.argmax(-1), draft_tokens, parents)


def _exact_match_tree(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    parents: tuple[int, ...],
    accept_uniforms: Tensor,
    final_uniform: Tensor,
) -> TreeOutcome:
    uniforms = torch.cat([final_uniform[..., None], accept_uniforms], dim=-1)
    return _matching(sample(p, uniforms), draft_tokens, parents)


greedy_tree = TreeRule(_greedy_tree)
"""Follow the child that is the target's argmax, as long as there is one; then emit the argmax. q is not read."""
exact_match_tree = TreeRule(_exact_match_tree)
"""Follow the child that equals the target's own sample after the node; then emit the sample. Exact; q is not read."""


def children_of(parents: tuple[int, ...]) -> dict[int, list[int]]:
    """The children of each node that has any, in their order; the root is -1. Raises `ValueError` for a later parent.

    >>> children_of((-1, -1, 0))
    {-1: [0, 1], 0: [2]}
    """
    node_depths(parents)
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return dict(sorted(found.items()))


def path_to(node: Tensor, parents: tuple[int, ...], token: Tensor) -> TreeOutcome:
    """The outcome in which `node` `(...,)` is the last one accepted, -1 for none, and `token` follows.

    >>> path_to(torch.tensor([2, -1]), (-1, -1, 1), torch.tensor([5, 6])).path
    tensor([[ 1,  2],
            [-1, -1]])
    """
    depths = node_depths(parents)
    rows = [[-1] * max(depths, default=0)]  # of the root, then of each node
    for i, parent in enumerate(parents):
        rows.append([i if level == depths[i] - 1 else known for level, known in enumerate(rows[parent + 1])])
    paths = torch.tensor(rows, dtype=torch.int64, device=node.device)
    accepted = torch.tensor([0, *depths], device=node.device)
    return TreeOutcome(accepted[node + 1], token, paths[node + 1])


def _matching(target_tokens: Tensor, draft_tokens: Tensor, parents: tuple[int, ...]) -> TreeOutcome:
    """Follows the target's tokens `(..., nodes + 1)`, after the root and each node, as far as the tree has them."""
    current = torch.full_like(target_tokens[..., 0], -1)
    for node, parent in enumerate(parents):
        accept = (current == parent) & (draft_tokens[..., node] == target_tokens[..., parent + 1])
        current = torch.where(accept, node, current)
    token = target_tokens.gather(-1, current[..., None] + 1)[..., 0]
    return path_to(current, parents, token)
