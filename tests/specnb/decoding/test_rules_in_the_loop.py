"""Every verification rule in the real loop: the target's joint distribution, static steps, and planted bugs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from implementation_distribution import FALSE_ALARMS, PROMPTS, completions_p_value, eager, refilled
from tape import taped
from tiny import llama, near_copy
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.generate import Generation, Study, generate
from specnb.decoding.step import Batch
from specnb.distributions import Sampling
from specnb.drafting.base import Drafter
from specnb.drafting.model import ModelDrafter, TreeDrafter
from specnb.rules import (
    Outcome,
    PlannedRule,
    Rule,
    block_verification,
    exact_match,
    greedy_verification,
    recursive_rejection,
    traversal_verification,
)
from specnb.trees import Scheme, distinct_children, hub_children, independent_children, top_children
from studies.rules.best_draft import best_path_block
from studies.rules.selection import k_sequential_tree
from studies.rules.spechub import spechub_tree

ROWS = 2_400
TREE = (-1, -1, 0, 0, 1)
TWO_CHAINS = (-1, -1, 0, 1)


@dataclass(frozen=True)
class Loop:
    """A rule, and the drafter that it is used with."""

    rule: Rule
    parents: tuple[int, ...] | None = TREE
    scheme: Scheme = distinct_children
    noise: float = 0.2  # of the draft model's weights

    def drafter(self, target: PreTrainedModel) -> Drafter:
        model = near_copy(target, self.noise)
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
    "k-sequential": Loop(k_sequential_tree, (-1, -1, -1, 0), independent_children),
    "SpecHub": Loop(spechub_tree, (-1, -1, 0, 0), hub_children),
    "traversal": Loop(traversal_verification),
    "traversal, top-k": Loop(traversal_verification, (-1, -1, 0, 0), top_children),
    "best path": Loop(best_path_block, TWO_CHAINS, independent_children),
    "exact match": Loop(exact_match),
}
LEVEL = FALSE_ALARMS / len(LOOPS)


def made_by(
    case: Loop, architecture: str = "llama", rule: Rule | None = None, rows: int = ROWS, **more: Any
) -> Generation:
    target = eager(architecture)
    return refilled(target, case.drafter(target), rows, gamma=case.gamma, rule=rule or case.rule, seed=11, **more)


@pytest.mark.parametrize("name", LOOPS)
def test_completions_have_the_target_s_joint_distribution(name: str) -> None:
    architecture, eos = [("llama", None), ("gpt2", 1)][list(LOOPS).index(name) % 2]
    made = made_by(LOOPS[name], architecture, eos=eos)
    assert completions_p_value(made, architecture, eos) > LEVEL
    assert made.record.accepted.max() >= 2


@pytest.mark.parametrize("name", ["traversal", "best path", "SpecHub", "exact match"])
def test_a_step_is_static(name: str) -> None:
    """Its operations, replayed without Python, give the same tokens."""
    target, case = llama(dtype=torch.float64), LOOPS[name]
    asked: dict[str, Any] = {"gamma": case.gamma, "max_new_tokens": 8, "seed": 4, "rule": case.rule, "progress": False}
    plain = generate(target, PROMPTS, case.drafter(target), **asked)
    replayed = generate(target, PROMPTS, case.drafter(target), **asked, study=Study(batch_class=taped(Batch)))
    assert replayed.tokens == plain.tokens


@pytest.mark.parametrize("rule", [greedy_verification, recursive_rejection, exact_match, traversal_verification])
def test_at_temperature_0_trees_give_the_greedy_sequence(rule: Rule) -> None:
    target = llama(dtype=torch.float64)
    asked: dict[str, Any] = {"max_new_tokens": 10, "sampling": Sampling(temperature=0), "progress": False}
    plain = generate(target, PROMPTS, gamma=0, **asked)
    drafter = TreeDrafter(near_copy(target, 0.2), TREE, scheme=top_children)
    made = generate(target, PROMPTS, drafter, gamma=len(TREE), rule=rule, **asked)
    assert made.tokens == plain.tokens
    assert made.record.tokens_per_step > 1.2


# Planted bugs, in the loop


def sorted_siblings(p: Tensor, q: Tensor, draft_tokens: Tensor, *rest: Any) -> Outcome:
    """Children are tested in the order of their ids: the tokens of two siblings change places."""
    swapped = draft_tokens.clone()
    swapped[..., :2] = draft_tokens[..., :2].sort(dim=-1).values
    return recursive_rejection(p, q, swapped, *rest)


def path_off_by_one(p: Tensor, *rest: Any) -> Outcome:
    """The path names the node before the accepted one."""
    outcome = recursive_rejection(p, *rest)
    assert outcome.path is not None
    return outcome._replace(path=torch.where(outcome.path > 0, outcome.path - 1, outcome.path))


def bonus_after_the_root(p: Tensor, q: Tensor, draft_tokens: Tensor, *rest: Any) -> Outcome:
    """The last token is sampled as if nothing had been accepted."""
    nothing = recursive_rejection(p, q * 0, torch.full_like(draft_tokens, -1), *rest)
    return recursive_rejection(p, q, draft_tokens, *rest)._replace(token=nothing.token)


no_residual = PlannedRule(lambda p, *rest: block_verification.plan(p, *rest)._replace(after=p), up=True)


@pytest.mark.parametrize(
    ("name", "bug"),
    [
        ("recursive, without replacement", path_off_by_one),
        ("recursive, without replacement", bonus_after_the_root),
        ("recursive, without replacement", sorted_siblings),
        ("recursive, independent", path_off_by_one),
        ("k-sequential", bonus_after_the_root),
        ("block", no_residual),
    ],
    ids=["path", "bonus", "order", "path of a tree of samples", "bonus of k-sequential", "residual of block"],
)
def test_bugs_are_found(name: str, bug: Rule) -> None:
    assert completions_p_value(made_by(replace(LOOPS[name], noise=1.0), rule=bug), "llama") < LEVEL
