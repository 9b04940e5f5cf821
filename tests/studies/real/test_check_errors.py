"""The table of both errors of the check, on one text, and what the check costs, in one process."""

from __future__ import annotations

import pytest

from studies.real import check_costs, check_errors


def test_a_fault_is_found_by_its_size_and_a_right_result_is_not() -> None:
    found = list(check_errors.wrong("pair", "float32", texts=1))
    for line in found:
        assert line["refused"] == (line["comparisons"] if line["size"] > 0 else 0), line  # the row is one compared
    assert {line["what"] for line in found} >= set(check_errors.FAULTS)
    assert {line["where"] for line in found} == {"first step", "completion"}


def test_a_rate_has_its_interval() -> None:
    assert check_errors.rate(0, 500)["high"] == pytest.approx(1 - 0.025 ** (1 / 500))
    assert check_errors.rate(3, 3)["low"] == pytest.approx(0.025 ** (1 / 3))


def test_costs_have_every_call() -> None:
    made = check_costs.once("tiny", check=True, new_tokens=2, rows=1)
    assert set(made) == {*check_costs.CALLS, "gb"}
    assert min(made.values()) >= 0
