"""Speeds computed from timed generations; no test asserts a time."""

from __future__ import annotations

import numpy as np
import pytest
from tiny import roomy_pair

from studies.speed.speeds import Speeds, measure_speeds


def speeds_of(step: list[float], tokens: list[float], active: list[float]) -> Speeds:
    """gamma = 3, whose steps take `step` seconds and give each active row `tokens`; a plain step
    takes 1 second."""
    ones = [1.0] * len(step)
    return Speeds((0, 3), *(np.array([ones, each]).T for each in (step, tokens, active)))


def test_steps_of_every_gamma_are_timed_and_rows_that_have_ended_are_not_active() -> None:
    speeds = measure_speeds(roomy_pair(), [[1, 2, 3], [4, 5], [6]], (0, 2), max_new_tokens=20, rows=8)
    assert (speeds.seconds > 0).all()
    assert (speeds.tokens[:, 0] == 1).all()
    assert (speeds.active[:, 0] == 1).all()
    assert 0 < speeds.active[:, 1].min() < 1 == speeds.active.max()
    assert speeds.improvement(0)[:3] == (1, 1, 1)


def test_waiting_rows_slow_a_batch_down() -> None:
    """A step of 3 seconds gives each of the rows that are active 2 tokens."""
    active = [0.5, 0.75, 1.0]
    speeds = speeds_of([3.0] * 3, [2.0] * 3, active)
    assert speeds.improvement(3, refilled=True).value == pytest.approx(2 / 3)
    assert speeds.improvement(3).value == pytest.approx(2 / 3 / np.mean(1 / np.array(active)))


def test_neither_a_slow_moment_nor_a_lucky_prompt_decides() -> None:
    """Steps of 2 seconds, one of them held up, that give 2, 2, 4 and 4 tokens."""
    speeds = speeds_of([2.0, 20.0, 2.0, 2.0], [2.0, 2.0, 4.0, 4.0], [1.0] * 4)
    # Equally long sequences took 1/2, 1/2, 1/4 and 1/4 steps a token.
    assert speeds.tokens_per_step(3) == pytest.approx(8 / 3)
    found = speeds.improvement(3)
    assert found.value == pytest.approx((8 / 3) / 2)
    assert found.low < found.value < found.high
