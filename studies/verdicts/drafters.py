"""Notebook 08: drafters."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specnb.notebook.findings import named
from studies.verdicts.criteria import thresholds


def ngram_assisted(errors: ArrayLike) -> str:
    """Total variation of what a step leads to from the target's distribution, for each drafter that knows only the
    text so far."""
    (rounding,) = thresholds("ngram-assisted")
    return named(bool(np.max(errors) < rounding))


def negligible_cost_bound(limits: ArrayLike, grows: bool, gap: float) -> str:
    """For values of alpha whether the tokens per step tend to 1/(1 - alpha); whether they grow with gamma; what is left
    of 1/(1 - alpha) minus the tokens per step minus alpha^(gamma+1)/(1 - alpha)."""
    return named(bool(np.all(limits)) and grows and gap == 0)


def bigram_speedup(factor: float, printed: float) -> str:
    """The computed improvement, and the printed one with its two decimals."""
    return named(round(factor, 2) == printed)


def random_drafts(passes: ArrayLike, tokens: int, accepted: ArrayLike) -> str:
    """Target passes of each sequence of `tokens` tokens; probability that a uniform draft token is accepted, at each
    context. Where that is above zero a step gives more than one token on average."""
    return named(bool(np.asarray(passes).max() <= tokens and np.asarray(accepted).min() > 0))


def copy_drafts(repetitive_low: float, new_high: float, repeats: bool | None) -> str:
    """Accepted fraction of copied tokens, the lower end on repetitive text and the upper end on new text; whether the
    target's own continuations of repetitive text repeat it, `None` if that was not measured.

    Too few accepted copies refute the claim only where they do.
    """
    (least,) = thresholds("copy-drafts")
    if repetitive_low >= least and repetitive_low > new_high:
        return "holds"
    return "refuted" if repeats else "open"


def nonautoregressive_drafts(one_call: bool, tokens_per_step_low: float) -> str:
    """Whether the distributions of all positions come from one call, whatever the draft tokens are; lower end of the
    tokens per step, above 1 if some of them are accepted."""
    return named(one_call and tokens_per_step_low > 1)


def draft_standardisation(errors: ArrayLike, gain_low: float, gain_high: float) -> str:
    """Total variation from the target's distribution with drafts of other settings; the interval of what the best of
    these settings adds to alpha. An interval that contains 0 decides nothing."""
    (rounding,) = thresholds("draft-standardisation")
    if np.max(errors) >= rounding or gain_high < 0:
        return "refuted"
    return named(True if gain_low > 0 else None)


def hierarchical(exact: bool, speed_up_low: ArrayLike, drafting: ArrayLike) -> str:
    """Whether the distribution is kept; for each kind of text the lower end of the speed over that with plain drafting,
    and the time of drafting over that of plain drafting."""
    if exact and np.any(np.asarray(speed_up_low) > 1):
        return "holds"
    return named(False if not exact or np.all(np.asarray(drafting) > 1) else None)


def vary_gamma(speed_low: ArrayLike, speed_high: ArrayLike) -> str:
    """For each adaptive length the interval of its tokens per unit of cost over those of the best fixed gamma.

    Intervals that contain 1 decide nothing, unless another adaptive length is better.
    """
    if np.any(np.asarray(speed_low) > 1):
        return "holds"
    return named(False if np.all(np.asarray(speed_high) < 1) else None)


def optimise_alpha(
    over_shipped_low: ArrayLike, over_shipped_high: ArrayLike, over_control_low: ArrayLike, over_control_high: ArrayLike
) -> str:
    """Intervals of the gain in alpha of distillation and of training on alpha itself, in each setting: over the shipped
    draft, and over the control, which went on learning from the text for as many steps. A gain must be one over both.

    `conditional` on the trainings and settings with a gain above zero, where others have none.
    """
    low, high = np.minimum(over_shipped_low, over_control_low), np.minimum(over_shipped_high, over_control_high)
    above = low > 0
    if not np.any(above) and np.any(high > 0):
        return "open"
    return named(bool(np.all(above)), holds_if=bool(np.any(above)))


def medusa_heads(exact: bool, tokens_per_step_low: ArrayLike, speed_up_low: ArrayLike) -> str:
    """Whether the distribution is kept; for each kind of text the lower ends of the tokens per step and of the speed
    over plain decoding.

    `conditional` on the kinds of text with a speed-up, where others have none; without any it is open, as long as
    target passes are saved.
    """
    saves, faster = bool(np.all(np.asarray(tokens_per_step_low) > 1)), np.asarray(speed_up_low) > 1
    if exact and saves and not np.any(faster):
        return "open"
    return named(exact and saves and bool(np.all(faster)), holds_if=exact and saves and bool(np.any(faster)))


def eagle_features(over_control_low: ArrayLike, over_control_high: ArrayLike) -> str:
    """For each kind of sequence the interval of alpha from features minus alpha of a draft of tokens, which learnt the
    same objective from the same batches and has at least as many parameters.

    `conditional` on the sequences with a difference above zero, where others have none.
    """
    low, high = np.asarray(over_control_low), np.asarray(over_control_high)
    if not np.any(low > 0) and np.any(high > 0):
        return "open"
    return named(bool(np.all(low > 0)), holds_if=bool(np.any(low > 0)))
