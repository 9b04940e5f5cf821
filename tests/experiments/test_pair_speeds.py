"""The speeds of the pair: what is counted, and that plain decoding is compared with itself. Times are not asserted."""

from __future__ import annotations

import pytest
from tiny import llama

from specnb.drafting.model import ModelDrafter
from specnb.experiments import pair_speeds
from specnb.experiments.pair_speeds import HEADS, NONE, SMOKE, Entry, compared, entries, items, measure
from specnb.models.loading import Pair, load_pair
from specnb.sampling.distributions import Sampling


def test_every_entry_has_a_line_and_a_draft_like_the_target_is_accepted() -> None:
    target, no_tokenizer = llama(seed=0), None
    pair = Pair(target, target, no_tokenizer)  # type: ignore[arg-type]
    chosen = [Entry(NONE, None, 0), Entry("itself", ModelDrafter(target), 3)]
    table = compared(pair, chosen, [[1], [2, 0], [3]] * 3, Sampling(), compiled=False, new_tokens=8)
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


def test_drafters_are_compiled_where_the_target_is(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[list[Entry], bool]] = []

    def noted(pair: Pair, chosen: list[Entry], *rest: object) -> object:
        made.append((chosen, bool(rest[2])))
        raise KeyboardInterrupt

    monkeypatch.setattr(pair_speeds, "compared", noted)
    for how in ("eager", "compiled"):
        with pytest.raises(KeyboardInterrupt):
            measure(f"shipped-{how}-0", **SMOKE)
    for chosen, compiled in made:
        assert {entry.drafter.compile for entry in chosen[1:]} == {compiled}  # type: ignore[union-attr]
        assert {entry.drafter.sampling for entry in chosen[1:]} == {Sampling(temperature=0.0)}  # type: ignore[union-attr]
