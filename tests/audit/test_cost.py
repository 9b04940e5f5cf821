"""The cost of an audit in units of the target's forward passes."""

from __future__ import annotations

from itertools import count

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


def test_on_a_cpu_the_time_is_that_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a processor clock that goes on by a second whenever it is read, every job takes as long as any other."""
    ticks = count()
    monkeypatch.setattr("time.process_time", lambda: float(next(ticks)))
    target = llama()
    found = measure_audit_cost(without_tokenizer(target, near_copy(target, noise=0.3)), TEXTS, repetitions=3)
    assert found["in target passes"].tolist() == [1.0] * len(found)
