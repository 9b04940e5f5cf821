"""Every verification rule, of specnb and of studies, in the real loop: the target's joint distribution.

That the comparison finds bugs is shown in audit/tests/test_known_bugs_in_the_loop.py.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from implementation_distribution import FALSE_ALARMS, completions_p_value, eager, refilled
from tiny import near_copy

from specnb.drafters import ModelDrafter, TreeDrafter
from specnb.rules import Rule, block_verification, exact_match, recursive_rejection, traversal_verification
from specnb.trees import Scheme, distinct_children, independent_children, top_children
from studies.rules.published_rules import best_path_block, hub_children, k_sequential_tree, spechub_tree

TREE = (-1, -1, 0, 0, 1)


class Loop(NamedTuple):
    """A rule, and the drafter that it is used with."""

    rule: Rule
    parents: tuple[int, ...] | None = TREE
    scheme: Scheme = distinct_children


LOOPS = {
    "block": Loop(block_verification, None),
    "recursive, independent": Loop(recursive_rejection, TREE, independent_children),
    "recursive, without replacement": Loop(recursive_rejection),
    "recursive, top-k": Loop(recursive_rejection, TREE, top_children),
    "q = 1": Loop(exact_match, TREE, top_children),
    "traversal": Loop(traversal_verification),
    "traversal, top-k": Loop(traversal_verification, (-1, -1, 0, 0), top_children),
    "exact match": Loop(exact_match),
    "k-sequential": Loop(k_sequential_tree, (-1, -1, -1, 0), independent_children),
    "SpecHub": Loop(spechub_tree, (-1, -1, 0, 0), hub_children),
    "best path": Loop(best_path_block, (-1, -1, 0, 1), independent_children),
}
LEVEL = FALSE_ALARMS / len(LOOPS)


@pytest.mark.parametrize("name", LOOPS)
def test_completions_have_the_target_s_joint_distribution(name: str) -> None:
    """Rows are refilled."""
    rule, parents, scheme = LOOPS[name]
    architecture, eos = [("llama", None), ("gpt2", 1)][list(LOOPS).index(name) % 2]
    target = eager(architecture)
    model = near_copy(target, 0.2)
    drafter = ModelDrafter(model) if parents is None else TreeDrafter(model, parents, scheme=scheme)
    made = refilled(target, drafter, 2_400, gamma=len(parents or "123"), rule=rule, seed=11, eos=eos)
    assert completions_p_value(made, architecture, eos) > LEVEL
    assert made.record.accepted.max() >= 2
