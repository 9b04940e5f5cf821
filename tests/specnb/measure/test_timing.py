"""Interleaved timing: what runs, in which order, and what counts. No test asserts a time."""

from __future__ import annotations

import numpy as np

from specnb.statistics import Job, run_round, time_round


class Ticks:
    """A clock that advances by one second for each call of `work`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.ran: list[str] = []

    def __call__(self) -> float:
        return self.seconds

    def work(self, name: str) -> None:
        self.seconds += 1
        self.ran.append(name)


def test_jobs_run_in_random_order_and_what_comes_before_is_not_timed() -> None:
    clock = Ticks()

    def job(name: str, work: int, times: int) -> Job:
        before = [lambda: clock.work(f"before {name}")]
        return Job(lambda: [clock.work(name) for _ in range(work)], before, times)

    order = np.random.default_rng(0)
    for _ in range(8):
        assert time_round([job("a", 1, 1), job("b", 3, 2)], clock, order).tolist() == [1.0, 3.0]
    a, b = ("before a", "a"), ("before b", *["b"] * 6)
    rounds_run = {tuple(clock.ran[at : at + 9]) for at in range(0, len(clock.ran), 9)}
    assert len(clock.ran) == 9 * 8
    assert rounds_run == {a + b, b + a}


def test_results_come_back_in_the_order_given() -> None:
    order = np.random.default_rng(0)
    assert all(run_round([lambda: 1, lambda: 2, lambda: 3], order) == [1, 2, 3] for _ in range(9))
