"""Notebook 02: how many tokens a step emits."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specnb.notebook.findings import named
from studies.verdicts.criteria import contains, thresholds, within_chance


def capped_geometric(error: float, p_values: ArrayLike, wrong_rule_p_value: float, with_context: float) -> str:
    """Enumerated error of the iid case, p-values of the simulations and of another rule, and the total variation that
    distributions which depend on the context have from the capped geometric one."""
    rounding, false_alarm, far = thresholds("capped-geometric")
    level = false_alarm / np.size(p_values)
    if wrong_rule_p_value > level or with_context <= far:
        return "open"  # the checks would not have noticed another distribution
    return named(error < rounding and float(np.min(p_values)) > level)


def expected_tokens(identity: bool, limits_right: bool, error: float, deviations: ArrayLike) -> str:
    """Whether Equation 1 is the mean of the capped geometric distribution, with the right limits; the largest
    enumerated error; simulated means minus Equation 1 in standard errors."""
    rounding = thresholds("expected-tokens")[1]
    return named(identity and limits_right and error < rounding and within_chance(deviations, "expected-tokens"))


def lesson_expected_tokens(identity: bool, printed: float, low: float, high: float) -> str:
    """Whether the printed formula is the mean, and whether the simulated interval contains the printed number."""
    return named(identity and contains(low, printed, high))


def stratos_length_footnote(identity: bool, printed: float, low: float, high: float) -> str:
    """Whether the printed sum is the mean, and whether the simulated interval contains its value."""
    return named(identity and contains(low, printed, high))


def stratos_beta_08(by_formula: float, simulated_low: float) -> str:
    (least,) = thresholds("stratos-beta-08")
    return named(by_formula > least and simulated_low > least)


def iid_assumption(
    p_values: ArrayLike, lag_1_low: ArrayLike, lag_1_high: ArrayLike, error_low: ArrayLike, error_high: ArrayLike
) -> str:
    """At each temperature: the p-value of the best capped geometric fit, the interval of the autocorrelation of beta at
    lag 1, and the interval of Equation 1's relative error."""
    p_value, close = thresholds("iid-assumption")
    lag = (np.asarray(lag_1_low) > 0) | (np.asarray(lag_1_high) < 0)
    if bool(np.any(np.asarray(p_values) < p_value) or np.any(lag)):
        return "holds"
    exact = np.all(np.asarray(error_low) > -close) and np.all(np.asarray(error_high) < close)
    return named(False if exact else None)
