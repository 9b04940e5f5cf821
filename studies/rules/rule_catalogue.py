"""The rules that `studies.rules.verification_rules` compares: proposals, source, and what of it was read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from specnb.distributions import Conditional
from specnb.draft_schemes import (
    DraftTuple,
    first_appearances,
    hub_pairs,
    independent,
    merged,
    most_probable,
    without_replacement,
)
from specnb.enumeration import Emissions, planned_step_distribution, step_distribution
from specnb.multi_draft import (
    SelectionPlanner,
    k_sequential_plan,
    recursive_plan,
    spechub_code_plan,
    spechub_plan,
    top_k_plan,
)
from specnb.rules import (
    SelectionTree,
    TreePlanner,
    TreeRule,
    best_path_block,
    best_path_thresholds,
    block_plan,
    exact_match,
    hierarchical_code_plan,
    hierarchical_plan,
    recursive_rejection,
    recursive_thresholds,
    rejection_sampling,
    token_verification,
    traversal_thresholds,
    traversal_verification,
)
from specnb.trees import Scheme, distinct_children, independent_children, top_children
from studies.rules.best_draft import best_draft_code_plan, best_draft_plan
from studies.rules.global_resolution import GlobalResolution
from studies.rules.hierarchical_file import hierarchical_file_plan


class ChainRule(NamedTuple):
    """A rule for one chain: how its step is enumerated, where it is from, and what was read."""

    emissions: Callable[[Conditional, Conditional, int], Emissions]
    source: str
    read: str


class SelectionRule(NamedTuple):
    """A rule for several draft tokens, with the proposals that it is used with."""

    plan: SelectionPlanner
    tested: Callable[[Tensor, int], list[DraftTuple]]
    proposed: Callable[[Tensor, int], list[DraftTuple]]
    source: str
    read: str


class TreeMethod(NamedTuple):
    """A rule for trees, and how the children of a node are sampled."""

    rule: TreeRule
    plan: TreePlanner
    scheme: Scheme
    source: str
    read: str


CHAIN_RULES = {
    "token verification": ChainRule(partial(step_distribution, token_verification), "2211.17192", "paper"),
    "rejection sampling": ChainRule(partial(step_distribution, rejection_sampling), "2211.17192 A.2", "paper"),
    "exact match": ChainRule(partial(step_distribution, exact_match), "transformers, llama.cpp", "code"),
    "block verification": ChainRule(
        partial(planned_step_distribution, block_plan), "2403.10444", "equations, in 2601.05724 D.2; code"
    ),
    "hierarchical, paper": ChainRule(
        partial(planned_step_distribution, hierarchical_plan), "2601.05724 Algorithm 2", "paper, text conversion"
    ),
    "hierarchical, authors' code": ChainRule(
        partial(planned_step_distribution, hierarchical_code_plan), "HSD generation/utils.py f3adf7f", "code"
    ),
    "hierarchical, algorithm.py": ChainRule(
        partial(planned_step_distribution, hierarchical_file_plan), "HSD algorithm.py b8575e2", "code"
    ),
}


def _merged(shuffled: bool) -> Callable[[Tensor, int], list[DraftTuple]]:
    return lambda q, k: merged(independent(q, k), shuffled)


def hub(q: Tensor, k: int) -> list[DraftTuple]:
    """SpecHub's pairs; k is 2."""
    return hub_pairs(q)


SELECTION_RULES = {
    "recursive, independent drafts": SelectionRule(
        recursive_plan, independent, independent, "Stratos' notes 2; SpecInfer as in 2602.16994 B.4", "notes"
    ),
    "recursive, without replacement": SelectionRule(
        recursive_plan, without_replacement, without_replacement, "RSD 2402.14160", "abstract"
    ),
    "recursive, merged children in random order": SelectionRule(
        recursive_plan, _merged(shuffled=True), independent, "SpecInfer 2305.09781 on a prefix tree", "notes"
    ),
    "recursive, merged children in order": SelectionRule(
        recursive_plan, _merged(shuffled=False), independent, "SpecHub's code 7d592b7, mode RRS", "code"
    ),
    "recursive, merged children with their own q": SelectionRule(
        recursive_plan, lambda q, k: first_appearances(independent(q, k)), independent, "this project", "-"
    ),
    "k-sequential selection": SelectionRule(
        k_sequential_plan, independent, independent, "SpecTr 2310.15141", "as restated in 2602.16994 B.3"
    ),
    "best draft token": SelectionRule(
        best_draft_plan, independent, independent, "GBV 2602.16961, one position", "copy of the code"
    ),
    "best draft token by min(1, p/q)": SelectionRule(
        best_draft_code_plan, independent, independent, "another copy of GBV's code", "code"
    ),
    "Global Resolution, tau 1e-3": SelectionRule(
        GlobalResolution(1e-3).plan, independent, independent, "2511.15898", "two summaries"
    ),
    "Global Resolution, tau 1e-4": SelectionRule(
        GlobalResolution(1e-4).plan, independent, independent, "2511.15898", "two summaries"
    ),
    "top-k, q = 1": SelectionRule(top_k_plan, most_probable, most_probable, "EAGLE issues 93, 183, 221", "issues"),
    "q = 1, sampled without replacement": SelectionRule(
        top_k_plan, without_replacement, without_replacement, "EAGLE's rule on RSD's draft tokens", "issues"
    ),
    "SpecHub": SelectionRule(spechub_plan, hub, hub, "2411.05289", "comment in code"),
    "SpecHub, authors' code": SelectionRule(spechub_code_plan, hub, hub, "SpecHub's code 7d592b7", "code"),
}


def _selection(plan: SelectionPlanner) -> tuple[TreeRule, TreePlanner]:
    function = SelectionTree(plan)
    return TreeRule(function), function.thresholds


RECURSIVE, TRAVERSAL = (recursive_rejection, recursive_thresholds), (traversal_verification, traversal_thresholds)
TREE_METHODS = {
    "recursive, chains": TreeMethod(*RECURSIVE, independent_children, "Stratos' notes 2.1, repeats kept", "notes"),
    "k-sequential, chains": TreeMethod(
        *_selection(k_sequential_plan), independent_children, "SpecTr 2310.15141", "as restated in 2602.16994 B.3"
    ),
    "traversal, chains": TreeMethod(*TRAVERSAL, independent_children, "2505.12398", "abstract; code in GBV's"),
    "best path, chains": TreeMethod(
        best_path_block, best_path_thresholds, independent_children, "GBV 2602.16961", "copy of the code"
    ),
    "recursive, tree": TreeMethod(*RECURSIVE, distinct_children, "RSD 2402.14160", "abstract"),
    "traversal, tree": TreeMethod(*TRAVERSAL, distinct_children, "2505.12398", "abstract; code in GBV's"),
    "q = 1, top-k tree": TreeMethod(*_selection(top_k_plan), top_children, "EAGLE issues 93, 183, 221", "issues"),
    "traversal, top-k tree": TreeMethod(*TRAVERSAL, top_children, "2505.12398", "abstract; code in GBV's"),
}
