"""The cost of an audit in units of the target's forward passes."""

from __future__ import annotations

import time
from functools import partial
from itertools import count

import numpy as np
import pytest
import torch
from tiny import llama, near_copy, without_tokenizer

from specnb.decoding.record import now
from specnb.measure.statistics import ratio_of_medians
from specnb.measure.timing import Job
from specnb_audit import cost
from specnb_audit.teacher_forcing import Completion
from studies.audit_power.audit_cost import measure_audit_cost

TEXTS = [Completion([1], [2, 3, 0]), Completion([2, 3], [1, 1, 2])]


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


@pytest.mark.parametrize("settings", [{}, {"repetitions": 3, "seed": 7}])
def test_the_table_is_made_of_the_medians_of_the_jobs(
    settings: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each job once in every round, after one pass that does not count; the times of the jobs are given here."""
    calls: list[tuple[str, object, tuple[object, ...], dict[str, object]]] = []
    for name in ("teacher_forced_pass", "measure_numerics", "audit"):
        monkeypatch.setattr(
            cost, name, lambda model, *given, name=name, **more: calls.append((name, model, given, more))
        )
    rounds: list[list[Job]] = []
    repetitions, seed = settings.get("repetitions", 5), settings.get("seed", 0)
    seconds = np.array([[2.0, 1.0, 6.0, 8.0], [2.0, 3.0, 5.0, 9.0], [4.0, 1.0, 7.0, 4.0], [2, 2, 2, 2], [1, 5, 3, 2]])
    seconds = seconds[:repetitions]

    def timed(given: list[list[Job]], clock: object, order: np.random.Generator, *, warm_up: int) -> object:
        rounds.extend(given)
        assert (clock, warm_up) == (time.process_time, 0)
        assert order.random() == np.random.default_rng(seed).random()
        return seconds

    monkeypatch.setattr(cost, "time_rounds", timed)
    target = llama()
    pair = without_tokenizer(target, near_copy(target, noise=0.3))
    found = measure_audit_cost(pair, TEXTS, **settings)
    assert calls.pop(0) == ("teacher_forced_pass", target, (TEXTS[:1],), {})
    assert calls == []
    assert [len(jobs) for jobs in rounds] == [4] * repetitions
    for job in rounds[0]:
        assert (job.before, job.times) == ((), 1)
        job.run()
    quiet = {"prompts": [[1], [2, 3]], "progress": False}
    tokens = ([[2, 3, 0], [1, 1, 2]],)
    assert calls == [
        ("teacher_forced_pass", target, (TEXTS,), {}),
        ("measure_numerics", target, (TEXTS,), {}),
        ("audit", target, tokens, quiet),
        ("audit", target, tokens, quiet | {"draft": pair.draft}),
    ]
    ratios = [ratio_of_medians(column, seconds[:, 0]) for column in seconds.T]
    assert found.to_dict("list") == {
        "time of": [
            "the target's run",
            "of the audit: the target against itself",
            "the audit",
            "the audit, aimed by the draft",
        ],
        "tokens": [6] * 4,
        "ms per token": pytest.approx([1000 / 6 * float(np.median(column)) for column in seconds.T], rel=1e-12),
        "in target passes": [ratio.value for ratio in ratios],
        "low": [ratio.low for ratio in ratios],
        "high": [ratio.high for ratio in ratios],
        "repetitions": [repetitions] * 4,
    }


def test_other_devices_have_a_clock_that_waits_for_them() -> None:
    assert cost._clock(torch.device("cpu")) is time.process_time
    other = cost._clock(torch.device("meta"))
    assert isinstance(other, partial)
    assert (other.func, other.args) == (now, (torch.device("meta"),))
