"""A number with the least and the greatest that it may be, and checks of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

Pair = tuple[float, float]


@dataclass(frozen=True)
class Range:
    """A value, and the least and greatest that what is not known allows.

    >>> print(Range(2.0, 1.5, 2.25), 2 * Range(1.5, 1.5, 1.5))
    2.00 [1.50, 2.25] 3.00
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" [{self.low:.2f}, {self.high:.2f}]" if self.low < self.high else "")

    def __rmul__(self, factor: float) -> Range:
        return Range(factor * self.value, factor * self.low, factor * self.high)


def exactly(value: float) -> Range:
    return Range(value, value, value)


def in_range(name: str, value: Any, least: float, most: float) -> float:
    """`value` as a float. Raises `ValueError` unless it is a number from `least` to `most`."""
    number = float(value) if not isinstance(value, bool) and isinstance(value, Real) else math.nan
    if not least <= number <= most:
        raise ValueError(f"{name} is {value!r}; need a number from {least:g} to {most:g}")
    return number


def pair(name: str, value: Any) -> Pair:
    """Two positive numbers. Raises `ValueError` for anything else."""
    if isinstance(value, str) or not hasattr(value, "__len__") or len(value) != 2:
        raise ValueError(f"{name} is {value!r}; need two positive numbers")
    first, second = (in_range(name, one, math.ulp(0.0), 1e300) for one in value)
    return first, second
