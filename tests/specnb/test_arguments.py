"""Whole numbers and numbers in an interval: what is allowed, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specnb.arguments import require_number, require_whole, shown, whole, whole_numbers


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), torch.tensor(3), torch.tensor([3])])
def test_a_whole_number_of_python_numpy_or_torch_is_one(value: Any) -> None:
    assert (whole(value), type(whole(value))) == (3, int)
    require_whole(a=(value, 3), b=(10**30, 1))


@pytest.mark.parametrize("value", [True, np.True_, torch.tensor(True), 2.0, np.float32(2), "2", None, torch.ones(2)])
def test_truth_values_and_other_things_are_none(value: Any) -> None:
    assert whole(value) is None
    with pytest.raises(ValueError, match=r"a is .*; it must be a whole number from 0"):
        require_whole(a=(value, 0))


def test_the_first_that_is_too_small_is_named() -> None:
    with pytest.raises(ValueError, match=r"^b is -1; it must be a whole number from 0$"):
        require_whole(a=(3, 0), b=(-1, 0), c=(-2, 0))


@pytest.mark.parametrize("values", [[3, 1], (3, np.int8(1)), np.array([3, 1]), torch.tensor([3, 1]), range(3, 0, -2)])
def test_lists_arrays_and_tensors_are_lists_of_numbers(values: Any) -> None:
    numbers = whole_numbers(values)
    assert numbers == [3, 1]
    assert {type(number) for number in numbers} == {int}


@pytest.mark.parametrize("values", [3, "31", b"31", {3, 1}, iter([3]), [0.5], [[3]], np.array([True]), np.array(3)])
def test_other_things_are_no_lists_of_numbers(values: Any) -> None:
    assert whole_numbers(values) is None


def test_a_long_value_is_cut() -> None:
    assert shown("x" * 198) == repr("x" * 198)
    assert shown("x" * 199) == "'" + "x" * 199 + "..."


@pytest.mark.parametrize("value", [0, 0.5, np.float64(1), 1])
def test_a_number_in_the_interval_is_allowed_with_its_ends(value: Any) -> None:
    require_number(most=1.0, weight=value)
    require_number(cost=1e300)


@pytest.mark.parametrize("value", [-1e-9, 1.5, float("nan"), float("inf"), "1", None])
def test_a_number_outside_and_what_is_no_number_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"weight is .*; it must lie in \[0, 1\]"):
        require_number(most=1.0, weight=value)
