"""Verification rules: which draft tokens of a step are accepted, and which token follows them.

A rule is a *plan* over a tree of draft tokens (`specnb.trees`); a chain is the tree whose node i
follows node i - 1. A plan is a pure function of p, q, the draft tokens and the tree. It knows no
model, cache, generator or device. Leading dimensions are batched, shapes are static, and nothing
waits for the device:

    p             (..., nodes + 1, vocab)  the target's distributions after the root and after each
                  node
    q             (..., nodes, vocab)      the distribution each node was sampled from, given all
                  nodes before it
    draft_tokens  (..., nodes)             int64; -1 where no token was proposed (its q is zero)
    tree          a `TokenTree`

It gives the probability of accepting each node, and for each entry (root or node) the distribution
from which the last token of the step comes if the step ends there. Nodes are visited in one of two
ways:

- *down*: from the root to the first child that is accepted, from there on in the same way, until
  there is none
- *up*: every subtree before its node, earlier siblings first; the first node that is accepted is so
  with its ancestors

`PlannedRule` carries plans out with one uniform a node and one for the last token;
`specnb.enumeration` multiplies them out. Equal plans make equal rules, so a compiled step is
reused.

A rule of your own is a plan. On a chain it is exact if, with a(x) the probability that a draft
token x is accepted, a(x) q(x) <= p(x) for every x, and the last token after a rejection is sampled
from p - a q: `after` is p and `less` is a q. Who changes `accept` has to change `less`. Here a
draft token x is proposed and accepted with min(p, q) / 2:

>>> @partial(PlannedRule, schemes=())  # for chains only
... def half_as_often(p, q, draft_tokens, tree):
...     plan = token_verification.plan(p, q, draft_tokens, tree)
...     before = p[..., tree.parent_entries, :]
...     return Plan(plan.accept.clamp_max(1) / 2, p, less=torch.minimum(before, q) / 2)
>>> p = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
>>> half_as_often(p, p[:1], torch.tensor([1]), torch.tensor([0.4]), torch.tensor(0.3))
Outcome(accepted=tensor(1), token=tensor(0), path=None)
>>> from specnb.enumeration import completed, step_distribution
>>> even = lambda prefix: torch.tensor([0.5, 0.5]).double()
>>> completed(step_distribution(half_as_often, even, even, gamma=1), even, length=2).tolist()
[[0.25, 0.25], [0.25, 0.25]]

Sources (read where nothing else is said)
- Token verification, rejection sampling, lenience: Leviathan et al., arXiv 2211.17192, Algorithm 1,
  A.2 and A.5.
- Its recursion over siblings: Stratos' notes on speculative decoding, section 2; SpecInfer (Miao et
  al., 2305.09781, as these notes restate it); recursive rejection sampling (Jeon et al.,
  2402.14160, abstract).
- EAGLE's rule for top-k trees: its authors' answers in github.com/SafeAILab/EAGLE issues 93, 183
  and 221.
- Block verification: Sun et al., 2403.10444, Algorithm 2 and equation (4). Traversal: Weng et al.,
  2505.12398 (abstract); the recursion here is derived from block verification and proved by
  enumeration.
SpecTr, SpecHub and rules whose exactness is disputed are in `studies.rules`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from specnb.distributions import residual, sample, unnormalised_residual
from specnb.number_checks import shown
from specnb.trees import SCHEMES, Scheme, TokenTree, chain


class Outcome(NamedTuple):
    """The decision of a rule.

    accepted  (...,) int64        number of accepted draft tokens, at most gamma or the depth of the
              tree
    token     (...,) int64        the token that follows them: recovered after a rejection, or a
              bonus token
    path      (..., depth) int64  the accepted nodes, from the root down, then -1; None if no tree
              was given: then they
                                  are 0, 1, ..., accepted - 1
    """

    accepted: Int[Tensor, "*batch"]
    token: Int[Tensor, "*batch"]
    path: Int[Tensor, "*batch depth"] | None = None


Rule = Callable[..., Outcome]
"""A `PlannedRule`, or any function of `(p, q, draft_tokens, accept_uniforms, final_uniform)`, and
the tree if it is to verify trees."""


class Plan(NamedTuple):
    """What a rule does with given draft tokens.

    accept  (..., nodes)             that a node is accepted once it is visited; above 1 counts as
            1, NaN as 0
    after   (..., nodes + 1, vocab)  what the last token is sampled from where the step ends, up to
            a factor
    less    (..., n, vocab)          what `after` is reduced by at the first n entries: max(0, after
            - less), or
                                     `after` if that is 0; calculated only where the step ends, so
                                     it costs less
    """

    accept: Tensor
    after: Tensor
    less: Tensor | None = None

    def at(self, entry: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch vocab"]:
        """What the last token is sampled from at `entry`, up to a factor."""
        after = _row(self.after, entry)
        if self.less is None or self.less.shape[-2] == 0:
            return after
        known = self.less.shape[-2]
        less = _row(self.less, entry.clamp_max(known - 1)).where((entry < known).unsqueeze(-1), 0.0)
        return unnormalised_residual(after, less)


Planner = Callable[[Tensor, Tensor, Tensor, TokenTree], Plan]


@dataclass(frozen=True, repr=False)
class PlannedRule:
    """The rule that carries `plan` out, `up` from the leaves or down from the root.

    `schemes` are the ways to sample children of one node (`specnb.trees`) for which it is as exact
    as for a chain: all, unless given; none, `schemes=()`, for a rule that was enumerated on chains
    only.

    p, q, draft_tokens  as in the module
    accept_uniforms     (..., nodes)  one uniform in [0, 1) for each node
    final_uniform       (...,)        the uniform of the last token
    tree                a `TokenTree` or its parents; None for a chain

    >>> p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]])  # gamma = 1, vocab = 3
    >>> q = torch.tensor([[0.2, 0.2, 0.6]])
    >>> token_verification(p, q, torch.tensor([2]), torch.tensor([0.3]), torch.tensor(0.5))  # 0.3 < p(2) / q(2) = 1/3
    Outcome(accepted=tensor(1), token=tensor(1), path=None)
    >>> token_verification(p, q, torch.tensor([2]), torch.tensor([0.4]), torch.tensor(0.5))
    Outcome(accepted=tensor(0), token=tensor(0), path=None)
    """

    plan: Planner
    up: bool = False
    schemes: tuple[Scheme, ...] = SCHEMES

    def __post_init__(self) -> None:
        _require_arguments("plan", self.plan, PLAN_ARGUMENTS)
        name = _name_of(self.plan)
        # As of a decorated function, so that `inspect` and `doctest` find the plan.
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
        shape = tree if isinstance(tree, TokenTree) else as_tree(tree, draft_tokens)
        plan = self.plan_for(p, q, draft_tokens, shape)
        passed = accept_uniforms < plan.accept
        entry = shape.first_from_leaves(passed) if self.up else shape.last_from_root(passed)
        token = sample(plan.at(entry), final_uniform)
        return Outcome(entry, token) if tree is None else Outcome(shape.depths[entry], token, shape.paths[entry])

    def plan_for(self, p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
        """The plan, with the shapes that it must have. Raises `TypeError` for another one, and
        `ValueError` for p, q and draft tokens that do not go together."""
        nodes, vocab = p.shape[-2] - 1, p.shape[-1]
        if q.shape[-2:] != (nodes, vocab) or draft_tokens.shape[-1:] != (nodes,):
            shapes = f"p is {tuple(p.shape)}, q {tuple(q.shape)} and draft_tokens {tuple(draft_tokens.shape)}"
            raise ValueError(f"{shapes}; they must be (..., nodes + 1, vocab), (..., nodes, vocab) and (..., nodes)")
        plan = self.plan(p, q, draft_tokens, tree)
        require_plan(plan, p, self)
        return plan


# What a rule of one's own must be: the loop and the enumeration ask for the same, in the same
# words.

PLAN_ARGUMENTS = ("p", "q", "draft_tokens", "tree")
RULE_ARGUMENTS = ("p", "q", "draft_tokens", "accept_uniforms", "final_uniform")


def require_rule(rule: Any, with_tree: bool = False) -> None:
    """Raises `TypeError` unless `rule` can be called as a rule is, with the tree if asked.

    >>> require_rule(lambda p, q, draft_tokens, accept_uniforms, final_uniform: None)
    """
    if not callable(rule) or isinstance(rule, type):
        raise TypeError(f"rule is {shown(rule)}; it must be an acceptance rule of specnb.rules, or such a function")
    _require_arguments("rule", rule, RULE_ARGUMENTS + ("tree",) * with_tree)


def _require_arguments(kind: str, function: Callable[..., Any], given: tuple[str, ...]) -> None:
    # a PlannedRule wraps its plan, which takes others.
    takes = inspect.signature(function, follow_wrapped=False)
    try:
        takes.bind(*given)
    except TypeError as error:
        own, needed = (", ".join(names) for names in (takes.parameters, given))
        hint = "; PlannedRule makes a rule of a plan" if tuple(takes.parameters) == PLAN_ARGUMENTS else ""
        raise TypeError(
            f"the {kind} {_name_of(function)} takes ({own}): {error}; it is called with ({needed}){hint}"
        ) from None


def require_plan(plan: Any, p: Tensor, rule: Any) -> None:
    """Raises `TypeError` unless `plan` is a `Plan` of the shapes that go with p
    `(..., nodes + 1, vocab)`.

    >>> require_plan(Plan(torch.ones(1), torch.ones(2, 3)), torch.ones(2, 3), "mine")
    """
    found = [getattr(plan, name, None) for name in ("accept", "after")]
    shapes = [tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__ for one in found]
    wanted = [(*p.shape[:-2], p.shape[-2] - 1), tuple(p.shape)]
    if shapes != wanted:
        raise TypeError(
            f"the plan of {_name_of(rule)} is a {type(plan).__name__} with accept and after {shapes}; it must be a "
            f"Plan of tensors of the shapes {wanted}"
        )


def require_outcome(outcome: Any, rows: int, with_path: bool = False) -> None:
    """Raises `TypeError` unless a rule returned an `Outcome` of int64 tensors `(rows,)`, with a
    path for a tree.

    >>> require_outcome(Outcome(torch.tensor([1]), torch.tensor([2])), rows=1)
    """
    found = [getattr(outcome, name, None) for name in Outcome._fields[:2]]
    if not all(isinstance(one, Tensor) and one.dtype == torch.int64 and one.shape == (rows,) for one in found):
        given = [(tuple(one.shape), one.dtype) if isinstance(one, Tensor) else type(one).__name__ for one in found]
        raise TypeError(
            f"the rule returned a {type(outcome).__name__} with accepted and token {given}; it must return an Outcome "
            f"of two int64 tensors of the shape {(rows,)}"
        )
    if (getattr(outcome, "path", None) is not None) != with_path:
        raise TypeError(
            f"the rule returned {'no' if with_path else 'a'} path of nodes; it must return one for a tree, and None "
            "for a chain"
        )


def _name_of(rule: Any) -> str:
    return str(getattr(rule, "__name__", repr(rule)))


def as_tree(parents: Sequence[int] | None, draft_tokens: Tensor) -> TokenTree:
    """The tree of `draft_tokens` `(..., nodes)` with these `parents`; a chain for None."""
    if parents is not None:
        return TokenTree(parents, draft_tokens.device)
    gamma = draft_tokens.shape[-1]
    return _CHAINS[gamma] if gamma < len(_CHAINS) else TokenTree(chain(gamma), tables=False)


# They hold no tensors, so no device.
_CHAINS = tuple(TokenTree(chain(gamma), tables=False) for gamma in range(33))


# From the root down


@PlannedRule
def token_verification(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Algorithm 1, and its recursion over siblings: exact for any p and q (appendix A.1).

    A draft token x is accepted with probability min(1, p(x)/q(x)); after a rejection p is replaced
    by the residual norm(max(0, p - q)), by which the next sibling is tested, or from which the last
    token is sampled. Exact if each q is the distribution of that node's token given all nodes
    before it: independent samples, samples without replacement, several draft models; not if
    repeats are merged into one child.

    >>> p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    >>> uniforms = torch.tensor([0.7, 0.1])
    >>> token_verification(p, q, torch.tensor([0, 1]), uniforms, torch.tensor(0.3), (-1, -1))
    Outcome(accepted=tensor(1), token=tensor(1), path=tensor([1]))
    """
    if tree.is_chain:
        return Plan(acceptance_ratio(p[..., :-1, :], q, draft_tokens), p, less=q)
    accept, left = torch.zeros_like(draft_tokens, dtype=torch.float64), p.clone()
    for _, nodes, parents in tree.by_rank:
        own, proposed = left[..., parents, :], q[..., nodes, :]
        accept[..., nodes] = acceptance_ratio(own, proposed, draft_tokens[..., nodes])
        left[..., parents, :] = residual(own, proposed).to(left.dtype)
    return Plan(accept, left)


