"""Speculative beam search: accepted levels per step, and the time of a step (Appendix A.4).

The target's search does not depend on the draft model, so it runs once; the levels that a draft
model would have had accepted are computed afterwards. The target keeps w beams (`width`), the draft
model u (`draft_width`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from specnb.beam import Beams, BeamSettings, LogProbs, draft_levels

Cost = Callable[[int], ArrayLike]
"""Time of a forward pass over n tokens, in forward passes of the same model over one token."""


def accepted_levels(
    states: Sequence[Beams], draft: LogProbs, widths: Sequence[int], gamma: int, settings: BeamSettings
) -> NDArray[np.int64]:
    """Accepted levels `(len(widths), levels)` of a step of `gamma` drafted levels from each state
    of the target.

    `widths` are draft widths u; `states` is the target's search from its start to its end.
    """
    accepted = np.zeros((len(widths), len(states) - 1), dtype=np.int64)
    for at, state in enumerate(states[:-1]):
        for row, width in enumerate(widths):
            levels = draft_levels(state, draft, width, gamma, settings)
            for own, level in zip(states[at + 1 :], levels, strict=False):
                if own.ended or not set(own.paths) <= set(level):
                    break
                accepted[row, at] += 1
        draft.keep(states[at + 1].paths)
    return accepted


def levels_by_step(accepted: NDArray[np.int64], gamma: int) -> NDArray[np.int64]:
    """Levels `(steps,)` that each step of a search with `gamma` emits, from one row of
    `accepted_levels`.

    >>> levels_by_step(np.array([2, 1, 0]), gamma=2)
    array([3])
    """
    levels: list[int] = []
    while sum(levels) < len(accepted):
        levels.append(min(int(accepted[sum(levels)]), gamma) + 1)
    return np.array(levels)


def constant_cost(n: int) -> float:
    """The cost of a forward pass that does not depend on its number of tokens, as section 3.3
    assumes."""
    return 1.0


def improvement(
    levels: float,
    width: int,
    draft_width: int,
    gamma: int,
    c: float,
    verify_cost: Cost = constant_cost,
    draft_cost: Cost = constant_cost,
) -> float:
    """Wall-clock improvement over the target's search alone, which takes v(w) per level, with
    `levels` per step.

    A step takes v(w + u gamma) + c (d(w) + (gamma - 1) d(u)) target forward passes over one token;
    v is `verify_cost` and d `draft_cost`. With constant costs that is gamma c + 1, as in Theorem
    3.8.

    >>> improvement(levels=3, width=4, draft_width=8, gamma=5, c=0.1)
    2.0
    """
    drafting = np.asarray(draft_cost(width)) + (gamma - 1) * np.asarray(draft_cost(draft_width))
    step = np.asarray(verify_cost(width + draft_width * gamma)) + c * drafting
    return float(levels * np.asarray(verify_cost(width)) / step)
