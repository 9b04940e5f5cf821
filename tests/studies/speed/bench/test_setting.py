"""The columns of a row and their relations; no test asserts a time."""

import numpy as np
import pytest

from specnb.distributions import Sampling
from specnb.measure.speed import Speeds
from specnb.models.shapes import Shape
from studies.speed.bench.generators import prompts_for
from studies.speed.bench.setting import (
    Setting,
    Workload,
    measure_setting,
    memory,
    memory_bounds,
    step_times,
    workload,
)
from studies.speed.memory_bandwidth import min_seconds
from studies.speed.synthetic import synthetic_pair


@pytest.fixture(scope="module")
def load() -> Workload:
    pair = synthetic_pair(0.7, Shape(1, 64, 64, 2, gated=True), Shape(1, 32, 32, 2), vocab=256, context=64)
    return workload("tiny", pair, prompts_for(pair, "synthetic", 8, 5), Sampling(), 8)


def test_alpha_is_measured_along_sequences_of_the_target(load: Workload) -> None:
    assert load.beta.shape == (8, 8)
    assert load.beta.mean() == pytest.approx(0.7, abs=0.12)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_columns_of_a_row_are_consistent(load: Workload, rows: int) -> None:
    row = measure_setting(load, Setting(2, rows, False, new_tokens=6, repetitions=3), bandwidth=1e9)
    assert (row["pair"], row["gamma"], row["rows"], row["context"]) == ("tiny", 2, rows, 8)
    assert row["dtype"] == "float32"
    assert row["over_predicted"] == pytest.approx(row["refilled"] / row["predicted"])
    assert row["counted"] == pytest.approx(row["tokens_per_step"] / (2 * row["c"] + row["v"]))
    assert row["bound_plain_ms"] == pytest.approx(1e3 * min_seconds(load.pair.target, 1e9, rows, 1, 8))
    assert 0 < row["active"] <= 1
    if rows == 1:
        assert row["active"] == 1
        assert row["refilled"] == row["measured"]
    assert all(value > 0 for value in row.values() if isinstance(value, float))


def test_steps_are_timed_with_the_rows_that_have_ended() -> None:
    """Two rows, 0.5 s a token; plain, each step emits two; with drafts, 3 tokens a step of each active row."""
    seconds = np.array([[[0.0, 0.5, 0.0], [0.1, 0.1, 0.05]]] * 3)
    speeds = Speeds((0, 4), seconds, np.tile([1.0, 3.0], (3, 1)), np.tile([1.0, 0.75], (3, 1)))
    times = step_times(speeds, 2)
    assert times["plain_ms"] == pytest.approx(1000)
    assert times["step_ms"] == pytest.approx(1000 * 0.25 * 2 * 0.75 * 3)
    assert speeds.improvement(4).value == pytest.approx(2)
    assert speeds.improvement(4, refilled=True).value == pytest.approx(2 / 0.75)


def test_the_bound_of_a_step_is_that_of_all_its_runs(load: Workload) -> None:
    step, plain = (memory_bounds(load.pair, gamma, 1, 9, 1e9)["bound_step_ms"] for gamma in (3, 0))
    draft = 1e3 * min_seconds(load.pair.draft, 1e9, 1, 1, 9)
    verify = 1e3 * min_seconds(load.pair.target, 1e9, 1, 4, 9)
    assert step == pytest.approx(3 * draft + verify)
    assert plain == memory_bounds(load.pair, 0, 1, 9, 1e9)["bound_plain_ms"]


def test_memory_is_measured_and_predicted(load: Workload) -> None:
    one, four = (memory(load, Setting(2, rows, False, new_tokens=6)) for rows in (1, 4))
    assert one["weights_gb"] == four["weights_gb"] > 0
    assert four["predicted_gb"] == pytest.approx(4 * one["predicted_gb"])
    assert four["peak_gb"] == pytest.approx(four["predicted_gb"], rel=0.25)
