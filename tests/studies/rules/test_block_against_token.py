"""How the steps of both rules are counted and timed, and what follows from them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd

from studies.rules.block_against_token import RULES, counted_steps, estimates, timed_steps

PROMPTS = 8


def measured(steps: dict[str, int], seconds: dict[str, float]) -> pd.DataFrame:
    """Two completions of 12 tokens and two timed calls of each of 8 prompts."""
    base = {"temperature": 1.0, "tokens": 12}
    counted = [base | steps | {"measured": "counted", "prompt": prompt} for prompt in [*range(PROMPTS)] * 2]
    timed = [base | seconds | {"measured": "timed", "prompt": prompt} for prompt in [*range(PROMPTS)] * 2]
    return pd.DataFrame(counted + timed)


def test_fewer_steps_make_a_rule_faster_and_longer_ones_slower() -> None:
    lines = measured({"token": 6, "block": 4}, {"token": 0.5, "block": 1.0})
    row = estimates(lines).iloc[0]
    assert (row.token_per_step, row.block_per_step) == (2, 3)
    assert (row.tokens_ratio, row.step_ratio, row.speed_ratio) == (1.5, 0.5, 0.75)
    assert (row.token_ms, row.block_ms, row.prompts, row.sequences, row.calls) == (500, 1000, 8, 16, 16)
    # Slows both calls of a pair.
    lines.loc[lines.measured.eq("timed") & (lines.prompt < 4), [*RULES]] *= 10
    lines.loc[lines.measured.eq("counted") & (lines.prompt == 3), "token"] *= 2
    row = estimates(lines).iloc[0]
    assert row.step_ratio_low == row.step_ratio == row.step_ratio_high == 0.5
    for name in ("token_per_step", "tokens_ratio", "speed_ratio"):
        assert row[f"{name}_low"] < row[name] < row[f"{name}_high"], name


def test_both_rules_have_the_same_prompts_and_random_numbers_and_every_completion_its_own() -> None:
    asked: dict[bool, list[Any]] = {True: [], False: []}

    def complete(name: str, prompts: list[list[int]], rows: Any) -> Any:
        asked[name == "token"].append((prompts, list(rows)))
        active = np.arange(2) < np.array([1, 2])[: len(prompts), None]
        return SimpleNamespace(record=SimpleNamespace(active=active))

    found = counted_steps(complete, [[5], [6]], repeats=3)
    assert found.groupby("prompt")[[*RULES]].sum().to_numpy().tolist() == [[3, 3], [6, 6]]
    assert [row for _, rows in asked[True] for row in rows] == [*range(6)]
    times = timed_steps(complete, [[5], [6], [7]], rounds=2)
    assert asked[True] == asked[False]
    assert times.prompt.tolist() == [0, 1, 2, 0, 1, 2]
    assert (times[[*RULES]] > 0).all(axis=None)
