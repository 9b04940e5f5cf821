"""Whole calls: what is counted, and that plain decoding is compared with itself. Times are not asserted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tiny import llama

from specnb.distributions import Sampling
from specnb.drafters import ModelDrafter
from specnb.loading import load_pair
from specnb.sampler import Sampler
from studies.speed import calls
from studies.speed.calls import compared, fastest, way_of
from studies.speed.pair_speeds import NONE, drafters_of


def test_every_way_has_a_line_and_a_draft_like_the_target_is_accepted() -> None:
    target = llama(seed=0)
    samplers = {NONE: Sampler(target, None, gamma=0), "itself": Sampler(target, ModelDrafter(target), gamma=3)}
    ways = {name: way_of(sampler, 8) for name, sampler in samplers.items()}
    table, verified = compared(ways, [[1], [2, 0], [3]] * 3)
    assert table.way.tolist() == [NONE, "itself"]
    assert table.tokens_per_step.tolist() == [1.0, 4.0]
    assert table.speed_up[0] == table.speed_up_low[0] == table.speed_up_high[0] == 1
    assert (table.ms > 0).all()
    assert verified == {NONE: [1] * 72, "itself": [4] * 18}


def test_the_speed_up_is_over_the_way_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways that take 1, 2 and 4 seconds for 2, 2 and 8 tokens."""
    taken: dict[str, tuple[float, int]] = {"plain": (1.0, 2), "slow": (2.0, 2), "long": (4.0, 8)}

    def timed(call: Any, names: list[str], prompts: list[list[int]], device: str) -> Any:
        for number, prompt in enumerate(prompts):
            for name in names:
                call(name, prompt, number)
        return np.array([[taken[name][0] for name in names]] * len(prompts))

    monkeypatch.setattr(calls, "timed_in_turn", timed)
    ways: Any = {name: lambda number, prompt, n=n: (n, []) for name, (_, n) in taken.items()}
    table, _ = compared(ways, [[1], [2]], {"long": "slow"})
    assert table.speed_up.tolist() == [1, 0.5, 2]
    assert table.over.tolist() == ["plain", "plain", "slow"]
    assert "tokens_per_step" not in table
    assert fastest(ways, [[1]]) == "plain"
    assert compared(ways, [[1]], plain=["slow", "long"])[0].speed_up.tolist() == [1, 0.5, 1]


def test_every_drafter_samples_as_the_target() -> None:
    drafters: list[Any] = list(drafters_of(load_pair(), Sampling(0.0), False).values())
    assert len(drafters) == 6
    assert {drafter.sampling for drafter in drafters[1:]} == {Sampling(temperature=0.0)}
