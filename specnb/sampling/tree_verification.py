"""Verification rules for trees of draft tokens; two or more drafts of one token are a tree of depth 1.

A tree rule is a pure function, like the rules for chains in `specnb.sampling.verification`:

    p               (..., nodes + 1, vocab)  the target's distributions after the root and after each node
    q               (..., nodes, vocab)      the distribution each node was sampled from, given all nodes before it
    draft_tokens    (..., nodes)             the token of each node; -1 where none was proposed (its q is zero)
    parents         nodes integers           the parent of each node: an earlier node, or -1 for the root
    accept_uniforms (..., nodes)             one per node, in [0, 1)
    final_uniform   (...,)                   for the token that every step adds
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.sampling.distributions import residual, sample


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


def node_depths(parents: tuple[int, ...]) -> list[int]:
    """The depth of each node, 1 for children of the root.

    Raises `ValueError` for a parent that is neither -1 nor an earlier node.

    >>> node_depths((-1, -1, 0, 2))
    [1, 1, 2, 3]
    """
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(
                f"parents are {parents}, and node {node} has the parent {parent}; it must be an earlier node, or -1 "
                "for the root"
            )
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


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