recursive_rejection = token_verification
"""The name of token verification on trees."""


@PlannedRule
def exact_match(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Accept x with probability p(x); after a rejection set p(x) to 0 and renormalise. Exact; q is
    not read.

    So do samplers that sample the target's own token and keep it if a child has it, and EAGLE for
    top-k trees. It is token verification with q = 1 for tokens that were chosen without looking at
    p. A chain's token is accepted with probability sum p q, at most the overlap.

    >>> p = torch.tensor([[0.5, 0.5], [0.0, 1.0]])
    >>> exact_match(p, p[:1], torch.tensor([1]), torch.tensor([0.7]), torch.tensor(0.0))
    Outcome(accepted=tensor(0), token=tensor(0), path=None)
    """
    proposed = (draft_tokens >= 0).unsqueeze(-1).to(p.dtype)
    certain = torch.zeros_like(p[..., 1:, :]).scatter(-1, draft_tokens.clamp_min(0).unsqueeze(-1), proposed)
    return token_verification.plan(p, certain, draft_tokens, tree)


@PlannedRule
def rejection_sampling(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Appendix A.2, tried once: accept x with probability p(x)/(M q(x)), M = max p/q; otherwise
    sample from p.

    Exact. The acceptance probability is 1/M = min over x of q(x)/p(x), which is at most the
    overlap.

    >>> p, q = torch.tensor([[0.75, 0.25], [1.0, 0.0]]), torch.tensor([[0.5, 0.5]])  # M = 1.5
    >>> rejection_sampling(p, q, torch.tensor([1]), torch.tensor([0.4]), torch.tensor(0.9))  # 0.4 > 1/3
    Outcome(accepted=tensor(0), token=tensor(1), path=None)
    """
    before = p[..., tree.parent_entries, :]
    least = torch.where(before > 0, q / before, torch.inf).amin(dim=-1)
    return Plan(acceptance_ratio(before, q, draft_tokens) * least, p)


@dataclass(frozen=True)
class _WithLenience:
    lenience: float

    def __post_init__(self) -> None:
        if not 0 < self.lenience <= 1:
            allowed = "it must lie in (0, 1], where 1 is exact and less accepts more"
            raise ValueError(f"lenience is {self.lenience}; {allowed}")


class _Lenient(_WithLenience):
    def __call__(self, p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
        plan = token_verification.plan(p, q, draft_tokens, tree)
        return plan._replace(accept=plan.accept / self.lenience)

    def __repr__(self) -> str:
        return f"lenient_verification({self.lenience})"


def lenient_verification(lenience: float) -> PlannedRule:
    """Algorithm 1 with q multiplied by `lenience` l before the comparison (appendix A.5). Not exact
    for l < 1.

    Accepts x with probability min(1, p(x) / (l q(x))); after a rejection samples from Algorithm 1's
    residual. No token is emitted with probability above p(x)/l; the distribution of the emitted
    token and its distance from p are in `specnb.theory`. l = 1 is `token_verification`, bit for
    bit. Raises `ValueError` unless 0 < l <= 1.

    >>> p, q = torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> lenient_verification(0.5)(p, q, torch.tensor([1]), torch.tensor([0.7]), torch.tensor(0.9)).accepted
    tensor(1)
    >>> lenient_verification(0.5) == lenient_verification(0.5)
    True
    """
    return PlannedRule(_Lenient(lenience))


class _LenientGreedy(_WithLenience):
    def __call__(self, p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
        best, before = p.argmax(dim=-1), p[..., tree.parent_entries, :]
        near_best = _chosen(before, draft_tokens) > self.lenience * before.amax(dim=-1)
        accept = (draft_tokens == best[..., tree.parent_entries]) | (near_best & (draft_tokens >= 0))
        return Plan(accept.to(p.dtype), torch.zeros_like(p).scatter(-1, best.unsqueeze(-1), 1.0))

    def __repr__(self) -> str:
        return f"lenient_greedy_verification({self.lenience})"


def lenient_greedy_verification(lenience: float) -> PlannedRule:
    """Accept the target's argmax, and any x with p(x) > l max p (appendix A.5 with its inequality
    reversed).

    Then emit the argmax at the next position. p must not be one-hot: call `generate` with
    temperature 1 and give the drafter temperature 0. q and the uniforms are not read. The
    inequality is strict, so l = 1 is `greedy_verification`, ties included. Raises `ValueError`
    unless 0 < l <= 1.

    >>> p = torch.tensor([[0.4, 0.6], [0.7, 0.3]])
    >>> lenient_greedy_verification(0.5)(p, p[:1], torch.tensor([0]), torch.zeros(1), torch.tensor(0.0)).accepted
    tensor(1)
    """
    return PlannedRule(_LenientGreedy(lenience))


@PlannedRule
def greedy_verification(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Accept while a draft token is the target's argmax; then emit the argmax. q and the uniforms
    are not read.

    For one-hot p this is Algorithm 1 at temperature 0, where it is exact.

    >>> p = torch.tensor([[0.4, 0.6], [0.7, 0.3]])
    >>> greedy_verification(p, p[:1], torch.tensor([1]), torch.zeros(1), torch.tensor(0.0)).accepted
    tensor(1)
    """
    return _LenientGreedy(1.0)(p, q, draft_tokens, tree)


# From the leaves up


@partial(PlannedRule, up=True)
def traversal_verification(p: Tensor, q: Tensor, draft_tokens: Tensor, tree: TokenTree) -> Plan:
    """Every node is tested when its subtree has been rejected. Exact, as token verification;
    accepts as many or more.

    Each node has a weight w, 1 for the root, and r, to begin with p after it. Its children x, in
    their order, begin with the weight min(1, w r(x)/q(x)). When the whole subtree of x has been
    rejected, with m = sum max(0, w r - q) the node goes on with r = norm(max(0, w r - q)) and w = m
    / (m + 1 - w). When no child is left, the node itself is accepted with probability w, and then
    the last token is sampled from r. On a chain it is block verification, which no exact rule
    exceeds (notebook 08 has the proof); at depth 1 it is token verification.

    >>> p, q = torch.tensor([[0.2, 0.8]] * 3), torch.tensor([[0.8, 0.2]] * 2)
    >>> block_verification(p, q, torch.tensor([0, 1]), torch.tensor([0.9, 0.9]), torch.tensor(0.5))
    Outcome(accepted=tensor(2), token=tensor(1), path=None)
    """
    weights = [torch.ones_like(p[..., 0, 0])] * p.shape[-2]  # of each entry
    scales = list(weights)  # the weight divided by the mass of `left`, which is not normalised
    left = p.clone()
    for turn, (numbers, nodes, parents) in enumerate(tree.by_turns):
        own, proposed = left[..., parents, :], q[..., nodes, :]
        ratios = acceptance_ratio(own, proposed, draft_tokens[..., nodes]).nan_to_num(0.0).to(p.dtype).unbind(-1)
        entries = [tree.parents[node] + 1 for node in numbers]
        for node, entry, ratio in zip(numbers, entries, ratios, strict=True):
            weights[node + 1] = scales[node + 1] = (scales[entry] * ratio).clamp_max(1)
        weight = torch.stack([weights[entry] for entry in entries], dim=-1)
        scale = torch.stack([scales[entry] for entry in entries], dim=-1) if turn else weight
        rest = (scale.unsqueeze(-1) * own - proposed).clamp_min(0)
        kept = rest.sum(dim=-1)
        # 0/0: the child is accepted with certainty.
        weight = (kept / (kept + 1 - weight)).nan_to_num(1.0)
        left[..., parents, :] = rest.where(kept.unsqueeze(-1) > 0, own).to(left.dtype)
        for entry, new_weight in zip(entries, weight.unbind(-1), strict=True):
            weights[entry] = new_weight
        if not tree.is_chain:
            scale = (weight / kept).nan_to_num(0.0, posinf=0.0)
            for entry, new_scale in zip(entries, scale.unbind(-1), strict=True):
                scales[entry] = new_scale
    return Plan(torch.stack(weights, dim=-1)[..., 1:], left)


block_verification = traversal_verification
"""The name of traversal verification on chains (Sun et al., Algorithm 2): accept the longest prefix
that passes."""


def _row(rows: Float[Tensor, "*batch n vocab"], index: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch vocab"]:
    index = index[..., None, None].expand(*index.shape, 1, rows.shape[-1])
    return rows.gather(-2, index).squeeze(-2)


def _chosen(probs: Float[Tensor, "*batch n vocab"], tokens: Int[Tensor, "*batch n"]) -> Float[Tensor, "*batch n"]:
    """The probability of each token; that of token 0 where there is no token (-1)."""
    return probs.gather(-1, tokens.clamp_min(0).unsqueeze(-1)).squeeze(-1)


def acceptance_ratio(mass: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """mass(x) / q(x) of each token `(..., n)`, 0 where there is none; NaN where both are 0.

    In float64, where `u < p/q` and `u q < p` agree but for rounding in the 53rd bit. (Algorithm 1
    also accepts where they are equal, which happens with probability 0.)
    """
    index = tokens.clamp_min(0).unsqueeze(-1)
    ratio = mass.gather(-1, index).squeeze(-1).double() / q.gather(-1, index).squeeze(-1)
    return ratio.where(tokens >= 0, 0.0)
