"""Checks of arguments that several packages make: whole numbers, and numbers in an interval; what
messages show.

The messages say what was given and what is allowed.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHOWN = 200  # characters of a value in a message


def require_whole(**numbers: tuple[Any, int]) -> None:
    """Raises `ValueError` unless each of `numbers`, a value and the least one allowed, is a whole
    number from there.

    >>> require_whole(gamma=(4, 0))
    """
    for name, (value, least) in numbers.items():
        number = whole(value)
        if number is None or number < least:
            raise ValueError(f"{name} is {shown(value)}; it must be a whole number from {least}")


def require_number(least: float = 0.0, most: float = sys.float_info.max, **numbers: Any) -> None:
    """Raises `ValueError` unless each of `numbers` is a number from `least` to `most`.

    >>> require_number(most=1.0, weight=0.3)
    """
    for name, value in numbers.items():
        if not least <= real(value) <= most:
            raise ValueError(f"{name} is {shown(value)}; it must lie in [{least:g}, {most:g}]")


def real(value: Any) -> float:
    """`value` as a float if it is a real number, else NaN; NaN too for a truth value, and for what
    no float holds.

    >>> real(np.int64(3)), real("3")
    (3.0, nan)
    """
    try:
        return math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        return math.nan


def whole(value: Any) -> int | None:
    """`value` as an int if it is a whole number of Python, numpy or torch, else None. A truth value
    is no number.

    >>> whole(np.int64(3)), whole(True), whole(2.0)
    (3, None, None)
    """
    if isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_numbers(values: Any) -> list[int] | None:
    """`values`, a list, array or dense tensor of whole numbers, as a list of ints; None if it is
    anything else.

    >>> whole_numbers(torch.tensor([3, 1])), whole_numbers("31"), whole_numbers([0.5])
    ([3, 1], None, None)
    """
    if isinstance(values, Tensor) and (values.is_meta or values.layout != torch.strided):
        return None
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return None
    numbers = [whole(value) for value in values]
    return None if None in numbers else numbers  # type: ignore[return-value]  # no None is left


def shown(value: Any) -> str:
    """`repr(value)` in one line, cut if it is long.

    >>> shown([1] * 1000)[-9:]
    ', 1, 1...'
    >>> shown(np.zeros((2, 1)))
    'array([[0.], [0.]])'
    """
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def reason(error: BaseException) -> str:
    r"""The first line of the message of `error`, or its type if there is none.

    >>> reason(ValueError("too long\nby far")), reason(KeyError())
    ('too long', 'KeyError')
    """
    return (str(error).splitlines() or [type(error).__name__])[0]
