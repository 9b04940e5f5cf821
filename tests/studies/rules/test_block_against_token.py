"""How the steps of both rules are counted and timed, and what follows from them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from specnb.rules import token_verification
from studies.rules.block_against_token import RULES, counted_steps, gather, items, timed_steps

PROMPTS = 8


def generation(steps: list[int]) -> Any:
    active = np.arange(max(steps)) < np.array(steps)[:, None]
    return SimpleNamespace(record=SimpleNamespace(active=active))


def measured(steps: dict[str, int], seconds: dict[str, float]) -> pd.DataFrame:
    """Two completions of 12 tokens and two timed calls of each of 8 prompts."""
    base = {"temperature": 1.0, "tokens": 12}
    counted = [base | steps | {"measured": "counted", "prompt": prompt} for prompt in [*range(PROMPTS)] * 2]
    timed = [base | seconds | {"measured": "timed", "prompt": prompt} for prompt in [*range(PROMPTS)] * 2]
    return pd.DataFrame(counted + timed)


def test_fewer_steps_make_a_rule_faster_and_longer_ones_slower() -> None:
    row = gather(measured({"token": 6, "block": 4}, {"token": 0.5, "block": 1.0})).iloc[0]
    assert (row.token_per_step, row.block_per_step) == (2, 3)
    assert (row.tokens_ratio, row.step_ratio, row.speed_ratio) == (1.5, 0.5, 0.75)
    assert (row.token_ms, row.block_ms) == (500, 1000)
    assert (row.prompts, row.sequences, row.calls) == (PROMPTS, 2 * PROMPTS, 2 * PROMPTS)


@pytest.mark.parametrize("name", ["token_per_step", "tokens_ratio", "step_ratio", "speed_ratio"])
def test_prompts_that_differ_give_an_interval_around_the_value(name: str) -> None:
    lines = measured({"token": 6, "block": 4}, {"token": 1.0, "block": 1.0})
    lines.loc[lines.prompt == 3, ["token"]] *= 2
    row = gather(lines).iloc[0]
    if name == "step_ratio":  # one of eight prompts moves no median
        assert row.step_ratio == 1
    else:
        assert row[f"{name}_low"] < row[name] < row[f"{name}_high"]


def test_every_completion_of_a_prompt_has_random_numbers_of_its_own() -> None:
    asked: list[int] = []

    def complete(rule: Any, prompts: list[list[int]], rows: range) -> Any:
        asked.extend(rows)
        return generation([1, 2])

    found = counted_steps(complete, [[5], [6]], repeats=3)
    assert found.groupby("prompt")[[*RULES]].sum().to_numpy().tolist() == [[3, 3], [6, 6]]
    assert sorted(asked) == sorted([*range(6)] * len(RULES))


def test_both_rules_are_timed_on_the_same_prompts_and_random_numbers() -> None:
    asked: dict[bool, list[Any]] = {True: [], False: []}

    def complete(rule: Any, prompts: list[list[int]], rows: list[int]) -> Any:
        asked[rule is token_verification].append((prompts, rows))
        return generation([4])

    found = timed_steps(complete, [[5], [6], [7]], rounds=2)
    assert asked[True] == asked[False]
    assert found.prompt.tolist() == [0, 1, 2, 0, 1, 2]
    assert (found[[*RULES]] > 0).all(axis=None)


def test_every_temperature_is_counted_and_timed() -> None:
    assert {item.rsplit("-", 1)[1] for item in items()} == {"counted", "timed"}
    assert len(items()) == 6


def test_calls_are_compared_in_pairs() -> None:
    lines = measured({"token": 6, "block": 6}, {"token": 1.0, "block": 2.0})
    slow = lines.measured.eq("timed") & (lines.prompt < 4)
    lines.loc[slow, [*RULES]] *= 10  # what slows both calls of a pair does not matter
    row = gather(lines).iloc[0]
    assert row.step_ratio_low == row.step_ratio == row.step_ratio_high == 0.5
