"""Predictions agree with the closed forms, stay in their ranges, and refuse impossible inputs with
a clear message."""

import math
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.measure.predict import EXPONENTS, GPUS, SLOWEST, UNPACKING_RIDGE, device_class, known_gpu, predict, roofline
from specnb.theory import expected_tokens, walltime_improvement

ROOT = Path(__file__).parents[3]
FRACTION, GAMMA = st.floats(0, 1), st.integers(1, 32)
FAST = (1e9, 1.0)  # teraflop/s and GB/s: arithmetic takes no time


@given(alpha=FRACTION, gamma=GAMMA, c=st.floats(0, 2))
def test_with_free_verification_the_value_is_theorem_3_8(alpha: float, gamma: int, c: float) -> None:
    found = predict(alpha=alpha, gamma=gamma, cost_ratio=c, verify_cost=1.0, overhead=0.0)
    assert found.speedup.value == pytest.approx(float(walltime_improvement(alpha, gamma, c)))
    assert found.limits["verification"] == found.limits["overhead"] == pytest.approx(1)
    assert found.tokens.value == pytest.approx(float(expected_tokens(alpha, gamma)))
    assert 1 <= found.tokens.low <= found.tokens.value <= found.tokens.high + 1e-9 <= gamma + 1 + 1e-6


@given(
    tokens=st.floats(1, 9), batch=st.integers(1, 512), gpu=st.sampled_from([None, *GPUS]),
    width=st.sampled_from([0.5, 1, 2]), cache=st.floats(0, 1), active=st.floats(0.01, 1),
    params=st.one_of(st.none(), st.tuples(st.floats(1e9, 1e12), st.floats(1e6, 1e9))),
    layers=st.one_of(st.none(), st.tuples(st.integers(1, 100), st.integers(1, 100))),
)  # fmt: skip
def test_the_value_lies_in_its_range_whatever_is_missing(
    tokens: float, batch: int, gpu: str | None, width: float, cache: float, active: float,
    params: tuple[float, float] | None, layers: tuple[int, int] | None,
) -> None:  # fmt: skip
    found = predict(
        tokens_per_step=tokens, gamma=8, batch=batch, gpu=gpu, bytes_per_param=width, cache_ratio=cache,
        active=active, params=params, layers=layers,
    )  # fmt: skip
    assert found.speedup.low <= found.speedup.value * (1 + 1e-9)
    assert found.speedup.value <= found.speedup.high * (1 + 1e-9)
    assert found.tokens.low <= tokens <= found.tokens.high
    assert len(found.missing) == 3


@given(rates=st.lists(st.floats(0.01, 1), min_size=1, max_size=10))
def test_the_ways_to_report_one_run_agree(rates: list[float]) -> None:
    rates = sorted(rates, reverse=True)
    gamma, total = len(rates), math.fsum(rates)
    by_position = predict(per_position=rates, gpu="A10").speedup.value
    rate, length = min(total / gamma, 1), min(1 + total, gamma + 1)
    for reported in (
        {"acceptance_rate": rate, "gamma": gamma},
        {"tokens_per_step": length, "gamma": gamma},
        {"tokens_per_step": length, "acceptance_rate": rate},  # gamma follows
    ):
        assert predict(**reported, gpu="A10").speedup.value == pytest.approx(by_position)  # type: ignore[arg-type]


def speed(**inputs: Any) -> float:
    return predict(**{"tokens_per_step": 3, "gamma": 4, "cost_ratio": 0, "overhead": 0, **inputs}).speedup.value


def test_batches_contexts_and_widths_of_weights_count() -> None:
    batches = [speed(gpu="H100", batch=batch) for batch in (1, 16, 64, 256)]
    assert batches == sorted(batches, reverse=True)
    assert speed(gpu="H100", batch=256, cache_ratio=0.5) > batches[-1]
    widths = [speed(batch=8, bytes_per_param=width) for width in (4, 2, 1, 0.5)]
    assert widths == sorted(widths, reverse=True)


def test_a_step_is_draft_passes_a_verification_and_overhead() -> None:
    # The draft tokens and the newest one.
    assert speed(verify_cost=lambda n: n / 4) == pytest.approx(3 / (5 / 4))
    assert speed(verify_cost=lambda n: n / 4, verified=7) == pytest.approx(3 / (8 / 4))
    assert speed(verify_cost=1, cost_ratio=0.2) == pytest.approx(3 / 1.8)
    assert speed(verify_cost=1, cost_ratio=0.2, draft_passes=1) == pytest.approx(3 / 1.2)
    known = predict(tokens_per_step=3, gamma=4, cost_ratio=0.1, verify_cost=1, overhead=0.5)
    assert known.speedup.low == known.speedup.value == known.speedup.high == pytest.approx(3 / 1.9)
    assert known.missing == ()


