"""Trees of draft tokens: their shape, their place in the cache, and ways to sample siblings.

A tree is given by `parents`: for each node an earlier node, or -1 for the root, the newest token of
the row. An *entry* is the root (0) or a node (i + 1 for node i); entries lie in consecutive slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specnb.distributions import one_hot

# From q `(..., vocab)` after a node and its children so far to the distribution of the next child,
# 0 for no child
Scheme = Callable[[Tensor, Sequence[Tensor]], Tensor]
Rows = slice | Tensor  # an index of nodes or entries: a slice for a chain, which copies nothing


class Siblings(NamedTuple):
    """Nodes that a rule visits together: their numbers, and indices of them and of their parents' entries."""

    numbers: list[int]
    nodes: Rows
    parents: Rows


class TokenTree:
    """The tree `parents` with the tables that forward passes and rules need.

    Attributes
    ----------
    depths : (nodes + 1,)
        Of each entry, 0 for the root.
    ancestors : (nodes + 1, nodes + 1)
        Whether the second entry is the first or one of its ancestors.
    paths : (nodes + 1, depth)
        Nodes from the root to each entry, then -1.
    by_rank, by_turns
        Nodes grouped by the number of earlier siblings, and by that of the node and its ancestors.

    Examples
    --------
    >>> TokenTree((-1, -1, 0)).paths.tolist()
    [[-1, -1], [0, -1], [1, -1], [0, 2]]
    """

    def __init__(self, parents: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.parents, self.device = tuple(parents), device
        self.node_depths = node_depths(self.parents)
        self.depth = max(self.node_depths, default=0)
        self.is_chain = self.parents == chain(len(self.parents))
        self.parent_entries = self._index([parent + 1 for parent in self.parents])
        turns: list[int] = []
        ranks = [self.parents[:node].count(parent) for node, parent in enumerate(self.parents)]
        for rank, parent in zip(ranks, self.parents, strict=True):
            turns.append(rank + (turns[parent] if parent >= 0 else 0))
        self.by_rank, self.by_turns = self._grouped(ranks), self._grouped(turns)
        paths: list[list[int]] = [[]]
        for node, parent in enumerate(self.parents):
            paths.append([*paths[parent + 1], node])
        padded = [[*path, *[-1] * (self.depth - len(path))] for path in paths]
        self.depths, self.paths = self._table([0, *self.node_depths]), self._table(padded)
        entries = range(len(paths))
        ancestry = [[other == 0 or other - 1 in path for other in entries] for path in paths]
        self.ancestors = torch.tensor(ancestry, device=self.device)
        parent_of = self._table(self.parents)
        self._earlier_siblings = (parent_of[:, None] == parent_of).tril(-1)
        # The root, then the nodes in the reverse of the order in which they are visited.
        self._leaves_last = self._table([0, *[node + 1 for node in reversed(leaves_first(self.parents))]])

    def slots(self, first: Tensor) -> Tensor:
        return first[:, None] + torch.arange(len(self.depths), device=first.device)

    def positions(self, first: Tensor) -> Tensor:
        return first[:, None] + self.depths

    def visible(self, first: Tensor, capacity: int) -> Tensor:
        """Which of `capacity` slots each entry sees: the sequence, its ancestors and itself."""
        entry = torch.arange(capacity, device=first.device) - first[:, None]
        inside = self.ancestors[:, entry.clamp(0, len(self.parents))].transpose(0, 1)
        return (inside & (entry <= len(self.parents))[:, None]) | (entry < 0)[:, None]

    def last_from_root(self, passed: Bool[Tensor, "*batch nodes"]) -> Int[Tensor, "*batch"]:
        """The entry at the end of the path from the root along the first children that `passed`.

        >>> passed = torch.tensor([[False, True, True, True], [True, True, False, True]])
        >>> TokenTree((-1, -1, 0, 1)).last_from_root(passed)
        tensor([4, 1])
        """
        if self.is_chain:
            return passed.cumprod(dim=-1).sum(dim=-1)
        chosen = passed & ~(passed.unsqueeze(-2) & self._earlier_siblings).any(dim=-1)
        reached = (chosen.unsqueeze(-2) | ~self.ancestors[1:, 1:]).all(dim=-1)
        # An entry has a larger number than its ancestors.
        return (reached * self._numbers(passed)).amax(dim=-1)

    def first_from_leaves(self, passed: Bool[Tensor, "*batch nodes"]) -> Int[Tensor, "*batch"]:
        """The first entry that `passed`, in the order of `leaves_first`; else the root, 0.

        >>> TokenTree((-1, 0, -1)).first_from_leaves(torch.tensor([[True, False, True], [False, False, False]]))
        tensor([1, 0])
        """
        if not self.parents:
            return passed.sum(dim=-1)
        if self.is_chain:
            return (passed * self._numbers(passed)).amax(dim=-1)
        order = self._leaves_last
        return order[(passed[..., order[1:] - 1] * self._numbers(passed)).amax(dim=-1)]

    def _numbers(self, passed: Tensor) -> Tensor:
        return torch.arange(1, passed.shape[-1] + 1, device=passed.device)

    def _table(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _index(self, values: list[int]) -> Rows:
        if self.is_chain:
            return slice(values[0], values[-1] + 1) if values else slice(0, 0)
        return self._table(values)

    def _grouped(self, groups: list[int]) -> list[Siblings]:
        siblings = []
        for group in range(max(groups, default=-1) + 1):
            numbers = [node for node, group_of_node in enumerate(groups) if group_of_node == group]
            entries = [self.parents[node] + 1 for node in numbers]
            siblings.append(Siblings(numbers, self._index(numbers), self._index(entries)))
        return siblings


def chain(gamma: int) -> tuple[int, ...]:
    """The parents of a chain of `gamma` draft tokens."""
    return tuple(range(-1, gamma - 1))


def node_depths(parents: Sequence[int]) -> list[int]:
    """The depth of each node, 1 for children of the root; `ValueError` for a parent that is no earlier node."""
    depths: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has the parent {parent}; it must be an earlier node, or -1 for the root")
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def leaves_first(parents: Sequence[int]) -> list[int]:
    """All nodes, every subtree before its node, earlier siblings first."""
    root_first, waiting = [], [-1]
    while waiting:
        node = waiting.pop()
        root_first.append(node)
        waiting += [child for child, parent in enumerate(parents) if parent == node]
    return root_first[:0:-1]


# How the children of a node are sampled


def independent_children(q: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    return q


def distinct_children(q: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """Samples without replacement: q without the earlier tokens, renormalised."""
    remaining = q
    for tokens in earlier:
        remaining = remaining * (1 - one_hot(tokens, q.shape[-1], q.dtype))
    total = remaining.sum(dim=-1, keepdim=True)
    return remaining / total.where(total != 0, 1)


def top_children(q: Tensor, earlier: Sequence[Tensor]) -> Tensor:
    """The most probable token, then the second, and so on, with q one-hot; among equals the lowest first.

    >>> top_children(torch.tensor([0.4, 0.2, 0.4]), [torch.tensor(0)])
    tensor([0., 0., 1.])
    """
    if len(earlier) >= q.shape[-1]:
        return torch.zeros_like(q)
    remaining = q
    for token in earlier:  # topk would order equals as the device does
        remaining = remaining.scatter(-1, token.clamp_min(0)[..., None], -1.0)
    return one_hot(remaining.argmax(dim=-1), q.shape[-1], q.dtype)


SCHEMES: tuple[Scheme, ...] = (independent_children, distinct_children, top_children)
