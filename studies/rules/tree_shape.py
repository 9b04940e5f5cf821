"""The static tree that accepts the most draft tokens, by dynamic programming over its size and
depth.

Source: Sequoia, Chen et al., arXiv 2402.12374 (abstract read): acceptance is taken to depend on a
child's rank only. Child i of an accepted node is accepted with probability `rates[i]`, whatever the
node, so that a tree accepts the sum over its nodes of the product of the rates along their paths.
The recursion here is our own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def best_tree(rates: Sequence[float], nodes: int, depth: int) -> tuple[int, ...]:
    """The parents of the tree of at most `nodes` nodes and `depth` levels that accepts the most
    draft tokens.

    Nodes of a level are together. A child is used only with all children before it. Takes `nodes`^2
    times `depth` times the number of rates steps.

    >>> best_tree([0.6, 0.2], nodes=3, depth=2)  # 0.6 + 0.36 + 0.2
    (-1, -1, 0)
    """

    @cache
    def best(size: int, levels: int, rank: int) -> tuple[float, int]:
        """Of `size` nodes below a node, children from `rank` on: what is accepted, and the nodes of
        child `rank`."""
        if size == 0 or levels == 0 or rank == len(rates):
            return 0.0, 0
        options = [(0.0, 0)]
        for own in range(1, size + 1):
            inside = rates[rank] * (1 + best(own - 1, levels - 1, 0)[0])
            options.append((inside + best(size - own, levels, rank + 1)[0], -own))
        value, own = max(options)  # among equals the smaller first child
        return value, -own

    parents: list[int] = []
    waiting = [(-1, nodes, depth)]  # nodes whose children are still to be placed, level by level
    while waiting:
        parent, size, levels = waiting.pop(0)
        for rank in range(len(rates)):
            own = best(size, levels, rank)[1]
            if own == 0:
                break
            parents.append(parent)
            waiting.append((len(parents) - 1, own - 1, levels - 1))
            size -= own
    return tuple(parents)
