"""How the two rules' steps are counted and timed, and what follows from it."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specnb.experiments.block_against_token import RULES, Measured, seconds_ratio, steps_of, steps_ratio, timed_steps
from specnb.sampling.verification import token_verification

TOKEN = Measured(np.array([30, 50]), np.array([[2.0, 4.0], [3.0, 3.0]]))
BLOCK = Measured(np.array([20, 20]), np.array([[6.0, 6.0], [6.0, 2.0]]))


def generation(steps: list[int]) -> Any:
    active = np.arange(max(steps)) < np.array(steps)[:, None]
    return SimpleNamespace(record=SimpleNamespace(active=active))


def test_fewer_steps_of_block_verification_make_it_faster() -> None:
    assert steps_ratio(TOKEN, BLOCK, np.array([0, 1])) == 2
    assert steps_ratio(TOKEN, BLOCK, np.array([0])) == 1.5


def test_longer_steps_of_block_verification_make_it_slower() -> None:
    assert seconds_ratio(TOKEN, BLOCK, np.array([0, 1])) == 0.5


def test_every_completion_of_a_prompt_has_random_numbers_of_its_own() -> None:
    asked: list[int] = []

    def complete(rule: Any, prompts: list[list[int]], rows: range) -> Any:
        asked.extend(rows)
        return generation([1, 2])

    assert steps_of(complete, "block", [[5], [6]], repeats=3).tolist() == [3, 6]
    assert asked == list(range(6))


def test_both_rules_are_timed_on_the_same_prompts_and_random_numbers() -> None:
    asked: dict[bool, list[Any]] = {True: [], False: []}

    def complete(rule: Any, prompts: list[list[int]], rows: list[int]) -> Any:
        asked[rule is token_verification].append((prompts, rows))
        return generation([4])

    seconds = timed_steps(complete, [[5], [6], [7]], rounds=2)
    assert asked[True] == asked[False]
    assert {name: own.shape for name, own in seconds.items()} == dict.fromkeys(RULES, (3, 2))


@pytest.mark.parametrize("item", ["0", "1"])
def test_a_line_has_every_number_within_its_interval(item: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from specnb.experiments import block_against_token as experiment

    monkeypatch.setattr(experiment, "load_pair", lambda **_: None)
    monkeypatch.setattr(experiment, "prompts_for", lambda pair, name, count, length: [[5]] * count)
    monkeypatch.setattr(
        experiment, "_complete", lambda pair, sampling, n, rule, prompts, rows: generation([3] * len(prompts))
    )
    row = experiment.measure(item, prompts=8, repeats=2, new_tokens=6, timed_rounds=1).iloc[0]
    assert row.sequences == (8 if item == "0" else 16)
    assert row.token_per_step == row.token_per_step_low == 2
    assert row.speed_ratio_low <= row.speed_ratio <= row.speed_ratio_high
