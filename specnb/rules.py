"""Verification rules: which draft tokens of a step are accepted, and which token follows them.

A rule is a plan over a tree of draft tokens, which `PlannedRule` carries out and
`specnb.enumeration` multiplies out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specnb.arguments import shown
from specnb.distributions import one_hot, residual, sample, unnormalised_residual
from specnb.trees import SCHEMES, Scheme, TokenTree, chain


class Outcome(NamedTuple):
    """The decision of a rule.

    Attributes
    ----------
    accepted : (...,)
        Number of accepted draft tokens.
    token : (...,)
        The token that follows them: recovered, or bonus.
    path : (..., depth)
        The accepted nodes from the root down, then -1; None if no tree was given.
    """

    accepted: Int[Tensor, "*batch"]
    token: Int[Tensor, "*batch"]
    path: Int[Tensor, "*batch depth"] | None = None


# A `PlannedRule`, or a function of (p, q, draft_tokens, accept_uniforms, final_uniform), and of the
# tree if it verifies trees
Rule = Callable[..., Outcome]


class Plan(NamedTuple):
    """What a rule does with the draft tokens of a step.

    Attributes
    ----------
    accept : (..., nodes)
        Probability of accepting each node once it is visited; above 1 counts as 1, NaN as 0.
    after : (..., nodes + 1, vocab)
        Distribution of the last token if the step ends at the root or at a node, up to a factor.
    less : (..., n, vocab)
        Subtracted from `after` at the first n entries: the last token is sampled from the positive
        part of the difference, or from `after` if there is none.
    """

    accept: Tensor
    after: Tensor
    less: Tensor | None = None

    def at(self, entry: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch vocab"]:
        after = _row(self.after, entry)
        if self.less is None or self.less.shape[-2] == 0:
            return after
        known = self.less.shape[-2]
        less = _row(self.less, entry.clamp_max(known - 1)).where((entry < known).unsqueeze(-1), 0.0)
        return unnormalised_residual(after, less)


Planner = Callable[[Tensor, Tensor, Tensor, TokenTree], Plan]


@dataclass(frozen=True, repr=False)
class PlannedRule:
    """A rule that carries out a plan.

    Parameters
    ----------
    plan
        A pure function of p `(..., nodes + 1, vocab)`, q `(..., nodes, vocab)`, the draft tokens
        `(..., nodes)` (-1, with q = 0, for none) and a `TokenTree`. Equal plans make equal rules.
    up
        False: go from the root to the first child that is accepted, and on from there. True: visit
        every subtree before its node; the first node that passes is accepted with its ancestors.
    schemes
        Ways of sampling siblings for which the rule is exact; `()` for chains only.

    Notes
    -----
    On a chain a plan is exact if a(x) q(x) <= p(x) for the acceptance probability a(x) of every
    token x, and the last token after a rejection is sampled from p - a q.
    """

    plan: Planner
    up: bool = False
    schemes: tuple[Scheme, ...] = SCHEMES

    def __post_init__(self) -> None:
        name = getattr(self.plan, "__name__", repr(self.plan))
        # Set as functools.wraps does, so that `inspect` and `doctest` find the plan.
        for key, value in (("__name__", name), ("__doc__", self.plan.__doc__), ("__wrapped__", self.plan)):
            object.__setattr__(self, key, value)

    def __repr__(self) -> str:
        return str(self.__name__)  # type: ignore[attr-defined]

    def __call__(
        self,
        p: Float[Tensor, "*batch entries vocab"],
        q: Float[Tensor, "*batch nodes vocab"],
        draft_tokens: Int[Tensor, "*batch nodes"],
        accept_uniforms: Float[Tensor, "*batch nodes"],
        final_uniform: Float[Tensor, "*batch"],
        tree: TokenTree | Sequence[int] | None = None,
    ) -> Outcome:
        shape = _chain(draft_tokens.shape[-1]) if tree is None else tree
        if not isinstance(shape, TokenTree):
            shape = TokenTree(shape, draft_tokens.device)
        plan = self.plan_for(p, q, draft_tokens, shape)
        passed = accept_uniforms < plan.accept
        entry = shape.first_from_leaves(passed) if self.up else shape.last_from_root(passed)
        token = sample(plan.at(entry), final_uniform)
        return Outcome(entry, token) if tree is None else Outcome(shape.depths[entry], token, shape.paths[entry])

    def plan_for(self, p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
        """The plan, which accepts no -1; shapes are checked, because others would broadcast."""
        nodes, vocab = p.shape[-2] - 1, p.shape[-1]
        if q.shape[-2:] != (nodes, vocab) or draft_tokens.shape[-1:] != (nodes,):
            raise ValueError(
                f"p is {tuple(p.shape)}, q {tuple(q.shape)} and draft_tokens {tuple(draft_tokens.shape)}; they must be "
                "(..., nodes + 1, vocab), (..., nodes, vocab) and (..., nodes)"
            )
        plan = self.plan(p, q, draft_tokens, tree)
        wanted = [(*p.shape[:-2], nodes), tuple(p.shape)]
        if (less := getattr(plan, "less", None)) is not None:
            wanted.append((*p.shape[:-2], min(less.shape[-2], nodes + 1) if less.ndim > 1 else 0, vocab))
        names = Plan._fields[: len(wanted)]
        shapes = [getattr(getattr(plan, part, None), "shape", None) for part in names]
        if shapes != wanted:
            raise TypeError(f"the plan {self} has {', '.join(names)} of the shapes {shapes}; they must be {wanted}")
        return plan._replace(accept=plan.accept.where(draft_tokens >= 0, 0.0))


def require_outcome(outcome: Any, rows: int, tree: TokenTree | None = None) -> None:
    """Raise `TypeError` unless a rule returned int64 tensors `(rows,)`, and a path if it verifies a tree."""
    wanted = {"accepted": (rows,), "token": (rows,)} | ({} if tree is None else {"path": (rows, tree.depth)})
    parts = {name: part for name in Outcome._fields if (part := getattr(outcome, name, None)) is not None}
    shapes = {name: tuple(part.shape) for name, part in parts.items() if getattr(part, "dtype", None) == torch.int64}
    if shapes != wanted or len(parts) > len(shapes):
        raise TypeError(f"the rule returned {shown(outcome)}; it must return an Outcome of int64 tensors {wanted}")


@cache
def _chain(gamma: int) -> TokenTree:
    return TokenTree(chain(gamma))  # on any device: no rule reads the tables of a chain


# From the root down


@PlannedRule
def token_verification(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Accept x with probability min(1, p(x)/q(x)); after a rejection replace p by the residual.

    Notes
    -----
    Algorithm 1 (arXiv:2211.17192), exact for any p and q (appendix A.1). On a tree the residual is
    tested against the next sibling (arXiv:2305.09781, 2402.14160), which is exact if each q is the
    distribution of its token given all nodes before it.

    Examples
    --------
    >>> p, q = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]), torch.tensor([[0.2, 0.2, 0.6]])
    >>> x, r, u = torch.tensor([2]), torch.tensor([0.3]), torch.tensor(0.5)
    >>> token_verification(p, q, x, r, u)  # r < p(x) / q(x) = 1/3
    Outcome(accepted=tensor(1), token=tensor(1), path=None)
    """
    if tree.is_chain:
        return Plan(acceptance_ratio(p[..., :-1, :], q, draft_tokens), p, less=q)
    accept, remaining = torch.zeros_like(draft_tokens, dtype=torch.float64), p.clone()
    for _, nodes, parents in tree.by_rank:
        before, proposed = remaining[..., parents, :], q[..., nodes, :]
        accept[..., nodes] = acceptance_ratio(before, proposed, draft_tokens[..., nodes])
        remaining[..., parents, :] = residual(before, proposed).to(remaining.dtype)
    return Plan(accept, remaining)


