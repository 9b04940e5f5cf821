"""Where the nodes of a tree lie, and what they see."""

import torch

from specnb.trees import TokenTree

TREE = TokenTree((-1, -1, 0, 2))
FIRST = torch.tensor([2, 0])


def test_nodes_lie_in_consecutive_slots_at_the_positions_of_their_depth() -> None:
    assert TREE.depth == 3
    assert TREE.slots(FIRST).tolist() == [[2, 3, 4, 5, 6], [0, 1, 2, 3, 4]]
    assert TREE.positions(FIRST).tolist() == [[2, 3, 3, 4, 5], [0, 1, 1, 2, 3]]


def test_a_node_sees_the_sequence_its_ancestors_and_itself() -> None:
    seen = TREE.visible(FIRST, capacity=8)
    slots = [[row.nonzero()[:, 0].tolist() for row in rows] for rows in seen]
    assert slots[0] == [[0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 3, 5], [0, 1, 2, 3, 5, 6]]
    assert slots[1] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4]]


def test_a_chain_sees_what_a_causal_mask_shows() -> None:
    seen = TokenTree((-1, 0, 1)).visible(torch.tensor([2]), capacity=7)[0]
    assert torch.equal(seen, torch.arange(7) <= torch.arange(2, 6)[:, None])


def test_no_nodes_leave_the_root() -> None:
    tree = TokenTree(())
    assert (tree.depth, tree.slots(FIRST).tolist(), tree.visible(FIRST, 3).sum().item()) == (0, [[2], [0]], 4)
