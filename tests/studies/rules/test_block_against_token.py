"""How the steps of both rules are counted and timed, and what follows from them."""

import pandas as pd

from studies.rules.block_against_token import RULES, estimates

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
