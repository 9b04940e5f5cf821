"""Notebook 05: what was measured on the recorded machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specnb.notebook.findings import named
from studies.verdicts.criteria import share, thresholds, under_a_condition


def verify_is_free(cost: ArrayLike, half_precision: ArrayLike) -> str:
    """v(5) of each recorded setting, and whether its weights are in half precision."""
    about, enough = thresholds("verify-is-free")
    return under_a_condition(np.asarray(cost) <= about, half_precision, enough)


def theory_predicts_walltime(measured: ArrayLike, predicted: ArrayLike, verify_cost: ArrayLike) -> str:
    """Measured speed-ups, Theorem 3.8 as printed, and v(gamma + 1), for each recorded setting.

    `conditional` on a verification that costs about one pass.
    """
    about, enough, free = thresholds("theory-predicts-walltime")
    right = np.abs(np.asarray(measured) / np.asarray(predicted) - 1) <= about
    return under_a_condition(right, np.asarray(verify_cost) <= free, enough)


def gamma_about_5(lost: ArrayLike) -> str:
    """What gamma 5 loses to the best measured gamma, for each recorded setting."""
    little, enough = thresholds("gamma-about-5")
    return named(share(np.asarray(lost) <= little) >= enough)


def trace_diagram(tokens_per_pass: ArrayLike, speed_up_low: ArrayLike) -> str:
    """For gamma 3 and 7 in each recorded setting: tokens per target pass, and the lower end of the speed-up.

    `conditional` (on cheap passes) where target passes are saved everywhere, and time in some settings only.
    """
    fewer, faster = np.asarray(tokens_per_pass) > 1, np.asarray(speed_up_low) > 1
    return named(bool(np.all(fewer & faster)), holds_if=bool(np.all(fewer) and np.any(faster)))


def three_losing_regimes(worst_high: ArrayLike) -> str:
    """For each of the three regimes the upper end of the lowest speed-up that was measured in it.

    That there are such regimes is what the source says; `conditional` where one of them was not found.
    """
    (even,) = thresholds("three-losing-regimes")
    loses = np.asarray(worst_high) < even
    return named(bool(np.all(loses)), holds_if=bool(np.any(loses)))


def latency_vs_temperature(low: ArrayLike, high: ArrayLike, alpha: ArrayLike) -> str:
    """Intervals of the speed-up at rising temperatures; alpha at rising temperatures, of which Theorem 3.8's speed-up
    is an increasing function.

    `conditional` on moderate temperatures where the speed-up falls over those measured and alpha rises again beyond.
    """
    low, high, alpha = np.asarray(low), np.asarray(high), np.asarray(alpha)
    falls = bool(high[-1] < low[0])
    again = bool(alpha[-1] > alpha.min())
    return named(falls and not again, holds_if=falls and again)


def table_2_shape(colder: ArrayLike, warmer: ArrayLike, sizes: ArrayLike) -> str:
    """Speed-ups at temperature 0 and 1 of drafts of the target's family, and the drafts' sizes; all measured here."""
    colder, warmer, sizes = (np.asarray(x, dtype=float) for x in (colder, warmer, sizes))
    low, high, models = thresholds("table-2-shape")
    if sizes.size < models:
        return "open"
    smallest = sizes.argmin()
    wins = colder.argmax() == warmer.argmax() == smallest
    in_range = low <= min(colder[smallest], warmer[smallest]) and max(colder[smallest], warmer[smallest]) <= high
    return named(bool(wins and in_range and np.all(colder > warmer)))


def two_orders_smaller(orders: ArrayLike, speed_up: ArrayLike) -> str:
    """Sizes of the drafts measured for one target, in orders of magnitude below it, and their speed-ups."""
    orders, speed_up = np.asarray(orders, dtype=float), np.asarray(speed_up, dtype=float)
    about_low, about_high, models = thresholds("two-orders-smaller")
    if orders.size < models or not (orders.min() < about_low and orders.max() > about_high):
        return "open"  # the best could lie beyond the sizes that were tried
    return named(about_low <= orders[speed_up.argmax()] <= about_high)
