"""The rules that `studies.rules.verification_rules` compares: proposals, source, and what of it was read."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from specnb.enumeration import Drafts
from specnb.rules import (
    PlannedRule,
    block_verification,
    exact_match,
    recursive_rejection,
    rejection_sampling,
    token_verification,
    traversal_verification,
)
from specnb.trees import Scheme, distinct_children, independent_children, top_children
from studies.rules.best_draft import best_draft_code_rule, best_draft_rule, best_path_block
from studies.rules.global_resolution import global_resolution
from studies.rules.hierarchical import (
    hierarchical_verification,
    hierarchical_verification_code,
    hierarchical_verification_file,
)
from studies.rules.merged_drafts import (
    first_appearances,
    hub_pairs,
    independent,
    merged,
    most_probable,
    without_replacement,
)
from studies.rules.selection import k_sequential_tree
from studies.rules.spechub import spechub_code, spechub_tree


class ChainRule(NamedTuple):
    """A rule for one chain, where it is from, and what was read."""

    rule: PlannedRule
    source: str
    read: str


class SelectionRule(NamedTuple):
    """A rule for several draft tokens of one position, with the proposals that it is used with."""

    rule: PlannedRule
    tested: Callable[[Tensor, int], Drafts]
    proposed: Callable[[Tensor, int], Drafts]
    source: str
    read: str


class TreeMethod(NamedTuple):
    """A rule for trees, and how the children of a node are sampled."""

    rule: PlannedRule
    scheme: Scheme
    source: str
    read: str


CHAIN_RULES = {
    "token verification": ChainRule(token_verification, "2211.17192", "paper"),
    "rejection sampling": ChainRule(rejection_sampling, "2211.17192 A.2", "paper"),
    "exact match": ChainRule(exact_match, "transformers, llama.cpp", "code"),
    "block verification": ChainRule(block_verification, "2403.10444", "equations, in 2601.05724 D.2; code"),
    "hierarchical, paper": ChainRule(hierarchical_verification, "2601.05724 Algorithm 2", "paper, text conversion"),
    "hierarchical, authors' code": ChainRule(hierarchical_verification_code, "HSD generation/utils.py f3adf7f", "code"),
    "hierarchical, algorithm.py": ChainRule(hierarchical_verification_file, "HSD algorithm.py b8575e2", "code"),
}


def _merged(shuffled: bool) -> Callable[[Tensor, int], Drafts]:
    return lambda q, k: merged(independent(q, k), shuffled)


SELECTION_RULES = {
    "recursive, independent drafts": SelectionRule(
        recursive_rejection, independent, independent, "Stratos' notes 2; SpecInfer as in 2602.16994 B.4", "notes"
    ),
    "recursive, without replacement": SelectionRule(
        recursive_rejection, without_replacement, without_replacement, "RSD 2402.14160", "abstract"
    ),
    "recursive, merged children in random order": SelectionRule(
        recursive_rejection, _merged(shuffled=True), independent, "SpecInfer 2305.09781 on a prefix tree", "notes"
    ),
    "recursive, merged children in order": SelectionRule(
        recursive_rejection, _merged(shuffled=False), independent, "SpecHub's code 7d592b7, mode RRS", "code"
    ),
    "recursive, merged children with their own q": SelectionRule(
        recursive_rejection, lambda q, k: first_appearances(independent(q, k)), independent, "this project", "-"
    ),
    "k-sequential selection": SelectionRule(
        k_sequential_tree, independent, independent, "SpecTr 2310.15141", "as restated in 2602.16994 B.3"
    ),
    "best draft token": SelectionRule(
        best_draft_rule, independent, independent, "GBV 2602.16961, one position", "copy of the code"
    ),
    "best draft token by min(1, p/q)": SelectionRule(
        best_draft_code_rule, independent, independent, "another copy of GBV's code", "code"
    ),
    "Global Resolution, tau 1e-3": SelectionRule(
        global_resolution(1e-3), independent, independent, "2511.15898", "two summaries"
    ),
    "Global Resolution, tau 1e-4": SelectionRule(
        global_resolution(1e-4), independent, independent, "2511.15898", "two summaries"
    ),
    "top-k, q = 1": SelectionRule(exact_match, most_probable, most_probable, "EAGLE issues 93, 183, 221", "issues"),
    "q = 1, sampled without replacement": SelectionRule(
        exact_match, without_replacement, without_replacement, "EAGLE's rule on RSD's draft tokens", "issues"
    ),
    "SpecHub": SelectionRule(spechub_tree, hub_pairs, hub_pairs, "2411.05289", "comment in code"),
    "SpecHub, authors' code": SelectionRule(spechub_code, hub_pairs, hub_pairs, "SpecHub's code 7d592b7", "code"),
}


TREE_METHODS = {
    "recursive, chains": TreeMethod(
        recursive_rejection, independent_children, "Stratos' notes 2.1, repeats kept", "notes"
    ),
    "k-sequential, chains": TreeMethod(
        k_sequential_tree, independent_children, "SpecTr 2310.15141", "as restated in 2602.16994 B.3"
    ),
    "traversal, chains": TreeMethod(
        traversal_verification, independent_children, "2505.12398", "abstract; code in GBV's"
    ),
    "best path, chains": TreeMethod(best_path_block, independent_children, "GBV 2602.16961", "copy of the code"),
    "recursive, tree": TreeMethod(recursive_rejection, distinct_children, "RSD 2402.14160", "abstract"),
    "traversal, tree": TreeMethod(traversal_verification, distinct_children, "2505.12398", "abstract; code in GBV's"),
    "q = 1, top-k tree": TreeMethod(exact_match, top_children, "EAGLE issues 93, 183, 221", "issues"),
    "traversal, top-k tree": TreeMethod(traversal_verification, top_children, "2505.12398", "abstract; code in GBV's"),
}
