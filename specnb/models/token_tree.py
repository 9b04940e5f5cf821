"""The tree of one step: where its nodes lie in the cache, at which positions, and what each of them sees.

The nodes of a tree occupy consecutive slots: the newest token of the row first (the root), then the draft tokens in
their order. The position of a node is that of the root plus its depth. A node sees the sequence up to the root, its
ancestors and itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.sampling.tree_verification import node_depths


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