def test_a_limit_is_how_much_faster_decoding_would_be_without_it() -> None:
    given: dict[str, float] = {
        "gamma": 4, "tokens_per_step": 2.5, "cost_ratio": 0.1, "verify_cost": 1.5, "overhead": 0.2,
    }  # fmt: skip
    ideal = {
        "acceptance": {"tokens_per_step": 5}, "drafting": {"cost_ratio": 0}, "verification": {"verify_cost": 1},
        "overhead": {"overhead": 0},
    }  # fmt: skip
    made = predict(**given)  # type: ignore[arg-type]
    for name, changed in ideal.items():
        without = predict(**{**given, **changed})  # type: ignore[arg-type]
        assert made.limits[name] == pytest.approx(without.speedup.value / made.speedup.value)
    assert made.limited_by == "acceptance"
    assert predict(tokens_per_step=3, gamma=4, cost_ratio=5, verify_cost=1, overhead=0).limited_by == "drafting"


VALID = {"alpha": 0.5, "gamma": 4}
RATE = {"tokens_per_step": 2, "acceptance_rate": 0.5}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gamma": 4}, "exactly one of alpha, .*got none"),
    (VALID | {"acceptance_rate": 0.5}, "got alpha, acceptance_rate"),
    (RATE | {"gamma": 4}, "got tokens_per_step, acceptance_rate"),
    ({"alpha": 0.5}, "gamma is missing"),
    ({"tokens_per_step": 2.5}, "gamma is missing.*tokens_per_step and acceptance_rate"),
    (RATE | {"acceptance_rate": 0.0}, "acceptance_rate without gamma is 0.0"),
    (VALID | {"batch": "8"}, "batch is '8'; need a number"),
    (VALID | {"gpu": "-1xH100"}, "gpu is '-1xH100', like .*H100"),
    (VALID | {"reference": 1.5}, "reference is 1.5; need a dictionary of its speedup"),
    (VALID | {"reference": {"gamma": 3}}, "need a dictionary of its speedup"),
    (VALID | {"reference": {"speedup": 1.5, "hardware": "H100"}}, "and of arguments of predict"),
    (VALID | {"reference": {"speedup": 0}}, "speedup of the reference is 0"),
    (VALID | {"reference": {"speedup": 1.5, "tokens_per_step": 6}}, "reference: tokens_per_step is 6"),
    (VALID | {"alpha": 1.5}, "alpha is 1.5; need a number from 0 to 1"),
    (VALID | {"gamma": 2.5}, "must be a whole number"),
    (VALID | {"gamma": 0}, "gamma is 0"),
    ({"tokens_per_step": 6, "gamma": 4}, "from 1 to 5"),
    ({"per_position": [0.5, 0.6]}, "multiplied up"),
    ({"per_position": [0.5], "gamma": 3}, "need gamma = 3 fractions"),
    (VALID | {"gpu": "A200"}, "like H200.*dense 16-bit teraflop/s, GB/s."),
    (VALID | {"gpu": (100, 0)}, "a name or two positive numbers"),
    (VALID | {"active": 0}, "active is 0; need a number from 0.0001 to 1"),
    (VALID | {"draft_passes": -1}, "draft_passes is -1"),
    (VALID | {"params": (0, 1)}, "two positive numbers"),
    (VALID | {"verify_cost": math.inf}, "verify_cost is inf"),
]


@pytest.mark.parametrize(("inputs", "message"), REFUSED)
def test_impossible_inputs_are_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(**inputs)


# A reference.

SETTING: dict[str, Any] = {"params": (7e9, 7e8), "gpu": "A100-80GB", "bytes_per_param": 1}
MEASURED: dict[str, Any] = {"tokens_per_step": 2.2, "gamma": 3, "batch": 16}


@given(tokens=st.floats(1, 6), measured=st.floats(0.5, 4), batch=st.integers(1, 64))
def test_a_reference_scales_the_time_of_a_step(tokens: float, measured: float, batch: int) -> None:
    known = MEASURED | {"speedup": measured}
    assert predict(**SETTING, **MEASURED, reference=known).speedup.value == pytest.approx(measured)
    case = SETTING | {"tokens_per_step": tokens, "gamma": 5, "batch": batch}
    scale = measured / predict(**SETTING, **MEASURED).speedup.value
    without, found = predict(**case), predict(**case, reference=known)
    assert found.speedup.value == pytest.approx(scale * without.speedup.value)
    assert found.speedup.low <= found.speedup.value <= found.speedup.high
    assert found.speedup.high / found.speedup.low <= without.speedup.high / without.speedup.low * 1.22
    assert (found.tokens, found.limits, found.missing) == (without.tokens, without.limits, without.missing)


