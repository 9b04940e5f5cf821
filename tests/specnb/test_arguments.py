"""Whole numbers and numbers in an interval: what is allowed, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specnb.arguments import require_number, require_whole, shown, whole


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("too many digits")


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), torch.tensor(3), torch.tensor([3])])
def test_a_whole_number_of_python_numpy_or_torch_is_one(value: Any) -> None:
    assert whole(value) == 3
    assert type(whole(value)) is int
    require_whole(a=(value, 3), b=(10**5000, 1))


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), 2.0, np.float32(2), "2", None, torch.ones(2)])
def test_truth_values_and_other_things_are_none(value: Any) -> None:
    assert whole(value) is None
    with pytest.raises(ValueError, match="must be a whole number from 0"):
        require_whole(a=(value, 0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": (3, 0), "b": (-1, 0)}, "b is -1; it must be a whole number from 0"),
        ({"a": (1, 2)}, "a is 1; it must be a whole number from 2"),
        ({"a": (torch.tensor([1, 2]), 0)}, "a is tensor([1, 2]); it must be a whole number from 0"),
        ({"a": (Unprintable(), 0)}, "a is a Unprintable too long to show; it must be a whole number from 0"),
    ],
)
def test_the_first_that_is_not_whole_or_too_small_is_named(given: dict[str, tuple[Any, int]], message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        require_whole(**given)
    assert str(caught.value) == message


def test_a_long_value_is_cut() -> None:
    assert shown("x" * 198) == repr("x" * 198)
    assert shown("x" * 199) == "'" + "x" * 199 + "..."


@pytest.mark.parametrize("value", [0, 0.5, np.float64(1), 1])
def test_a_number_in_the_interval_is_allowed_with_its_ends(value: Any) -> None:
    require_number(most=1.0, weight=value)


@pytest.mark.parametrize("value", [-1e-9, 1.5, float("nan"), float("inf"), "1", None, 10**400])
def test_a_number_outside_and_what_is_no_number_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"weight is .*; it must lie in \[0, 1\]"):
        require_number(most=1.0, weight=value)


def test_any_finite_number_from_zero_is_allowed_by_default() -> None:
    require_number(cost=1e300)
    for value in (float("inf"), -1.0):
        with pytest.raises(ValueError, match=f"cost is {value}; it must lie in"):
            require_number(cost=value)
