"""How the children of one node of a draft tree are sampled, and every tree with its probability.

A scheme is a function from q `(..., vocab)`, the drafter's distribution after the node, and the tokens `(...,)` of the
children proposed so far to the distribution `(..., vocab)` of the next child; zero where nothing is left to propose.
The drafter (`specnb.drafting.model`) and the enumeration below call the same function.

The tree of one step: where its nodes lie in the cache, at which positions, and what each of them sees.

The nodes of a tree occupy consecutive slots: the newest token of the row first (the root), then the draft tokens in
their order. The position of a node is that of the root plus its depth. A node sees the sequence up to the root, its
ancestors and itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.distributions import Conditional, normalise, one_hot

Scheme = Callable[[Tensor, Sequence[Tensor]], Tensor]


def independent_children(q: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """Independent samples from q; the same token may come twice.

    >>> independent_children(torch.tensor([0.5, 0.5]), [torch.tensor(0)])
    tensor([0.5000, 0.5000])
    """
    return q


def distinct_children(q: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """Samples without replacement: q without the earlier tokens, renormalised.

    >>> distinct_children(torch.tensor([0.5, 0.5]), [torch.tensor(0)])
    tensor([0., 1.])
    """
    left = q
    for tokens in earlier:
        left = left * (1 - one_hot(tokens.clamp_min(0), q.shape[-1], q.dtype) * (tokens >= 0).unsqueeze(-1))
    return normalise(left).nan_to_num(0.0)


def top_children(q: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """The most probable token, then the second, and so on: no randomness, so the distribution is one-hot.

    >>> top_children(torch.tensor([0.3, 0.6, 0.1]), [torch.tensor(1)])
    tensor([1., 0., 0.])
    """
    rank = len(earlier)
    if rank >= q.shape[-1]:
        return torch.zeros_like(q)
    return one_hot(q.topk(rank + 1, dim=-1).indices[..., rank], q.shape[-1], q.dtype)


def hub_children(q: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """SpecHub's pair: a sample from q, then the most probable token a; after a itself, one of the others.

    Nothing after a if q is one-hot. Raises `ValueError` for a third child.

    >>> hub_children(torch.tensor([0.5, 0.25, 0.25]), [torch.tensor(0)])
    tensor([0.0000, 0.5000, 0.5000])
    """
    if not earlier:
        return q
    if len(earlier) > 1:
        raise ValueError(f"SpecHub proposes 2 children; child {len(earlier) + 1} was asked for")
    hub = q.argmax(-1)
    is_hub = one_hot(hub, q.shape[-1], q.dtype)
    others = normalise(q * (1 - is_hub)).nan_to_num(0.0)
    return others.where((earlier[0] == hub).unsqueeze(-1), is_hub)


SCHEMES: tuple[Scheme, ...] = (independent_children, distinct_children, top_children, hub_children)


class DraftTree(NamedTuple):
    """One possible tree: the `tokens` of its nodes (-1: none), its `probability`, and `q` `(nodes, vocab)`."""

    tokens: tuple[int, ...]
    probability: float
    q: Tensor


def draft_trees(parents: tuple[int, ...], q: Conditional, scheme: Scheme) -> list[DraftTree]:
    """Every tree of this shape that can be proposed, with its probability.

    >>> half = lambda prefix: torch.tensor([0.5, 0.5]).double()
    >>> [(tree.tokens, tree.probability) for tree in draft_trees((-1, -1), half, distinct_children)]
    [((0, 1), 0.5), ((1, 0), 0.5)]
    """
    node_depths(parents)
    found = [DraftTree((), 1.0, q(()).new_zeros(0, len(q(()))))]
    for node, parent in enumerate(parents):
        siblings = [other for other in range(node) if parents[other] == parent]
        found = [longer for tree in found for longer in _extended(tree, parents, parent, siblings, q, scheme)]
    return found


def prefix_of(node: int, parents: tuple[int, ...], tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens from the root to `node`, its own included; () for the root, -1.

    >>> prefix_of(2, (-1, -1, 1), (5, 6, 7))
    (6, 7)
    """
    return () if node < 0 else (*prefix_of(parents[node], parents, tokens), tokens[node])


def _extended(
    tree: DraftTree, parents: tuple[int, ...], parent: int, siblings: list[int], q: Conditional, scheme: Scheme
) -> list[DraftTree]:
    prefix = prefix_of(parent, parents, tree.tokens)
    if -1 in prefix:
        own = torch.zeros_like(q(()))
    else:
        own = scheme(q(prefix), [torch.tensor(tree.tokens[sibling]) for sibling in siblings])
    rows = torch.cat([tree.q, own[None]])
    if not own.sum() > 0:
        return [DraftTree((*tree.tokens, -1), tree.probability, rows)]
    return [
        DraftTree((*tree.tokens, x), tree.probability * chance, rows) for x, chance in enumerate(own.tolist()) if chance
    ]


class TokenTree:
    """A static tree of draft tokens, given by `parents`: an earlier node for each node, or -1 for the root.

    depths        (nodes + 1,)            of the root (0) and each node
    parent_entry  (nodes,)                entry of each node's parent: 0 for the root, i + 1 for node i
    ancestors     (nodes + 1, nodes + 1)  whether the second entry is an ancestor of the first, or itself

    Raises `ValueError` for parents that do not come before their children.

    >>> TokenTree((-1, -1, 0)).ancestors.int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """

    def __init__(self, parents: tuple[int, ...], device: torch.device | str = "cpu") -> None:
        self.parents = parents
        depths = node_depths(parents)
        self.depth = max(depths, default=0)
        self.depths = torch.tensor([0, *depths], device=device)
        self.parent_entry = torch.tensor([parent + 1 for parent in parents], dtype=torch.int64, device=device)
        ancestors = torch.eye(len(parents) + 1, dtype=torch.bool)
        for node, parent in enumerate(parents):
            ancestors[node + 1] |= ancestors[parent + 1]
        self.ancestors = ancestors.to(device)

    def slots(self, first: Tensor) -> Tensor:
        """The slots `(rows, nodes + 1)` of root and nodes; `first` `(rows,)` is the root's."""
        return first[:, None] + torch.arange(len(self.depths), device=first.device)

    def positions(self, first: Tensor) -> Tensor:
        """The positions `(rows, nodes + 1)` of root and nodes."""
        return first[:, None] + self.depths

    def visible(self, first: Tensor, capacity: int) -> Tensor:
        """Which of `capacity` slots each entry sees, `(rows, nodes + 1, capacity)`."""
        entry = torch.arange(capacity, device=first.device) - first[:, None]
        inside = self.ancestors[:, entry.clamp(0, len(self.parents))].transpose(0, 1)
        return (inside & (entry <= len(self.parents))[:, None]) | (entry < 0)[:, None]


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
