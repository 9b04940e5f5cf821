"""Arguments: whole numbers, lists of them, and values in messages."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

SHOWN = 200  # characters of a value in a message


def require_whole(more: str = "", /, **numbers: tuple[Any, int]) -> None:
    """Raise `ValueError`, which says `more`, unless each number, given with the least one allowed, is whole."""
    for name, (value, least) in numbers.items():
        number = whole(value)
        if number is None or number < least:
            raise ValueError(f"{name} is {shown(value)}; it must be a whole number from {least}{more}")


def whole(value: Any) -> int | None:
    """`value` as an int; None if it is no whole number of Python, numpy or torch. A truth value or list is none."""
    # torch would give the index of a tensor with one number, which is a prompt of one token.
    if isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and (value.ndim or value.dtype == torch.bool)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_numbers(values: Any) -> list[int] | None:
    """A list, array or tensor of whole numbers as a list of ints; None for anything else."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return None
    numbers = [whole(value) for value in values]
    return None if None in numbers else numbers  # type: ignore[return-value]  # no None is left


def token_list(name: str, values: Any, more: str = "") -> list[int]:
    """`values` as a list of ints; `TypeError` that calls them `name`, and says `more`, if they are something else."""
    numbers = whole_numbers(values)
    if numbers is None:
        raise TypeError(f"{name} is {shown(values)}; it must be a list of tokens, which are whole numbers{more}")
    return numbers


def shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
