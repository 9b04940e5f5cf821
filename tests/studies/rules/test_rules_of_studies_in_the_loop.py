"""Rules of studies in the real loop: the target's joint distribution."""

from __future__ import annotations

import pytest
from implementation_distribution import FALSE_ALARMS
from rule_checks import Loop, require_the_joint_distribution

from specnb.trees import independent_children
from studies.rules.published_rules import best_path_block, hub_children, k_sequential_tree, spechub_tree

LOOPS = {
    "k-sequential": Loop(k_sequential_tree, (-1, -1, -1, 0), independent_children),
    "SpecHub": Loop(spechub_tree, (-1, -1, 0, 0), hub_children),
    "best path": Loop(best_path_block, (-1, -1, 0, 1), independent_children),
}
LEVEL = FALSE_ALARMS / len(LOOPS)


@pytest.mark.parametrize("name", LOOPS)
def test_completions_have_the_target_s_joint_distribution(name: str) -> None:
    require_the_joint_distribution(LOOPS[name], list(LOOPS).index(name), LEVEL)
