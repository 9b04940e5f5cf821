"""The best static tree, against every tree of small sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest

from specnb.trees import node_depths
from studies.rules.tree_shape import best_tree


def accepted(parents: Sequence[int], rates: Sequence[float]) -> float:
    """The expected number of accepted draft tokens: over nodes, the product of the rates on their
    paths."""
    reached: list[float] = []
    for node, parent in enumerate(parents):
        rank = list(parents[:node]).count(parent)
        reached.append((rates[rank] if rank < len(rates) else 0.0) * (reached[parent] if parent >= 0 else 1.0))
    return sum(reached)


def every_tree(nodes: int, depth: int) -> Iterator[tuple[int, ...]]:
    """All trees of at most `nodes` nodes, as parents; some of them several times."""
    for size in range(nodes + 1):
        for parents in product(*[range(-1, node) for node in range(size)]):
            if max(node_depths(parents), default=0) <= depth:
                yield parents


@pytest.mark.parametrize("rates", [[0.6, 0.2, 0.1], [0.3, 0.3], [0.2, 0.5], [0.9], [0.0, 0.9]], ids=str)
@pytest.mark.parametrize(("nodes", "depth"), [(0, 3), (1, 1), (5, 2), (5, 5), (4, 0)])
def test_no_tree_of_this_size_accepts_more(rates: list[float], nodes: int, depth: int) -> None:
    tree = best_tree(rates, nodes, depth)
    assert len(tree) <= nodes
    assert max(node_depths(tree), default=0) <= depth
    assert accepted(tree, rates) == pytest.approx(max(accepted(other, rates) for other in every_tree(nodes, depth)))


def test_nodes_of_a_level_are_together_and_among_equal_trees_the_smaller_first_child_is_taken() -> None:
    assert best_tree([0.5, 0.3], 6, 2) == (-1, -1, 0, 0, 1, 1)
    assert best_tree([0.5], 4, 4) == (-1, 0, 1, 2)
    assert best_tree([0.5, 0.25], 2, 2) == (-1, -1)  # 0.5 + 0.25, as much as a child of the first
