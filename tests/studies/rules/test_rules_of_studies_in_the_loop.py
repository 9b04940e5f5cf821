"""Rules of studies in the real loop: the target's joint distribution, and static steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from implementation_distribution import FALSE_ALARMS, PROMPTS, completions_p_value, eager, refilled
from rule_checks import Loop
from tape import taped
from tiny import llama

from specnb.decoding.generate import Study, generate
from specnb.decoding.step import Batch
from specnb.trees import independent_children
from studies.rules.best_draft import best_path_block
from studies.rules.selection import k_sequential_tree
from studies.rules.spechub import hub_children, spechub_tree

ROWS = 2_400
LOOPS = {
    "k-sequential": Loop(k_sequential_tree, (-1, -1, -1, 0), independent_children),
    "SpecHub": Loop(spechub_tree, (-1, -1, 0, 0), hub_children),
    "best path": Loop(best_path_block, (-1, -1, 0, 1), independent_children),
}
LEVEL = FALSE_ALARMS / len(LOOPS)


@pytest.mark.parametrize("name", LOOPS)
def test_completions_have_the_target_s_joint_distribution(name: str) -> None:
    architecture, eos = [("llama", None), ("gpt2", 1)][list(LOOPS).index(name) % 2]
    target, case = eager(architecture), LOOPS[name]
    made = refilled(target, case.drafter(target), ROWS, gamma=case.gamma, rule=case.rule, seed=11, eos=eos)
    assert completions_p_value(made, architecture, eos) > LEVEL
    assert made.record.accepted.max() >= 2


@pytest.mark.parametrize("name", ["best path", "SpecHub"])
def test_a_step_is_static(name: str) -> None:
    """Its operations, replayed without Python, give the same tokens."""
    target, case = llama(dtype=torch.float64), LOOPS[name]
    asked: dict[str, Any] = {"gamma": case.gamma, "max_new_tokens": 8, "seed": 4, "rule": case.rule, "progress": False}
    plain = generate(target, PROMPTS, case.drafter(target), **asked)
    replayed = generate(target, PROMPTS, case.drafter(target), **asked, study=Study(batch_class=taped(Batch)))
    assert replayed.tokens == plain.tokens
