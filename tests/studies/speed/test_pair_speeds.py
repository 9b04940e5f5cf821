"""The speeds of the pair: what is counted, and that plain decoding is compared with itself. Times are not asserted."""

from __future__ import annotations

import pytest
from tiny import llama

from specnb.distributions import Sampling
from specnb.drafting.model import ModelDrafter
from specnb.models.loading import Pair, load_pair
from studies.speed.pair_speeds import GAMMA, GAMMAS, HEADS, NONE, SMOKE, Calls, Entry, entries, items, measure


def test_every_entry_has_a_line_and_a_draft_like_the_target_is_accepted() -> None:
    target, no_tokenizer = llama(seed=0), None
    pair = Pair(target, target, no_tokenizer)  # type: ignore[arg-type]
    chosen = [Entry(NONE, None, 0), Entry("itself", ModelDrafter(target), 3)]
    table = Calls(pair, Sampling(), compiled=False, new_tokens=8).compared(chosen, [[1], [2, 0], [3]] * 3)
    assert table.drafter.tolist() == [NONE, "itself"]
    assert table.tokens_per_step.tolist() == [1.0, 4.0]
    assert table.speed_up[0] == table.speed_up_low[0] == table.speed_up_high[0] == 1
    assert (table.ms > 0).all()


def test_the_pair_is_measured_on_both_kinds_of_prompts() -> None:
    assert items()[:3] == ["shipped-eager-1", "shipped-eager-0", "shipped-compiled-1"]
    table = measure("shipped-eager-1", **SMOKE)
    names = [entry.name for entry in entries(load_pair(), HEADS["shipped"], Sampling(), compiled=False)]
    assert table.drafter.tolist() == names * 2
    assert set(table.prompts) == {"held-out", "stdlib"}
    assert set(table.target) == {"shipped"}
    assert (table.tokens_per_step[table.drafter != NONE] > 1).all()
    assert set(table.gamma[table.drafter != NONE]) <= set(GAMMAS)


def test_gamma_is_the_fastest_one_and_none_for_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(llama(), llama(), None)  # type: ignore[arg-type]
    calls = Calls(pair, Sampling(), compiled=False, new_tokens=4)
    seconds = {3: 5.0, 4: 3.0, 5: 1.0, 6: 2.0, 8: 4.0}
    monkeypatch.setattr(Calls, "once", lambda self, entry, prompt, row: (seconds[entry.gamma], 1))
    assert calls.with_gamma(Entry("it", ModelDrafter(pair.draft), GAMMA), [[1], [2]]).gamma == 5
    assert calls.with_gamma(Entry(NONE, None, 0), [[1]]) == Entry(NONE, None, 0)


def test_drafters_are_compiled_where_the_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[Entry], bool]] = []

    def noted(calls: Calls, chosen: list[Entry], prompts: object) -> object:
        made.append((chosen, calls.compiled))
        raise KeyboardInterrupt

    monkeypatch.setattr(Calls, "compared", noted)
    for how in ("eager", "compiled"):
        with pytest.raises(KeyboardInterrupt):
            measure(f"shipped-{how}-0", **SMOKE)
    for chosen, compiled in made:
        assert {entry.drafter.compile for entry in chosen[1:]} == {compiled}  # type: ignore[union-attr]
        assert {entry.drafter.sampling for entry in chosen[1:]} == {Sampling(temperature=0.0)}  # type: ignore[union-attr]
