"""Notebook 07: lenience."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specnb.notebook.findings import named
from studies.verdicts.criteria import all_of, thresholds, within_chance


def lenience_bound(off_formula: float, over_bound: ArrayLike, where_p_is_0: float) -> str:
    """Enumerated steps of the readings that A.5 permits: distance from the formula, what is emitted over what the bound
    allows, and what is emitted where p is 0."""
    (rounding,) = thresholds("lenience-bound")
    kept = bool(np.max(over_bound) <= 1 + rounding) and where_p_is_0 == 0
    return named(off_formula < rounding and kept)


def lenience_alpha(equal: int, cases: int, error: float, deviations: ArrayLike) -> str:
    """Cases in which A.5's four expressions are equal; largest enumerated error; counted acceptances minus the formula
    in standard errors."""
    rounding = thresholds("lenience-alpha")[1]
    return named(all_of(equal, cases) and error < rounding and within_chance(deviations, "lenience-alpha"))


def lenience_walltime(reachable: ArrayLike, by_one_gamma: int) -> str:
    """Quoted factors that some gamma reaches within rounding, and the most that one and the same gamma does.

    `conditional` on a gamma chosen for each factor where no single one gives them all.
    """
    all_reachable = bool(np.all(reachable))
    return named(all_reachable and by_one_gamma == np.size(reachable), holds_if=all_reachable)


def table_5_shape(same_prefixes: ArrayLike, own_prefixes: ArrayLike, printed: ArrayLike) -> str:
    """alpha for each draft (rows) at falling l (columns): on fixed prefixes, on the loops' own, and in Table 5."""
    return named(all(bool(np.all(np.diff(np.asarray(t), axis=1) > 0)) for t in (same_prefixes, own_prefixes, printed)))


def lenience_argmax(accepted_at_1: float, greedy_alpha: float, by_lenience: ArrayLike, same_digits: ArrayLike) -> str:
    """With the inequality as printed: what it accepts at l = 1, where alpha is to be that of the strict rule, and at
    falling l, where alpha is to rise; whether the quoted factors follow."""
    rises = bool(np.all(np.diff(np.asarray(by_lenience)) >= 0))
    strict = abs(accepted_at_1 - greedy_alpha) < thresholds("lenience-argmax")[0]
    return named(rises and strict and bool(np.all(same_digits)))


def lenience_diversity(least_probability: float, entropy_change_high: ArrayLike) -> str:
    """The least probability that lenience gives a token that the target may emit, in an example; for each draft the
    upper end of the change in entropy. That it *can* hurt is what the source says, so one draft suffices."""
    hurts = bool(np.any(np.asarray(entropy_change_high) < 0))
    return named(least_probability == 0 and hurts)
