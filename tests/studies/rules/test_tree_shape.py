"""The best static tree: against every tree of small sizes, and against the greedy choice for falling rates."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import product

import pytest

from specnb.trees import node_depths
from studies.rules.tree_shape import TreeShape, best_tree, expected_accepted


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


def test_among_equal_trees_the_one_with_the_smaller_first_child_is_taken() -> None:
    """0.5 + 0.25 either way: a second child of the root, or a child of the first."""
    assert best_tree([0.5, 0.25], 2, 2) == TreeShape((-1, -1), 0.75)
    assert best_tree([0.5, 0.25], 3, 2) == TreeShape((-1, -1, 0), 1.0)
    assert best_tree([0.5, 0.25], 4, 9).accepted == 1.125


def test_nodes_of_a_level_are_together_and_no_level_is_below_the_depth() -> None:
    assert best_tree([0.5, 0.3], 6, 2) == TreeShape((-1, -1, 0, 0, 1, 1), 1.44)
    assert best_tree([0.5, 0.3], 9, 1) == TreeShape((-1, -1), 0.8)
    assert best_tree([1.0], 3, 3) == TreeShape((-1, 0, 1), 3.0)
    assert best_tree([], 3, 3) == best_tree([0.5], 0, 3) == best_tree([0.5], 3, 0) == TreeShape((), 0.0)


def test_what_is_accepted_is_the_sum_over_the_nodes() -> None:
    rates = [0.5, 0.25, 0.125]
    for parents, accepted in {
        (): 0.0,
        (-1,): 0.5,
        (-1, -1, -1, -1): 0.875,  # a fourth child has no rate
        (-1, 0, 0, 1): 0.5 + 0.25 + 0.125 + 0.125,
        (-1, -1, 1, 1, 0): 0.5 + 0.25 + 0.125 + 0.0625 + 0.25,
    }.items():
        assert expected_accepted(parents, rates) == accepted
    with pytest.raises(ValueError, match="it must be an earlier node, or -1"):
        expected_accepted((0,), rates)


@pytest.mark.parametrize(
    ("rates", "accepted"), [([0.0], True), ([1.0], True), ([0.5, 0.5 + 5e-10], True), ([0.5, 0.5 + 2e-9], False),
                            ([-1e-9], False), ([1 + 1e-8], False), ([0.3, -0.1], False), ([float("nan")], False)]
)  # fmt: skip
def test_rates_are_probabilities_of_one_of_the_children(rates: list[float], accepted: bool) -> None:
    if accepted:
        assert len(best_tree(rates, 1, 1).parents) <= 1
        return
    with pytest.raises(ValueError) as error:  # noqa: PT011
        best_tree(rates, 1, 1)
    assert str(error.value) == f"rates are {rates}; each is a probability, and at most one child is accepted"


@pytest.mark.parametrize(("nodes", "depth"), [(-1, 0), (0, -1), (-1, -1)])
def test_negative_sizes_are_refused(nodes: int, depth: int) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        best_tree([0.5], nodes, depth)
    assert str(error.value) == f"nodes is {nodes} and depth {depth}; both must be 0 or more"
    assert best_tree([0.5], max(nodes, 0), max(depth, 0)).parents == ()
