"""Notebooks 10, 11 and 19: what documents say of implementations."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specnb.notebook.findings import named
from studies.verdicts.criteria import all_of, share, thresholds


def cache_prune_counts(must_leave: ArrayLike, printed: ArrayLike) -> str:
    """Entries of rejected tokens in a cache, and entries that are taken out, for each gamma, n < gamma and model.

    `conditional` where the printed count is right in some cases only.
    """
    right = np.asarray(must_leave) == np.asarray(printed)
    return named(bool(np.all(right)), holds_if=bool(np.any(right)))


def cache_prune_dynamic(as_written: bool | None, on_its_own_release: bool | None) -> str:
    """Whether the function prunes as written, on the installed transformers and on the release that it was written for;
    `None` where it was not run. `conditional` on that release where it no longer does."""
    if on_its_own_release is None:
        return "open"
    return named(bool(on_its_own_release and as_written), holds_if=on_its_own_release)


def first_target(fills: bool, gain_low: float, gain_high: float) -> str:
    """Whether a first target pass fills the target's cache; the interval of what it adds to the overlap at the first
    draft token. An interval that contains 0 decides nothing."""
    if not fills or gain_high < 0:
        return "refuted"
    return named(True if gain_low > 0 else None)


def batch_padding(off_as_printed: float, exact_with_all_cut: bool, bugs_differ: bool) -> str:
    """Total variation if n_max - n draft tokens of a row are dropped, as printed; whether dropping gamma - n is exact;
    whether the planted bugs make logits differ."""
    if not bugs_differ:
        return "open"
    (rounding,) = thresholds("batch-padding")
    return named(off_as_printed < rounding and exact_with_all_cut)


def sequence_packing(same_logits: bool, same_rows: int, rows: int, bugs_differ: bool) -> str:
    """Whether packed logits are those of separate rows; rows with the tokens of separate rows; whether the planted bugs
    make logits differ."""
    if not bugs_differ:
        return "open"
    return named(same_logits and all_of(same_rows, rows))


def processors_greedy(off: ArrayLike, same_sequences: bool) -> str:
    """Total variation of the joint distribution from the argmax's; whether sequences are those of plain decoding."""
    (rounding,) = thresholds("processors-greedy")
    return named(bool(np.max(off) < rounding) and same_sequences)


def assistant_greedy(accepted: float, accepted_if_sampled: float, off: ArrayLike) -> str:
    """Acceptance of greedy and of sampled draft tokens, and the total variation of what greedy ones lead to."""
    (rounding,) = thresholds("assistant-greedy")
    return named(accepted > accepted_if_sampled and bool(np.max(off) < rounding))


def reseeding(seeded: ArrayLike, tests: ArrayLike, different_numbers: ArrayLike) -> str:
    """For each seed that is set: acceptance tests, how many were seeded before, and how many numbers they got.

    `conditional` on the seed where only some of them reseed.
    """
    always = (np.asarray(seeded) == np.asarray(tests)) & (np.asarray(different_numbers) == 1)
    return named(bool(np.all(always)), holds_if=0 < share(always) < 1)


def exact_match_rule(errors: ArrayLike, acceptance_errors: ArrayLike) -> str:
    """Enumerated errors of the joint distribution, and of the acceptance from the sum of p q."""
    (rounding,) = thresholds("exact-match-rule")
    return named(bool(max(np.max(errors), np.max(acceptance_errors)) < rounding))
