"""Every verification rule, of specnb and of studies, in the real loop: the target's joint distribution.

That the comparison finds bugs is shown in audit/tests/test_known_bugs_in_the_loop.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from implementation_distribution import FALSE_ALARMS, PROMPTS, completions_p_value, eager, refilled
from tiny import llama, near_copy
from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb.drafters import Drafter, ModelDrafter, TreeDrafter
from specnb.rules import (
    Rule,
    block_verification,
    exact_match,
    greedy_verification,
    recursive_rejection,
    traversal_verification,
)
from specnb.sampler import generate
from specnb.trees import Scheme, distinct_children, independent_children, top_children
from studies.rules.published_rules import best_path_block, hub_children, k_sequential_tree, spechub_tree

TREE = (-1, -1, 0, 0, 1)


@dataclass(frozen=True)
class Loop:
    """A rule, and the drafter that it is used with."""

    rule: Rule
    parents: tuple[int, ...] | None = (-1, -1, 0, 0, 1)
    scheme: Scheme = distinct_children

    def drafter(self, target: PreTrainedModel) -> Drafter:
        model = near_copy(target, 0.2)
        return ModelDrafter(model) if self.parents is None else TreeDrafter(model, self.parents, scheme=self.scheme)

    @property
    def gamma(self) -> int:
        return 3 if self.parents is None else len(self.parents)


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
    case, (architecture, eos) = LOOPS[name], [("llama", None), ("gpt2", 1)][list(LOOPS).index(name) % 2]
    target = eager(architecture)
    made = refilled(target, case.drafter(target), 2_400, gamma=case.gamma, rule=case.rule, seed=11, eos=eos)
    assert completions_p_value(made, architecture, eos) > LEVEL
    assert made.record.accepted.max() >= 2


@pytest.mark.parametrize("rule", [greedy_verification, recursive_rejection, exact_match, traversal_verification])
def test_at_temperature_0_trees_give_the_greedy_sequence(rule: Rule) -> None:
    target = llama(dtype=torch.float64)
    asked: dict[str, Any] = {"max_new_tokens": 10, "sampling": Sampling(temperature=0), "progress": False}
    plain = generate(target, PROMPTS, gamma=0, **asked)
    drafter = TreeDrafter(near_copy(target, 0.2), TREE, scheme=top_children)
    made = generate(target, PROMPTS, drafter, gamma=len(TREE), rule=rule, **asked)
    assert made.tokens == plain.tokens
    assert made.record.tokens_per_step > 1.2
