"""The cost of an audit in units of the target's forward passes."""

from __future__ import annotations

import pytest
from tiny import llama, near_copy, without_tokenizer

from specnb.audit.cost import measure_audit_cost
from specnb.audit.teacher_forcing import Completion

TEXTS = [Completion([1], [2, 3, 0]), Completion([2, 3], [1, 1, 2])]


def test_times_are_in_target_runs() -> None:
    target = llama()
    found = measure_audit_cost(without_tokenizer(target, near_copy(target, noise=0.3)), TEXTS, repetitions=3)
    run, itself, plain, aimed = found.itertuples(index=False)
    assert run[3:6] == (1, 1, 1)
    assert plain.tokens == 6
    for one in (itself, plain, aimed):
        assert one.low <= one[3] <= one.high
    assert plain[2] > itself[2] > 0


def test_an_interval_needs_three_repetitions() -> None:
    target = llama()
    with pytest.raises(ValueError, match="at least 3 times"):
        measure_audit_cost(without_tokenizer(target, target), TEXTS, repetitions=2)
