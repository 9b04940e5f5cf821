"""From a speed-up back to the cost of a step: the inverse of `predict`, and nothing assumed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb import explain, predict

COSTS = st.floats(0, 2)


@given(tokens=st.floats(1, 5), c=COSTS, v=st.floats(1, 4), rest=COSTS)
def test_what_predict_adds_up_explain_takes_apart(tokens: float, c: float, v: float, rest: float) -> None:
    setting: dict[str, Any] = {"tokens_per_step": tokens, "gamma": 4, "cost_ratio": c, "verify_cost": v}
    speedup = predict(**setting, overhead=rest).speedup.value
    if not 0.01 <= speedup <= 1000:
        return
    found = explain(speedup=speedup, **setting, overhead=rest)
    assert found.cost == pytest.approx(4 * c + v + rest)
    assert {name: part.value for name, part in found.parts.items()} == pytest.approx(
        {"drafting": 4 * c, "verification": v, "overhead": rest}
    )
    assert found.rest.value == pytest.approx(0, abs=1e-9)
    assert found.rest_is == "the prompt"
    part = explain(speedup=speedup, **setting)
    assert part.rest.value == pytest.approx(rest, abs=1e-9)
    assert part.rest_is == "overhead and the prompt"


def test_what_is_not_given_stays_in_the_rest() -> None:
    bare = explain(speedup=2.0, tokens_per_step=3.0)
    assert (bare.cost, bare.parts, bare.rest.value) == (1.5, {}, 1.5)
    assert bare.rest_is == "drafting, verification, overhead and the prompt"
    # Of these, drafting needs the number of draft tokens, too.
    assert explain(speedup=2.0, tokens_per_step=3.0, cost_ratio=0.1).parts == {}
    assert explain(speedup=2.0, tokens_per_step=3.0, cost_ratio=0.1, draft_passes=1).parts["drafting"].value == 0.1
    rates = explain(speedup=1.0, per_position=[0.8, 0.5], verify_cost=lambda n: n / 2)
    assert (rates.tokens, rates.parts["verification"].value) == (2.3, 1.5)
    assert explain(speedup=1.0, acceptance_rate=0.5, gamma=4).tokens == 3.0


def test_ranges_of_what_was_given_are_ranges_of_the_rest() -> None:
    found = explain(speedup=1.5, tokens_per_step=3.0, gamma=4, layers=(32, 2), gpu="H100", batch=64)
    drafting, verification = found.parts["drafting"], found.parts["verification"]
    assert drafting.low < drafting.value < drafting.high
    assert found.rest.low == pytest.approx(2 - drafting.high - verification.high)
    assert found.rest.high == pytest.approx(2 - drafting.low - verification.low)


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ({"speedup": 1.0, "tokens_per_step": 2.0, "gamma": 4, "cost_ratio": 0.4}, "try first: a cheaper drafter"),
        ({"speedup": 1.0, "tokens_per_step": 2.0, "gamma": 4, "verify_cost": 1.9}, "try first: fewer draft tokens"),
        ({"speedup": 1.0, "tokens_per_step": 2.0, "overhead": 1.5}, "try first: sampling without sorting"),
        ({"speedup": 1.0, "tokens_per_step": 2.0}, "try first: its parts, measured one by one"),
        ({"speedup": 3.0, "tokens_per_step": 3.0, "gamma": 4, "verify_cost": 1.5}, "cost more than the whole step"),
        ({"speedup": 0.8, "tokens_per_step": 2.0}, "plain decoding is faster, until a step gives more than 2.50"),
    ],
)
def test_it_says_what_to_try(setting: dict[str, Any], line: str) -> None:
    assert line in str(explain(**setting))
    assert ("plain decoding is faster" in str(explain(**setting))) == (setting["speedup"] <= 1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"speedup": 0, "tokens_per_step": 2}, "speedup is 0"),
        ({"speedup": 2}, "give exactly one of tokens_per_step, acceptance_rate, per_position"),
        ({"speedup": 2, "tokens_per_step": 2, "per_position": [1]}, "give exactly one of"),
        ({"speedup": 2, "acceptance_rate": 0.5}, "gamma is missing"),
        ({"speedup": 2, "tokens_per_step": 9, "gamma": 4}, "tokens_per_step is 9"),
        ({"speedup": 2, "tokens_per_step": 2, "overhead": -1}, "overhead is -1"),
        ({"speedup": 2, "tokens_per_step": 2, "gamma": 4, "verify_cost": 0}, "verify_cost is 0"),
    ],
)
def test_impossible_numbers_are_refused(setting: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        explain(**setting)
