"""The time of a step of speculative beam search (Appendix A.4): the target keeps w beams (`width`),
the draft model u (`draft_width`)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

Cost = Callable[[int], ArrayLike]
"""Time of a forward pass over n tokens, in forward passes of the same model over one token."""


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
