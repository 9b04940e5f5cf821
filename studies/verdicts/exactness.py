"""Notebooks 00 and 01: what a step emits."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specnb.notebook.findings import named
from studies.verdicts.criteria import all_of, thresholds


def standardized_sampling(error: float, error_to_transformers: float, same_support: bool, own_cell: ArrayLike) -> str:
    """`own_cell`: for each distribution, whether every token owns exactly its cell of uniforms."""
    (rounding,) = thresholds("standardized-sampling")
    return named(max(error, error_to_transformers) <= rounding and same_support and bool(np.all(own_cell)))


def mass_identities(proven: bool, give_p: int, give_q: int, tokens: int) -> str:
    return named(proven and all_of(give_p, tokens) and all_of(give_q, tokens))


def residual_normaliser(proven: bool, right: int, pairs: int) -> str:
    return named(proven and all_of(right, pairs))


def residual_unique(full_rank: ArrayLike, moved_exactly: int, different: int) -> str:
    """Over pairs with p != q and one replacement for all rejected tokens, which is what the source presumes.

    `full_rank`: whether the output determines the replacement; `moved_exactly`: pairs in which another one moved it.
    """
    return named(bool(np.all(full_rank)) and all_of(moved_exactly, different))


def algorithm_1_joint(
    errors: ArrayLike, fewest: ArrayLike, most: ArrayLike, gamma: ArrayLike, sampled_fits: bool, transcribed: bool
) -> str:
    """Per enumerated setting the error and the range of token counts; whether ten million sampled steps fit; whether
    the loop's rule agrees with the algorithm as printed."""
    (rounding,) = thresholds("algorithm-1-joint")
    counts = np.all(np.asarray(fewest) >= 1) and np.all(np.asarray(most) <= np.asarray(gamma) + 1)
    return named(bool(np.max(errors) < rounding and counts) and sampled_fits and transcribed)


def unbiasedness(proven: bool, exact: int, pairs: int, sampled_fits: bool, float64_error: float) -> str:
    (rounding,) = thresholds("unbiasedness")
    return named(proven and all_of(exact, pairs) and sampled_fits and float64_error <= rounding)


def rejection_sampling_weaker(weaker: int, exact: int, pairs: int, never_above: ArrayLike, rule_error: float) -> str:
    (rounding,) = thresholds("rejection-sampling-weaker")
    everywhere = all_of(weaker, pairs) and all_of(exact, pairs)
    return named(everywhere and bool(np.all(never_above)) and rule_error < rounding)


def same_distribution_not_same_text(both_fit: ArrayLike, bug_fits: bool, differing_low: float) -> str:
    """`differing_low`: lower end of the interval of the fraction of completions that differ under the same seed."""
    if bug_fits:
        return "open"  # the test of fit would not have noticed another distribution
    return named(bool(np.all(both_fit)) and differing_low > thresholds("same-distribution-not-same-text")[0])


def stochastic_speculation(residual_fits: bool, bug_fits: bool, times_agree: bool, saves_time: bool) -> str:
    """Whether g's input has the distribution of f, also without the residual; whether the mean times are the derived
    ones, and lie below one after the other where the guess is cheap."""
    if bug_fits:
        return "open"
    return named(residual_fits and times_agree and saves_time)
