"""Criteria that several rules share, and the thresholds of the claims.

`data/claims.csv` is the one place where a threshold is written: its column `threshold` says in words what a claim
needs, with every number after a comparison sign.
"""

from __future__ import annotations

import re
from functools import cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import norm

from specnb.notebook.findings import all_claims, named

_COMPARED = re.compile(r"[<>]=? (\d[\d.]*(?:e[+-]?\d+)?)(%?)")


@cache
def thresholds(claim: str) -> tuple[float, ...]:
    """The numbers in the threshold of `claim`, in the order in which they are written there.

    Raises `KeyError` for a claim that is not in the table, `RuntimeError` outside the project's checkout.

    >>> thresholds("verify-is-free")
    (1.1, 0.75)
    """
    return compared(str(all_claims().set_index("id").threshold[claim]))


def compared(words: str) -> tuple[float, ...]:
    """The numbers after `<`, `>`, `<=` and `>=` in `words`, percentages as fractions.

    >>> compared("v(5) <= 1.1 in >= 75% of the settings; error < 1e-12")
    (1.1, 0.75, 1e-12)
    """
    found = _COMPARED.findall(words)
    return tuple(float(number) / 100 if percent else float(number) for number, percent in found)


def share(good: ArrayLike) -> float:
    """The fraction of true values; 0 if there is none to ask."""
    values = np.asarray(good, dtype=bool)
    return float(values.mean()) if values.size else 0.0


def under_a_condition(good: ArrayLike, condition: ArrayLike, enough: float) -> str:
    """The verdict on a claim that is to be `good` in a fraction `enough` of the settings.

    `conditional` needs both sides: enough of the settings in which `condition` is true are good, and of the others
    are not.

    >>> under_a_condition([1, 1, 0, 0], [1, 1, 0, 0], 0.75), under_a_condition([1, 0, 0, 0], [1, 1, 0, 0], 0.75)
    ('conditional', 'refuted')
    """
    good, condition = np.asarray(good, dtype=bool), np.asarray(condition, dtype=bool)
    inside, outside = share(good[condition]) >= enough, share(good[~condition]) >= enough
    return named(share(good) >= enough, holds_if=inside and not outside)


def all_of(right: int, of: int) -> bool:
    """Whether all of `of` cases came out right, and there was one."""
    return right == of > 0


def within_chance(deviations: ArrayLike, claim: str) -> bool:
    """Whether deviations in standard errors are within chance, at the claim's first threshold as the rate of a false
    alarm for all of them together.

    >>> within_chance([0.3, -2.1], "walltime"), within_chance([0.3, -7.5], "walltime")
    (True, False)
    """
    deviations = np.atleast_1d(np.asarray(deviations, dtype=float))
    return bool(np.abs(deviations).max() < norm.isf(thresholds(claim)[0] / (2 * deviations.size)))


def contains(low: float, value: float, high: float) -> bool:
    """Whether the interval from `low` to `high` contains `value`."""
    return bool(low <= value <= high)
