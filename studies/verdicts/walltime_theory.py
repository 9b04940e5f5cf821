"""Notebooks 03 and 18: what theory says of speed, operations and memory."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specnb.notebook.findings import named
from studies.verdicts.criteria import all_of, contains, share, thresholds, within_chance


def dlk_overlap(derived: bool, as_overlap: int, as_event: int, pairs: int) -> str:
    return named(derived and all_of(as_overlap, pairs) and all_of(as_event, pairs))


def dlk_divergence(properties: ArrayLike) -> str:
    """Whether D_LK is symmetric, within [0, 1], 0 just for equal distributions and 1 just for disjoint ones."""
    return named(bool(np.all(properties)))


def beta_is_one_minus_dlk(error: float, deviations: ArrayLike) -> str:
    """Largest enumerated error, and simulated acceptances minus 1 - D_LK in standard errors."""
    rounding = thresholds("beta-is-one-minus-dlk")[1]
    return named(error < rounding and within_chance(deviations, "beta-is-one-minus-dlk"))


def alpha_estimator(right_variance: int, worlds: int, deviation: float, greedy_difference: float) -> str:
    """Worlds in which the count varies as a coin with chance alpha = E[beta] does; counted minus averaged acceptance on
    the models, in standard errors, and at temperature 0, where both are the same number."""
    rounding = thresholds("alpha-estimator")[1]
    agree = within_chance(deviation, "alpha-estimator") and greedy_difference < rounding
    return named(all_of(right_variance, worlds) and agree)


def walltime(deviations: ArrayLike, by_length: ArrayLike) -> str:
    """Simulated speed-ups minus Theorem 3.8 in standard errors; the fraction of the theorem that completions of growing
    length reach."""
    missing = thresholds("walltime")[1]
    reached = np.asarray(by_length, dtype=float)
    limit = 1 - missing <= reached[-1] <= 1 and np.all(np.diff(reached) > 0)
    return named(within_chance(deviations, "walltime") and bool(limit))


def walltime_verify_cost(
    deviations: ArrayLike, with_v_error: ArrayLike, free_error: ArrayLike, best_moves: ArrayLike
) -> str:
    """Simulated speed-ups minus the formula in standard errors; for each recorded setting the relative error of the
    formula with and without the measured v, and whether the best gamma by it differs from Theorem 3.8's."""
    _, about, enough = thresholds("walltime-verify-cost")
    with_v, free = np.abs(np.asarray(with_v_error)), np.abs(np.asarray(free_error))
    predicts = share(with_v <= about) >= enough and with_v.mean() < free.mean()
    return named(within_chance(deviations, "walltime-verify-cost") and bool(predicts) and bool(np.any(best_moves)))


def improvement_condition(derived: bool, improves: ArrayLike, exceeds: ArrayLike, at_least: ArrayLike) -> str:
    """For each pair (alpha, c): whether some gamma improves and whether alpha > c; for those with alpha > c, whether
    the best is at least (1 + alpha)/(1 + c)."""
    same = np.array_equal(np.asarray(improves, dtype=bool), np.asarray(exceeds, dtype=bool))
    return named(derived and same and bool(np.all(at_least)))


def optimal_gamma(derived: bool, differing: int, monotone: bool) -> str:
    """Whether one peak is derived; pairs (alpha, c) in which walking up to it and exhaustive search differ; whether the
    best gamma rises with alpha and falls with c."""
    return named(derived and differing == 0 and monotone)


def operations(
    deviations: ArrayLike,
    gamma: ArrayLike,
    steps: ArrayLike,
    target_passes: ArrayLike,
    draft_passes: ArrayLike,
    target_tokens: ArrayLike,
    draft_tokens: ArrayLike,
) -> str:
    """Simulations minus the theorem in standard errors; passes and tokens that hooks counted, for each gamma.

    The theorem grants a step gamma draft tokens. `conditional` on a negligible c_hat where only that count is exceeded,
    by one token a step.
    """
    counts = (gamma, steps, target_passes, draft_passes, target_tokens, draft_tokens)
    g, n, passes, draft, tokens, drafted = (np.asarray(x) for x in counts)
    theorem = np.all(passes == n) and np.all(draft == g * n) and np.all(tokens == (g + 1) * n)
    fits = within_chance(deviations, "operations") and bool(theorem)
    (most,) = thresholds("operations")[1:]
    extra = drafted - g * n
    return named(fits and bool(np.all(extra == 0)), holds_if=fits and bool(np.all((extra >= 0) & (extra <= most * n))))


def memory_accesses(
    passes_over_equation: ArrayLike,
    as_counted: bool,
    equation: float,
    weights: ArrayLike,
    cache: ArrayLike,
    short_here: float,
    short_by: ArrayLike,
) -> str:
    """Computed passes over Equation 1; whether hooks count as recorded; Equation 1 at the measured alpha and the
    measured factors as `(low, high)`; the computed fraction by which the cache's factor is smaller than the weights',
    at the lengths measured and for growing contexts.

    `conditional` on a long context where only the cache's factor falls short, by what vanishes with the context.
    """
    close, negligible, vanishing = thresholds("memory-accesses")
    (low, high), (cache_low, cache_high) = np.asarray(weights), np.asarray(cache)
    right = bool(np.all(np.abs(np.asarray(passes_over_equation) - 1) < close)) and as_counted
    measured = contains(low, equation, high) and contains(cache_low, equation * (1 - short_here), cache_high)
    short = np.asarray(short_by)
    vanishes = bool(np.all(np.diff(short) < 0) and short[-1] < vanishing)
    return named(right and measured and short_here < negligible, holds_if=right and measured and vanishes)


def encoder_bound(bounded: ArrayLike) -> str:
    """For each gamma and context: whether the target's work in Algorithm 1, which is one step, is at most an encoder's
    over the same tokens."""
    return named(bool(np.all(bounded)))


def table_1(computed: ArrayLike, printed: ArrayLike) -> str:
    """Operations and speed, computed and printed with two decimals."""
    return named(np.array_equal(np.asarray(computed).round(2), np.asarray(printed, dtype=float)))


def tradeoff_figure(rises: bool, falls: bool, ends_right: bool, deviations: ArrayLike, printed_on_curve: bool) -> str:
    """Whether speed rises and operations fall with alpha between the right ends; simulations minus the curves in
    standard errors; whether Table 1's printed values, which are points of Figure 4, lie on them."""
    fits = within_chance(deviations, "tradeoff-figure")
    return named(rises and falls and ends_right and fits and printed_on_curve)


def oracle_gamma(deviations: ArrayLike, supremum: float, reached: float) -> str:
    """Simulated oracles minus the formula in standard errors; the largest gain over the best fixed gamma, derived, and
    on a grid. "Up to ~60%" is taken to be what rounds to it at one digit."""
    low, high = thresholds("oracle-gamma")[1:]
    return named(within_chance(deviations, "oracle-gamma") and low <= reached <= supremum < high)


def table_4_expected(same_digits: ArrayLike, explained: ArrayLike, shifted: ArrayLike, one_c: bool) -> str:
    """Rows that follow from the listed values, and from some unrounded ones; the number of rows so explained if the
    printed values were shifted; whether one c for each draft model suffices.

    `conditional` on unrounded inputs where these explain what is printed and not what is shifted.
    """
    (most,) = thresholds("table-4-expected")
    few = np.max(shifted) < most * np.size(explained)
    return named(bool(np.all(same_digits)), holds_if=bool(np.all(explained) and few) and one_c)
