"""The best static tree: against every tree of small sizes, and against the greedy choice for falling rates."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import product

import pytest

from specnb.sampling.tree_shape import best_tree, expected_accepted, fastest_tree
from specnb.sampling.tree_verification import node_depths


def every_tree(nodes: int, depth: int) -> Iterator[tuple[int, ...]]:
    """All trees of at most `nodes` nodes, as parents; some of them several times."""
    for size in range(nodes + 1):
        for parents in product(*[range(-1, node) for node in range(size)]):
            if max(node_depths(parents), default=0) <= depth:
                yield parents


@pytest.mark.parametrize("rates", [[0.6, 0.2, 0.1], [0.3, 0.3], [0.2, 0.5], [0.9], [0.0, 0.9]], ids=str)
@pytest.mark.parametrize(("nodes", "depth"), [(0, 3), (1, 1), (5, 2), (5, 5), (4, 0)])
def test_no_tree_of_this_size_accepts_more(rates: list[float], nodes: int, depth: int) -> None:
    shape = best_tree(rates, nodes, depth)
    assert len(shape.parents) <= nodes
    assert max(node_depths(shape.parents), default=0) <= depth
    assert shape.accepted == pytest.approx(expected_accepted(shape.parents, rates))
    assert shape.accepted == pytest.approx(max(expected_accepted(tree, rates) for tree in every_tree(nodes, depth)))


def test_for_falling_rates_the_nodes_reached_most_often_are_taken() -> None:
    rates, nodes = [0.55, 0.2, 0.1, 0.05], 40
    heap = [-rate for rate in rates]
    reached: list[float] = []
    while len(reached) < nodes:
        value = -heapq.heappop(heap)
        reached.append(value)
        for rate in rates:
            heapq.heappush(heap, -value * rate)
    assert best_tree(rates, nodes, depth=nodes).accepted == pytest.approx(sum(reached))


def test_a_second_child_needs_a_rate() -> None:
    assert best_tree([0.5], 4, 4).parents == (-1, 0, 1, 2)
    assert best_tree([0.5, 0.4], 3, 1).parents == (-1, -1)


def test_the_fastest_tree_grows_as_verification_gets_cheaper() -> None:
    rates = [0.6, 0.2, 0.1]
    costs = [lambda n: 1 + 2 * (n - 1), lambda n: 1 + 0.1 * (n - 1), lambda n: 1.0]
    sizes = [len(fastest_tree(rates, cost, 0.05, 12, 4)[0].parents) for cost in costs]
    assert sizes[0] == 0  # an additional token costs more than a forward pass
    assert 0 < sizes[1] < sizes[2]


def test_no_tree_of_this_size_is_faster() -> None:
    """The speed-up is that of the module's cost, one draft pass a level."""
    rates, c = [0.6, 0.2, 0.1], 0.3

    def speedup(parents: tuple[int, ...]) -> float:
        return (1 + expected_accepted(parents, rates)) / (1 + 0.1 * len(parents) + c * max(node_depths(parents)))

    found, gained = fastest_tree(rates, lambda n: 1 + 0.1 * (n - 1), c, largest=5, deepest=5)
    assert gained == pytest.approx(max(speedup(tree) for tree in every_tree(5, 5) if tree))
    assert gained == pytest.approx(speedup(found.parents))


def test_what_is_no_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="each is a probability, and at most one child is accepted"):
        best_tree([0.8, 0.3], 3, 3)
    with pytest.raises(ValueError, match="nodes is -1 and depth 2"):
        best_tree([0.8], -1, 2)
