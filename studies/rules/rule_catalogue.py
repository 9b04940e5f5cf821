"""The rules that `studies.rules.verification_rules` compares: proposals, source, and what of it was read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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
from studies.rules.best_draft import best_draft_code_rule, best_path_block
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

Proposals = Callable[[Tensor, int], Drafts]
"""From q `(vocab,)` and k to every proposal of k draft tokens for one position."""


class Listed(NamedTuple):
    """A rule, where it is from, and what was read of that.

    scheme   of a rule for trees: how the children of a node are sampled
    tested   of a rule for several draft tokens of one position: the proposals that it is given
    sampled  those before tokens were merged, which the optimum is for
    """

    rule: PlannedRule
    source: str
    read: str
    scheme: Scheme = independent_children
    tested: Proposals = independent
    sampled: Proposals = independent


CHAIN_RULES = {
    "token verification": Listed(token_verification, "2211.17192", "paper"),
    "rejection sampling": Listed(rejection_sampling, "2211.17192 A.2", "paper"),
    "exact match": Listed(exact_match, "transformers, llama.cpp", "code"),
    "block verification": Listed(block_verification, "2403.10444", "equations, in 2601.05724 D.2; code"),
    "hierarchical, paper": Listed(hierarchical_verification, "2601.05724 Algorithm 2", "paper, text conversion"),
    "hierarchical, authors' code": Listed(hierarchical_verification_code, "HSD generation/utils.py f3adf7f", "code"),
    "hierarchical, algorithm.py": Listed(hierarchical_verification_file, "HSD algorithm.py b8575e2", "code"),
}


def _merged(q: Tensor, k: int, shuffled: bool) -> Drafts:
    return merged(independent(q, k), shuffled)


def _with_own_q(q: Tensor, k: int) -> Drafts:
    return first_appearances(independent(q, k))


def _several(rule: PlannedRule, source: str, read: str, proposals: Proposals = independent) -> Listed:
    return Listed(rule, source, read, tested=proposals, sampled=proposals)


SPECTR = "SpecTr 2310.15141", "as restated in 2602.16994 B.3"
SELECTION_RULES = {
    "recursive, independent drafts": _several(
        recursive_rejection, "Stratos' notes 2; SpecInfer as in 2602.16994 B.4", "notes"
    ),
    "recursive, without replacement": _several(recursive_rejection, "RSD 2402.14160", "abstract", without_replacement),
    "recursive, merged children in random order": Listed(
        recursive_rejection, "SpecInfer 2305.09781 on a prefix tree", "notes", tested=partial(_merged, shuffled=True)
    ),
    "recursive, merged children in order": Listed(
        recursive_rejection, "SpecHub's code 7d592b7, mode RRS", "code", tested=partial(_merged, shuffled=False)
    ),
    "recursive, merged children with their own q": Listed(recursive_rejection, "this project", "-", tested=_with_own_q),
    "k-sequential selection": _several(k_sequential_tree, *SPECTR),
    "best draft token": _several(best_path_block, "GBV 2602.16961, one position", "copy of the code"),
    "best draft token by min(1, p/q)": _several(best_draft_code_rule, "another copy of GBV's code", "code"),
    "top-k, q = 1": _several(exact_match, "EAGLE issues 93, 183, 221", "issues", most_probable),
    "q = 1, sampled without replacement": _several(
        exact_match, "EAGLE's rule on RSD's draft tokens", "issues", without_replacement
    ),
    "SpecHub": _several(spechub_tree, "2411.05289", "comment in code", hub_pairs),
    "SpecHub, authors' code": _several(spechub_code, "SpecHub's code 7d592b7", "code", hub_pairs),
}
TRAVERSAL = traversal_verification, "2505.12398", "abstract; code in GBV's"
TREE_METHODS = {
    "recursive, chains": Listed(recursive_rejection, "Stratos' notes 2.1, repeats kept", "notes"),
    "k-sequential, chains": Listed(k_sequential_tree, *SPECTR),
    "traversal, chains": Listed(*TRAVERSAL),
    "best path, chains": Listed(best_path_block, "GBV 2602.16961", "copy of the code"),
    "recursive, tree": Listed(recursive_rejection, "RSD 2402.14160", "abstract", distinct_children),
    "traversal, tree": Listed(*TRAVERSAL, distinct_children),
    "q = 1, top-k tree": Listed(exact_match, "EAGLE issues 93, 183, 221", "issues", top_children),
    "traversal, top-k tree": Listed(*TRAVERSAL, top_children),
}
