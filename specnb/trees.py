"""Trees of draft tokens: their shape, where their nodes lie in the cache, and how the children of a
node are sampled.

A tree is given by `parents`: an earlier node for each node, or -1 for the root, which is the newest
token of a row. A chain is the tree (-1, 0, 1, ...). An *entry* is the root (0) or a node (i + 1 for
node i).

The nodes occupy consecutive slots of the cache: the root first, then the draft tokens in their
order. The position of a node is that of the root plus its depth. A node sees the sequence up to the
root, its ancestors and itself.

A scheme is a function from q `(..., vocab)`, the drafter's distribution after a node, and the
tokens `(...,)` of the children proposed so far to the distribution `(..., vocab)` of the next
child; zero where nothing is left to propose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from specnb.distributions import normalise, one_hot

Scheme = Callable[[Tensor, Sequence[Tensor]], Tensor]
Rows = slice | Tensor
"""An index of nodes or entries: a slice for a chain, which copies nothing."""


class Siblings(NamedTuple):
    """Nodes that a rule visits together: as numbers, as an index, and an index of their parents'
    entries."""

    numbers: list[int]
    nodes: Rows
    parents: Rows


class TokenTree:
    """The tree `parents`, with tables on `device` for the forward pass and for rules.

    depths     (nodes + 1,)            the depth of each entry, 0 for the root
    ancestors  (nodes + 1, nodes + 1)  whether the second entry is an ancestor of the first, or
               itself
    paths      (nodes + 1, depth)      the nodes from the root to each entry, then -1

    parent_entries  an index of the entries of all parents
    by_rank         the first child of every entry that has one, then the second children, and so on
    by_turns        the nodes by how many earlier siblings they and their ancestors have
    families        the children of each entry that has any, in their order; their `parents` is that
                    one entry

    A chain without `tables` has the last four only, which hold no tensors then: so one can be made
    within a step. Raises `ValueError` for parents that do not come before their children.

    >>> TokenTree((-1, -1, 0)).ancestors.int()
    tensor([[1, 0, 0, 0],
            [1, 1, 0, 0],
            [1, 0, 1, 0],
            [1, 1, 0, 1]], dtype=torch.int32)
    """

    def __init__(self, parents: Sequence[int], device: torch.device | str = "cpu", tables: bool = True) -> None:
        self.parents, self.device = tuple(parents), device
        self.node_depths = node_depths(self.parents)
        self.depth, nodes = max(self.node_depths, default=0), len(self.parents)
        self.is_chain = self.parents == chain(nodes)
        self.parent_entries = self._index([parent + 1 for parent in self.parents])
        turns: list[int] = []
        ranks = [self.parents[:node].count(parent) for node, parent in enumerate(self.parents)]
        for rank, parent in zip(ranks, self.parents, strict=True):
            turns.append(rank + (turns[parent] if parent >= 0 else 0))
        self.by_rank, self.by_turns = self._grouped(ranks), self._grouped(turns)
        self.families = [family._replace(parents=self._index([entry])) for entry, family in self._children()]
        if tables:
            self._make_tables()

    def _make_tables(self) -> None:
        paths: list[list[int]] = [[]]
        for node, parent in enumerate(self.parents):
            paths.append([*paths[parent + 1], node])
        padded = [[*path, *[-1] * (self.depth - len(path))] for path in paths]
        self.depths, self.paths = self._table([0, *self.node_depths]), self._table(padded)
        entries = range(len(paths))
        ancestry = [[other == 0 or other - 1 in path for other in entries] for path in paths]
        self.ancestors = torch.tensor(ancestry, device=self.device)
        earlier = [[other < node and self.parents[other] == own for other in range(len(self.parents))]
                   for node, own in enumerate(self.parents)]  # fmt: skip
        self._earlier_siblings = torch.tensor(earlier, dtype=torch.bool, device=self.device)
        # The root's entry, then those of the nodes in the reverse of the order in which they are
        # visited.
        self._leaves_last = self._table([0, *[node + 1 for node in reversed(leaves_first(self.parents))]])

    def slots(self, first: Tensor) -> Tensor:
        """The slots `(rows, nodes + 1)` of all entries; `first` `(rows,)` is the root's."""
        return first[:, None] + torch.arange(len(self.depths), device=first.device)

    def positions(self, first: Tensor) -> Tensor:
        """The positions `(rows, nodes + 1)` of all entries."""
        return first[:, None] + self.depths

    def visible(self, first: Tensor, capacity: int) -> Tensor:
        """Which of `capacity` slots each entry sees, `(rows, nodes + 1, capacity)`."""
        entry = torch.arange(capacity, device=first.device) - first[:, None]
        inside = self.ancestors[:, entry.clamp(0, len(self.parents))].transpose(0, 1)
        return (inside & (entry <= len(self.parents))[:, None]) | (entry < 0)[:, None]

    def last_from_root(self, passed: Bool[Tensor, "*batch nodes"]) -> Int[Tensor, "*batch"]:
        """The entry reached from the root by going to the first child that `passed`, as long as
        there is one.

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
        """The first entry that `passed`, every subtree before its node and earlier siblings first;
        else the root, 0.

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
        """An index of `values`; for a chain they are consecutive."""
        if self.is_chain:
            return slice(values[0], values[-1] + 1) if values else slice(0, 0)
        return self._table(values)

    def _grouped(self, groups: list[int]) -> list[Siblings]:
        found = []
        for group in range(max(groups, default=-1) + 1):
            numbers = [node for node, own in enumerate(groups) if own == group]
            entries = [self.parents[node] + 1 for node in numbers]
            found.append(Siblings(numbers, self._index(numbers), self._index(entries)))
        return found

    def _children(self) -> list[tuple[int, Siblings]]:
        ids = sorted(set(self.parents))
        return list(zip([one + 1 for one in ids], self._grouped([ids.index(one) for one in self.parents]), strict=True))


def chain(gamma: int) -> tuple[int, ...]:
    """The parents of a chain of `gamma` draft tokens.

    >>> chain(3)
    (-1, 0, 1)
    """
    return tuple(range(-1, gamma - 1))


def node_depths(parents: Sequence[int]) -> list[int]:
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


def leaves_first(parents: Sequence[int]) -> list[int]:
    """All nodes, every subtree before its node, earlier siblings first.

    >>> leaves_first((-1, -1, 0, 0, 1))
    [2, 3, 0, 4, 1]
    """

    def below(node: int) -> list[int]:
        return [found for child, parent in enumerate(parents) if parent == node for found in (*below(child), child)]

    return below(-1)


# How the children of a node are sampled


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
    """The most probable token, then the second, and so on: no randomness, so the distribution is
    one-hot.

    Of equals the lowest token comes first, on every device.

    >>> top_children(torch.tensor([0.4, 0.2, 0.4]), [torch.tensor(0)])
    tensor([0., 0., 1.])
    """
    if len(earlier) >= q.shape[-1]:
        return torch.zeros_like(q)
    left = q
    for token in earlier:  # topk would order equals as the device does
        left = left.scatter(-1, token.clamp_min(0)[..., None], -1.0)
    return one_hot(left.argmax(dim=-1), q.shape[-1], q.dtype)


SCHEMES: tuple[Scheme, ...] = (independent_children, distinct_children, top_children)