def test_a_reference_without_acceptance_has_the_same_alpha() -> None:
    alpha: dict[str, Any] = {"alpha": 0.7, "gamma": 5}
    tokens: dict[str, Any] = {"tokens_per_step": float(expected_tokens(0.7, 5)), "gamma": 5}
    for known in ({"speedup": 1.5, "gamma": 2}, {"speedup": 1.5, "batch": 8}):
        speeds = [predict(**SETTING, **case, reference=known).speedup.value for case in (alpha, tokens)]
        assert speeds[0] == pytest.approx(speeds[1])
    same = predict(**SETTING, **tokens, reference={"speedup": 1.5})
    assert (same.speedup.low, same.speedup.high) == pytest.approx((1.5 / 1.1, 1.5 * 1.1))


def test_c_from_sizes_fits_what_was_published() -> None:
    table = pd.read_csv(ROOT / "data" / "reference" / "draft_costs.csv")
    sizes, costs = np.log(table.draft_params / table.target_params), np.log(table.cost_ratio)
    assert (sizes * costs).sum() / (sizes**2).sum() == pytest.approx(EXPONENTS["params"], abs=0.005)
    both = {"params": (8e9, 1e9), "layers": (32, 16)}
    assert speed(**SETTING | {"params": (8e9, 1e9)}) == speed(**SETTING | both) != speed(layers=(32, 16))


# v(n) from a data sheet.


@given(n=st.floats(1, 100), rows=st.integers(1, 300))
def test_a_dense_model_reads_its_weights_once_whatever_the_number_of_tokens(n: float, rows: int) -> None:
    assert roofline(n, FAST, batch=rows)[0] == pytest.approx((1, 1, 1))


def test_time_is_reading_plus_arithmetic_at_the_figures_of_the_device() -> None:
    (value, low, high), _ = roofline(5, (100, 1000))  # ridge 100, and 40 at the slowest
    assert (value, low, high) == pytest.approx((1.05 / 1.01, 1, (1 + 5 / 40) / (1 + 1 / 40)))
    by_figures, source = roofline(9, GPUS["H100"], batch=32)
    assert roofline(9, "H100", batch=32)[0] == by_figures
    assert source == "roofline of 989 teraflop/s, 3350 GB/s"


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(4, 1, 3), (4, 2, 2), (5, 2, 3)])
def test_tokens_that_choose_their_experts_independently_read_more_of_them(
    experts: int, chosen: int, tokens: int
) -> None:
    choices = list(combinations(range(experts), chosen))
    used = [len(set().union(*drawn)) for drawn in product(choices, repeat=tokens)]
    mean = sum(used) / len(used) / chosen
    ends, _ = roofline(tokens, FAST, active=chosen / experts)
    assert ends == pytest.approx((math.sqrt(mean), 1, mean))
    # Reads all experts, with and without drafts.
    large, _ = roofline(16, FAST, active=0.1, batch=500)
    assert large == pytest.approx((1, 1, 1))


def test_a_large_batch_of_a_mixture_of_experts_is_limited_by_arithmetic_and_one_row_by_reading() -> None:
    for batch, reads in ((1, True), (256, False)):
        slower, faster = (roofline(8, (flops, 1000), active=0.1, batch=batch)[0][0] for flops in (1000, 2000))
        assert (slower / faster < 1.02) == reads


def test_the_slowest_arithmetic_is_that_of_the_worst_published_small_batch() -> None:
    ends = {width: roofline(8, "RTX 3090", width=width)[0] for width in (0.999, 1.0)}
    assert ends[0.999][1] == pytest.approx(ends[1.0][1])
    assert ends[0.999][0] > ends[1.0][0]
    assert ends[0.999][2] > ends[1.0][2]
    table = pd.read_csv(ROOT / "data" / "reference" / "small_batches.csv")
    cost = table.tokens * table.rate_of_one / table.rate_of_many
    ridge = (table.tokens - cost) / (cost - 1)  # of (1 + n / ridge) / (1 + 1 / ridge)
    assert ridge[table.bytes_per_param < 1].min() == pytest.approx(UNPACKING_RIDGE, abs=0.05)
    wide = table[table.bytes_per_param >= 1]
    sheets = np.array([500 * GPUS[gpu][0] / GPUS[gpu][1] for gpu in wide.gpu]) * wide.bytes_per_param
    slowest = (ridge[wide.index] / sheets).groupby([device_class(gpu) for gpu in wide.gpu]).min()
    assert slowest["Apple"] == pytest.approx(SLOWEST["Apple"], abs=0.005)
    assert slowest.drop("Apple").min() == pytest.approx(SLOWEST["datacentre"], abs=0.005)
    assert SLOWEST["workstation"] == SLOWEST["datacentre"]


@pytest.mark.parametrize(
    ("name", "like"),
    [("8xH100", "H100"), ("A100", "A100-80GB, A100-40GB"), ("M2 Ultra", "Apple M2 Ultra"), ("", "none")],
)
def test_another_name_of_a_gpu_is_refused_with_those_that_are_like_it(name: str, like: str) -> None:
    assert all(known_gpu(gpu) == gpu for gpu in GPUS)
    with pytest.raises(ValueError, match=f"gpu is '{name}', like .*{like}.*; give a name in"):
        known_gpu(name)
