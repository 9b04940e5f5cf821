"""Speeds: what is counted, and that plain decoding is compared with itself. Times are not
asserted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from tiny import llama

from specnb.distributions import Sampling
from specnb.drafting.model import ModelDrafter
from specnb.models.loading import load_pair
from studies.speed.bench_walltime import counted
from studies.speed.pair_speeds import GAMMA, GAMMAS, NONE, Calls, Entry, entries
from studies.speed.pairs import MODULES, prompts_of


def calls_of(target: Any, new_tokens: int) -> Calls:
    return Calls(target, Sampling(), new_tokens)


def test_every_entry_has_a_line_and_a_draft_like_the_target_is_accepted() -> None:
    target = llama(seed=0)
    chosen = [Entry(NONE, None, 0), Entry("itself", ModelDrafter(target), 3)]
    table = calls_of(target, 8).compared(chosen, [[1], [2, 0], [3]] * 3)
    assert table.drafter.tolist() == [NONE, "itself"]
    assert table.tokens_per_step.tolist() == [1.0, 4.0]
    assert table.speed_up[0] == table.speed_up_low[0] == table.speed_up_high[0] == 1
    assert (table.ms > 0).all()


def test_gamma_is_the_fastest_one_and_none_for_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, seconds = calls_of(llama(), 4), {3: 5.0, 4: 3.0, 5: 1.0, 6: 2.0, 8: 4.0}
    tokens = np.ones((2, 1, len(seconds)))
    monkeypatch.setattr(Calls, "timed", lambda _, chosen, __: (np.array([[seconds[e.gamma] for e in chosen]]), tokens))
    assert set(seconds) == set(GAMMAS)
    assert calls.with_gamma(Entry("it", ModelDrafter(llama()), GAMMA), [[1], [2]]).gamma == 5
    assert calls.with_gamma(Entry(NONE, None, 0), [[1]]) == Entry(NONE, None, 0)


@pytest.mark.parametrize("compiled", [False, True])
def test_drafters_are_compiled_where_the_target_is(compiled: bool) -> None:
    drafters: list[Any] = [entry.drafter for entry in entries(load_pair(), Sampling(0.0), compiled)[1:]]
    assert {drafter.compile for drafter in drafters} == {compiled}
    assert {drafter.sampling for drafter in drafters} == {Sampling(temperature=0.0)}


def test_prompts_are_refused_where_there_are_not_so_many() -> None:
    pair = load_pair()
    assert {len(prompt) for kind in ("held-out", "stdlib", "random") for prompt in prompts_of(pair, kind, 2, 5)} == {5}
    with pytest.raises(ValueError, match=f"there are {len(MODULES)} stdlib prompts, fewer than 99; ask for fewer"):
        prompts_of(pair, "stdlib", 99)


def test_the_prediction_from_counted_tokens() -> None:
    table = pd.DataFrame({"tokens_per_step": [3.0], "gamma": [4], "c": [0.1], "v": [1.6]})
    assert counted(table).tolist() == pytest.approx([3 / (4 * 0.1 + 1.6)])
