"""Predictions agree with the closed forms, stay in their ranges, and refuse impossible inputs with a clear message."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.measure.predict import GPUS, predict
from specnb.theory import expected_tokens, walltime_improvement

FRACTION = st.floats(0, 1)
GAMMA = st.integers(1, 32)


@given(alpha=FRACTION, gamma=GAMMA, c=st.floats(0, 2))
def test_with_free_verification_the_value_is_theorem_3_8(alpha: float, gamma: int, c: float) -> None:
    found = predict(alpha=alpha, gamma=gamma, cost_ratio=c, verify_cost=1.0, overhead=0.0)
    assert found.speedup.value == pytest.approx(float(walltime_improvement(alpha, gamma, c)))
    assert found.limits["verification"] == found.limits["overhead"] == pytest.approx(1)


@given(
    tokens=st.floats(1, 9), batch=st.integers(1, 512), gpu=st.sampled_from([None, *GPUS]),
    width=st.sampled_from([0.5, 1, 2]), cache=st.floats(0, 1), active=st.floats(0.01, 1),
    params=st.one_of(st.none(), st.tuples(st.floats(1e9, 1e12), st.floats(1e6, 1e9))),
    layers=st.one_of(st.none(), st.tuples(st.integers(1, 100), st.integers(1, 100))),
)  # fmt: skip
def test_the_value_lies_in_its_range_whatever_is_missing(
    tokens: float,
    batch: int,
    gpu: str | None,
    width: float,
    cache: float,
    active: float,
    params: tuple[float, float] | None,
    layers: tuple[int, int] | None,
) -> None:
    found = predict(
        tokens_per_step=tokens, gamma=8, batch=batch, gpu=gpu, bytes_per_param=width, cache_ratio=cache,
        active=active, params=params, layers=layers,
    )  # fmt: skip
    assert found.speedup.low <= found.speedup.value * (1 + 1e-9)
    assert found.speedup.value <= found.speedup.high * (1 + 1e-9)
    assert found.tokens.low <= tokens <= found.tokens.high
    assert len(found.missing) == 3


@given(rates=st.lists(FRACTION, min_size=1, max_size=10))
def test_three_ways_to_report_one_run_agree(rates: list[float]) -> None:
    rates = sorted(rates, reverse=True)
    total = math.fsum(rates)
    by_position = predict(per_position=rates, gpu="A10")
    by_rate = predict(acceptance_rate=min(total / len(rates), 1), gamma=len(rates), gpu="A10")
    by_length = predict(tokens_per_step=min(1 + total, len(rates) + 1), gamma=len(rates), gpu="A10")
    assert by_position.speedup.value == pytest.approx(by_rate.speedup.value)
    assert by_position.speedup.value == pytest.approx(by_length.speedup.value)


@given(alpha=FRACTION, gamma=GAMMA)
def test_alpha_alone_leaves_the_tokens_uncertain(alpha: float, gamma: int) -> None:
    tokens = predict(alpha=alpha, gamma=gamma, cost_ratio=0, verify_cost=1, overhead=0).tokens
    assert tokens.value == pytest.approx(float(expected_tokens(alpha, gamma)))
    assert 1 <= tokens.low <= tokens.value <= tokens.high + 1e-9 <= gamma + 1 + 1e-6


def test_larger_batches_gain_less_and_long_contexts_gain_it_back() -> None:
    def at(batch: int, cache: float = 0.0) -> float:
        found = predict(tokens_per_step=3, gamma=5, cost_ratio=0.05, gpu="H100", batch=batch, cache_ratio=cache)
        return found.speedup.value

    assert at(1) > at(16) > at(64) > at(256)
    assert at(256, cache=0.5) > at(256)


def test_a_limit_is_how_much_faster_decoding_would_be_without_it() -> None:
    given: dict[str, float] = {
        "gamma": 4,
        "tokens_per_step": 2.5,
        "cost_ratio": 0.1,
        "verify_cost": 1.5,
        "overhead": 0.2,
    }
    ideal: dict[str, dict[str, float]] = {
        "acceptance": {"tokens_per_step": 5},
        "drafting": {"cost_ratio": 0},
        "verification": {"verify_cost": 1},
        "overhead": {"overhead": 0},
    }
    made = predict(**given)  # type: ignore[arg-type]
    for name, changed in ideal.items():
        without = predict(**{**given, **changed})  # type: ignore[arg-type]
        assert made.limits[name] == pytest.approx(without.speedup.value / made.speedup.value)
    assert made.limited_by == "acceptance"


@pytest.mark.parametrize(("verified", "passed"), [(None, 5), (7, 8)])
def test_a_verification_is_over_the_draft_tokens_and_the_newest_one(verified: float | None, passed: float) -> None:
    made = predict(gamma=4, verified=verified, tokens_per_step=3, cost_ratio=0, overhead=0, verify_cost=lambda n: n / 4)
    assert made.speedup.value == pytest.approx(3 / (passed / 4))


def test_a_drafter_that_proposes_all_its_tokens_at_once_pays_for_one_forward_pass() -> None:
    chain = predict(gamma=4, tokens_per_step=3, cost_ratio=0.2, verify_cost=1, overhead=0)
    block = predict(gamma=4, tokens_per_step=3, cost_ratio=0.2, verify_cost=1, overhead=0, draft_passes=1)
    assert chain.speedup.value == pytest.approx(3 / 1.8)
    assert block.speedup.value == pytest.approx(3 / 1.2)
    assert block.limits["drafting"] == pytest.approx(1.2)


@given(gamma=st.integers(1, 20), rate=st.floats(0.01, 1))
def test_gamma_follows_from_the_acceptance_length_and_the_acceptance_rate(gamma: int, rate: float) -> None:
    both = predict(tokens_per_step=1 + gamma * rate, acceptance_rate=rate, gpu="A10")
    by_rate = predict(acceptance_rate=rate, gamma=gamma, gpu="A10")
    assert both.speedup.value == pytest.approx(by_rate.speedup.value)


def test_the_width_of_the_weights_counts_without_a_gpu_too() -> None:
    def at(width: float) -> float:
        return predict(tokens_per_step=3, gamma=8, cost_ratio=0, batch=8, bytes_per_param=width).speedup.value

    assert at(4) > at(2) > at(1) > at(0.5)


def test_what_is_given_is_used_instead_of_the_roofline() -> None:
    known = predict(tokens_per_step=3, gamma=4, cost_ratio=0.1, verify_cost=lambda n: n / 5, overhead=0.0)
    assert known.speedup.value == pytest.approx(3 / 1.4)
    assert known.speedup.low == known.speedup.value == known.speedup.high
    assert known.missing == ()
    assert predict(tokens_per_step=3, gamma=4, cost_ratio=5, verify_cost=1, overhead=0).limited_by == "drafting"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"gamma": 4}, "exactly one of alpha, .*got none"),
        ({"gamma": 4, "alpha": 0.5, "acceptance_rate": 0.5}, "got alpha, acceptance_rate"),
        ({"alpha": 0.5}, "gamma is missing"),
        ({"alpha": 1.5, "gamma": 4}, "alpha is 1.5; need a number from 0 to 1"),
        ({"alpha": math.nan, "gamma": 4}, "alpha is nan"),
        ({"alpha": 0.5, "gamma": 2.5}, "must be a whole number"),
        ({"alpha": 0.5, "gamma": 0}, "gamma is 0"),
        ({"tokens_per_step": 6, "gamma": 4}, "from 1 to 5"),
        ({"tokens_per_step": 0.9, "gamma": 4}, "from 1 to 5"),
        ({"per_position": [0.5, 0.6]}, "multiplied up"),
        ({"per_position": [0.5], "gamma": 3}, "need gamma = 3 fractions"),
        ({"alpha": 0.5, "gamma": 4, "gpu": "A200"}, "known are A10.*give .dense 16-bit teraflop/s, GB/s."),
        ({"alpha": 0.5, "gamma": 4, "gpu": (100, 0)}, "a name or two positive numbers"),
        ({"alpha": 0.5, "gamma": 4, "gpu": (100,)}, "a name or two positive numbers"),
        ({"alpha": 0.5, "gamma": 4, "active": 0}, "active is 0; need a number from 0.0001 to 1"),
        ({"alpha": 0.5, "gamma": 4, "draft_passes": -1}, "draft_passes is -1"),
        ({"tokens_per_step": 2.5}, "gamma is missing.*tokens_per_step and acceptance_rate"),
        ({"tokens_per_step": 1, "acceptance_rate": 0.0}, "gamma does not follow"),
        ({"tokens_per_step": 2, "acceptance_rate": 0.5, "gamma": 4}, "got tokens_per_step, acceptance_rate"),
        ({"alpha": 0.5, "gamma": 4, "params": (0, 1)}, "two positive numbers"),
        ({"alpha": 0.5, "gamma": 4, "layers": (32,)}, "two positive numbers"),
        ({"alpha": 0.5, "gamma": 4, "batch": 0}, "batch is 0"),
        ({"alpha": 0.5, "gamma": 4, "cost_ratio": -1}, "cost_ratio is -1"),
        ({"alpha": 0.5, "gamma": 4, "verify_cost": math.inf}, "verify_cost is inf"),
    ],
)
def test_impossible_inputs_are_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(**inputs)
