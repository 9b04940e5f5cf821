"""Whole numbers: what is allowed, and what is not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from specnb.arguments import require_whole, whole, whole_numbers


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3), torch.tensor(3)])
def test_a_whole_number_of_python_numpy_or_torch_is_one(value: Any) -> None:
    assert (whole(value), type(whole(value))) == (3, int)
    require_whole(a=(value, 3), b=(10**30, 1))


@pytest.mark.parametrize(
    "value", [-1, True, np.True_, torch.tensor(True), torch.tensor([2]), 2.0, np.float32(2), "2", None]
)
def test_anything_else_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^b is .*; it must be a whole number from 0$"):
        require_whole(a=(3, 0), b=(value, 0))


@pytest.mark.parametrize("values", [[3, 1], (3, np.int8(1)), np.array([3, 1]), torch.tensor([3, 1]), range(3, 0, -2)])
def test_lists_arrays_and_tensors_are_lists_of_numbers(values: Any) -> None:
    numbers = whole_numbers(values)
    assert numbers == [3, 1]
    assert {type(number) for number in numbers} == {int}


@pytest.mark.parametrize(
    "values", [3, "31", b"31", {3, 1}, iter([3]), [0.5], [[3]], [torch.tensor([3])], np.array([True]), np.array(3)]
)
def test_other_things_are_no_lists_of_numbers(values: Any) -> None:
    assert whole_numbers(values) is None