recursive_rejection = token_verification  # its name on trees


@PlannedRule
def exact_match(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Accept x with probability p(x); after a rejection set p(x) to 0. Exact; q is not read.

    Notes
    -----
    The same as sampling the target's token and keeping it if a child has it. On a chain x is accepted
    with probability sum p q.

    Examples
    --------
    >>> p = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    >>> exact_match(p, p[:1], torch.tensor([1]), torch.tensor([0.7]), torch.tensor(0.0)).accepted
    tensor(0)
    """
    return token_verification.plan(p, one_hot(draft_tokens, p.shape[-1], p.dtype), draft_tokens, tree)


@PlannedRule
def rejection_sampling(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Accept x with probability p(x)/(M q(x)), M = max p/q; otherwise sample from p. Exact (appendix
    A.2, tried once)."""
    before = p[..., tree.parent_entries, :]
    least = torch.where(before > 0, q / before, torch.inf).amin(dim=-1)
    return Plan(acceptance_ratio(before, q, draft_tokens) * least, p)


@dataclass(frozen=True)
class _WithLenience:
    lenience: float

    def __post_init__(self) -> None:
        if not (hasattr(self.lenience, "__float__") and 0 < self.lenience <= 1):
            raise ValueError(f"lenience is {self.lenience!r}; it must lie in (0, 1], where 1 is exact")


class _Lenient(_WithLenience):
    def __call__(self, p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
        plan = token_verification.plan(p, q, draft_tokens, tree)
        return plan._replace(accept=plan.accept / self.lenience)

    def __repr__(self) -> str:
        return f"lenient_verification({self.lenience})"


def lenient_verification(lenience: float) -> PlannedRule:
    """Algorithm 1 with q multiplied by l in (0, 1] before the comparison (appendix A.5). Not exact for l < 1.

    No token is emitted with a probability above p(x)/l.

    Examples
    --------
    >>> lenient_verification(0.5) == lenient_verification(0.5)
    True
    """
    return PlannedRule(_Lenient(lenience))


class _LenientGreedy(_WithLenience):
    def __call__(self, p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
        best, before = p.argmax(dim=-1), p[..., tree.parent_entries, :]
        chosen = before.gather(-1, draft_tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        near_best = chosen > self.lenience * before.amax(dim=-1)
        accept = (draft_tokens == best[..., tree.parent_entries]) | (near_best & (draft_tokens >= 0))
        return Plan(accept.to(p.dtype), torch.zeros_like(p).scatter(-1, best.unsqueeze(-1), 1.0))

    def __repr__(self) -> str:
        return f"lenient_greedy_verification({self.lenience})"


def lenient_greedy_verification(lenience: float) -> PlannedRule:
    """Accept the target's argmax, and any x with p(x) > l max p; then emit the argmax. Not exact for l < 1.

    p must not be one-hot: give `generate` temperature 1 and the drafter temperature 0. Appendix A.5 with
    its inequality reversed.
    """
    return PlannedRule(_LenientGreedy(lenience))


@PlannedRule
def greedy_verification(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Accept draft tokens while they are the target's argmax; then emit the argmax.

    Exact at temperature 0, where it is Algorithm 1.

    Examples
    --------
    >>> p = torch.tensor([[0.4, 0.6], [0.7, 0.3]])
    >>> greedy_verification(p, p[:1], torch.tensor([1]), torch.zeros(1), torch.tensor(0.0)).accepted
    tensor(1)
    """
    return _LenientGreedy(1.0)(p, q, draft_tokens, tree)


# From the leaves up


@partial(PlannedRule, up=True)
def traversal_verification(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Test every node when its subtree has been rejected. Exact; accepts at least as many as token verification.

    Notes
    -----
    Block verification (arXiv:2403.10444, Algorithm 2) on a chain, where no exact rule accepts more;
    traversal verification (arXiv:2505.12398) on a tree, derived here.

    Each node has a weight w, 1 at the root, and a distribution r, at first p after it. A child x
    begins with the weight min(1, w r(x)/q(x)). When its subtree has been rejected, with m = sum
    max(0, w r - q), its parent goes on with r = norm(max(0, w r - q)) and w = m / (m + 1 - w). After
    the last child w is the probability of the node, and r the last token's distribution.
    """
    weights = [torch.ones_like(p[..., 0, 0])] * p.shape[-2]  # of each entry
    scales = list(weights)  # the weight divided by the mass of `remaining`, which is not normalised
    # After the last token that a step emits there may be NaN, on which nothing rests. With any distribution
    # in its place the nodes before it are accepted as they should.
    remaining = p.where(~p[..., :1].isnan(), 1 / p.shape[-1])
    certain = one_hot(draft_tokens, q.shape[-1], q.dtype)
    q = q.where(~q.sum(dim=-1, keepdim=True).isnan(), certain)
    for turn, (numbers, nodes, parents) in enumerate(tree.by_turns):
        before, proposed = remaining[..., parents, :], q[..., nodes, :]
        ratios = acceptance_ratio(before, proposed, draft_tokens[..., nodes]).nan_to_num(0.0).to(p.dtype).unbind(-1)
        entries = [tree.parents[node] + 1 for node in numbers]
        for node, entry, ratio in zip(numbers, entries, ratios, strict=True):
            weights[node + 1] = scales[node + 1] = (scales[entry] * ratio).clamp_max(1)
        weight = torch.stack([weights[entry] for entry in entries], dim=-1)
        scale = torch.stack([scales[entry] for entry in entries], dim=-1) if turn else weight
        excess = (scale.unsqueeze(-1) * before - proposed).clamp_min(0)
        kept = excess.sum(dim=-1)
        # 0/0 means that the child is accepted with certainty.
        weight = (kept / (kept + 1 - weight)).nan_to_num(1.0)
        remaining[..., parents, :] = excess.where(kept.unsqueeze(-1) > 0, before).to(remaining.dtype)
        for entry, new_weight in zip(entries, weight.unbind(-1), strict=True):
            weights[entry] = new_weight
        if not tree.is_chain:
            scale = (weight / kept).nan_to_num(0.0, posinf=0.0)
            for entry, new_scale in zip(entries, scale.unbind(-1), strict=True):
                scales[entry] = new_scale
    return Plan(torch.stack(weights, dim=-1)[..., 1:], remaining)


block_verification = traversal_verification  # its name on chains


def _row(rows: Float[Tensor, "*batch n vocab"], index: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch vocab"]:
    return rows.take_along_dim(index[..., None, None], dim=-2).squeeze(-2)


def acceptance_ratio(mass: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """mass(x) / q(x) `(..., n)` of each token, in float64: 0 if there is no token, NaN if both are 0."""
    index = tokens.clamp_min(0).unsqueeze(-1)
    ratio = mass.gather(-1, index).squeeze(-1).double() / q.gather(-1, index).squeeze(-1)
    return ratio.where(tokens >= 0, 0.0)
