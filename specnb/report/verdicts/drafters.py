"""Notebook 08: drafters."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from specnb.report.claims import named


def hierarchical(exact: bool, speed_up_low: ArrayLike, drafting: ArrayLike, passes_high: float) -> str:
    """Whether the distribution is kept; for each kind of text the lower end of the speed over that with plain drafting,
    and the time of drafting over that of plain drafting; upper end of the draft's forward passes for each draft token,
    which is 1 in plain drafting.

    `conditional` on a draft whose forward passes are what costs, where passes are saved and drafting takes longer.
    """
    faster, slower = np.asarray(speed_up_low) > 1, np.asarray(drafting) > 1
    if exact and not np.any(faster) and not np.all(slower):
        return "open"
    return named(exact and bool(np.any(faster)), holds_if=exact and passes_high < 1)


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
