"""Notebook 09: verification of several proposals, of trees, and at temperature 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specnb.notebook.findings import named
from studies.verdicts.criteria import thresholds


def iterative_speculative_sampling(errors: ArrayLike) -> str:
    """Total variation of the emitted token from the target's distribution, for each way of proposing several tokens."""
    (rounding,) = thresholds("iterative-speculative-sampling")
    return named(bool(np.max(errors) < rounding))


def specinfer_tree(errors: ArrayLike) -> str:
    """Total variation of the emitted token from the target's distribution, for drafts merged into a prefix tree."""
    (rounding,) = thresholds("specinfer-tree")
    return named(bool(np.max(errors) < rounding))


def tree_attention_equal(difference: float, in_tree: int, batched: int) -> str:
    """Largest difference of a logit to a forward pass over one draft; tokens evaluated in the tree and in a batch."""
    (rounding,) = thresholds("tree-attention-equal")
    return named(difference < rounding and in_tree < batched)


def greedy_distribution(printed_wrong: int, drafts: int) -> str:
    """Drafts for which the printed step returns a token that is not in the target's greedy sequence, of all drafts."""
    return named(printed_wrong == 0 < drafts)


def greedy_tree(two_match: int, shorter: int, trees: int) -> str:
    """Trees with two children that equal the argmax, and with a longer draft than the accepted one, of all trees."""
    return named(two_match == shorter == 0 < trees)
