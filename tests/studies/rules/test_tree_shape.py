"""The best static tree: against every tree of small sizes, and against the greedy choice for falling rates."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import product

import pytest

from specnb.trees import node_depths
from studies.rules.tree_shape import TreeShape, best_tree, expected_accepted, fastest_tree


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


@pytest.mark.parametrize(("largest", "deepest"), [(0, 3), (3, 0), (1, 1), (4, 1), (4, 2), (4, 9)])
def test_the_fastest_tree_is_looked_for_up_to_both_limits(largest: int, deepest: int) -> None:
    """Verification is free, so that larger is faster; each level costs a tenth."""
    rates, asked = [0.6, 0.3], set()

    def verify_cost(tokens: int) -> float:
        asked.add(tokens)
        return 1.0

    shape, speedup = fastest_tree(rates, verify_cost, 0.1, largest, deepest)
    gains: dict[tuple[int, ...], float] = {(): 1.0}
    for parents in every_tree(largest, deepest):
        gains[parents] = (1 + expected_accepted(parents, rates)) / (1 + 0.1 * max(node_depths(parents), default=0))
    assert speedup == pytest.approx(max(gains.values()), abs=1e-12)
    assert gains[shape.parents] == pytest.approx(speedup, abs=1e-12)
    assert asked <= set(range(2, largest + 2))


def test_no_tree_at_all_has_the_speed_up_one() -> None:
    assert fastest_tree([0.5], lambda n: float(n), 0.5, 4, 4) == (TreeShape((), 0.0), 1.0)
    assert fastest_tree([0.5], lambda n: 1.0, 0.5, 1, 1) == (TreeShape((), 0.0), 1.0)  # the first among equals
    assert fastest_tree([0.0], lambda n: 1.0, 0.0, 2, 2) == (TreeShape((), 0.0), 1.0)
    assert fastest_tree([], lambda n: 0.5, 0.0, 2, 2) == (TreeShape((), 0.0), 2.0)  # of no rates no nodes
