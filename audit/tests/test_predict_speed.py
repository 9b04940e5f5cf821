"""Predictions agree with the closed forms, stay in their ranges, and refuse impossible and
contradictory inputs with a clear message."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.theory import expected_tokens, roofline, walltime_improvement
from specnb_audit import explain, predict
from specnb_audit.predict_devices import GPUS, SLOWEST, UNPACKING_RIDGE, device_class, known_gpu, ridge_of
from specnb_audit.predict_numbers import Range
from specnb_audit.predict_speed import EXPONENTS, LAUNCHES
from studies.files import read_table

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
FRACTION, GAMMA = st.floats(0, 1), st.integers(1, 32)
examples = settings(derandomize=True, deadline=None, database=None, max_examples=60)
FAST = (1e9, 1.0)  # teraflop/s and GB/s: arithmetic takes no time
KNOWN: dict[str, Any] = {"cost_ratio": 0, "verify_cost": 1.0, "overhead_ms": 0.0, "plain": 100}


@given(alpha=FRACTION, gamma=GAMMA, c=st.floats(0, 2))
@examples
def test_with_free_verification_the_value_is_theorem_3_8(alpha: float, gamma: int, c: float) -> None:
    found = predict(alpha=alpha, gamma=gamma, **KNOWN | {"cost_ratio": c})
    assert found.speedup.value == pytest.approx(float(walltime_improvement(alpha, gamma, c)))
    assert found.tokens.value == pytest.approx(float(expected_tokens(alpha, gamma)))
    assert 1 <= found.tokens.low <= found.tokens.value <= found.tokens.high + 1e-9 <= gamma + 1 + 1e-6
    assert (found.gains["verification"], found.gains["overhead"]) == (1, 1)


@given(
    tokens=st.floats(1, 9), batch=st.integers(1, 512), gpu=st.sampled_from([None, *GPUS]),
    width=st.sampled_from([0.5, 1, 2]), cache=st.floats(0, 1), active=st.floats(0.01, 1),
    layers=st.one_of(st.none(), st.tuples(st.integers(1, 100), st.integers(1, 100))),
    plain=st.one_of(st.none(), st.floats(1, 1000)),
)  # fmt: skip
@examples
def test_the_value_lies_in_its_range_whatever_is_missing(
    tokens: float, batch: int, gpu: str | None, width: float, cache: float, active: float,
    layers: tuple[int, int] | None, plain: float | None,
) -> None:  # fmt: skip
    found = predict(
        tokens_per_step=tokens, gamma=8, batch=batch, gpu=gpu, bytes_per_param=width, cache_ratio=cache,
        active=active, layers=layers, plain=plain,
    )  # fmt: skip
    for part in (found.speedup, *found.parts.values()):
        assert part.low <= part.value * (1 + 1e-9)
        assert part.value <= part.high * (1 + 1e-9)
    assert list(found.parts) == ["drafting", "verification", "overhead"]
    assert len(found.missing) == 3


# Acceptance


@given(rates=st.lists(st.floats(0.01, 1), min_size=1, max_size=10))
@examples
def test_the_ways_to_report_one_run_agree(rates: list[float]) -> None:
    rates = sorted(rates, reverse=True)
    gamma, total = len(rates), math.fsum(rates)
    rate, tokens = min(total / gamma, 1), min(1 + total, gamma + 1)
    counted = tokens / (gamma + 1)
    for reported in (
        {"per_position": rates},
        {"acceptance_rate": rate, "gamma": gamma},
        {"acceptance_rate_with_bonus": counted, "gamma": gamma},
        {"tokens_per_step": tokens, "gamma": gamma},
        {"tokens_per_step": tokens, "acceptance_rate": rate, "gamma": gamma},
        {"tokens_per_step": tokens, "acceptance_rate_with_bonus": counted},  # gamma follows
    ):
        assert predict(**reported, gpu="A10").tokens.value == pytest.approx(tokens)


def test_published_acceptances_are_the_tokens_that_were_counted() -> None:
    """SGLang issue 11948 (accept length 2.17, accept rate 0.54, three steps), vLLM issue 26191 (4,816
    drafts of 7, 12,208 accepted), llama.cpp pull request 24536, SpecForge issue 339."""
    assert predict(gamma=3, acceptance_rate_with_bonus=0.54).tokens.value == pytest.approx(2.17, abs=0.02)
    assert predict(tokens_per_step=2.17, acceptance_rate_with_bonus=0.54, gamma=3).tokens.value == 2.17
    assert predict(gamma=7, acceptance_rate=12208 / 33712).tokens.value == pytest.approx(3.53, abs=0.01)
    assert predict(per_position=[0.805, 0.632, 0.483]).tokens.value == pytest.approx(2.92)
    with pytest.raises(ValueError, match=r"contradict each other: with gamma = 3 they mean 2\.17 and 2\.62 tokens"):
        predict(gamma=3, tokens_per_step=2.17, acceptance_rate=0.54)
    with pytest.raises(ValueError, match=r"gamma would be 2\.17, or 3\.02 if the rate counts the bonus token"):
        predict(tokens_per_step=2.17, acceptance_rate=0.54)
    # A mean of drafts that vary: 3.1, and 4.4 with the bonus token, neither of them whole.
    assert predict(tokens_per_step=2.37, acceptance_rate=0.436).tokens.value == 2.37


# Cost


def speed(**inputs: Any) -> float:
    return predict(
        **{"tokens_per_step": 3, "gamma": 4, "cost_ratio": 0, "overhead_ms": 0, "plain": 100, **inputs}
    ).speedup.value


def test_a_step_is_draft_passes_a_verification_and_overhead() -> None:
    assert speed(verify_cost=lambda n: n / 4) == pytest.approx(3 / (5 / 4))  # the draft tokens and the newest one
    assert speed(verify_cost=lambda n: n / 4, verified=7) == pytest.approx(3 / (8 / 4))
    assert speed(verify_cost=1, cost_ratio=0.2) == pytest.approx(3 / 1.8)
    assert speed(verify_cost=1, cost_ratio=0.2, draft_passes=1) == pytest.approx(3 / 1.2)
    # 5 milliseconds are half a step of 100 tokens per second.
    known = predict(tokens_per_step=3, gamma=4, cost_ratio=0.1, verify_cost=1, overhead_ms=5, plain=100)
    assert known.speedup.low == known.speedup.value == known.speedup.high == pytest.approx(3 / 1.9)
    assert known.missing == ()


def test_an_overhead_costs_more_the_faster_plain_decoding_is() -> None:
    """vLLM issue 39680: a model of 0.8B at 342 tokens per second, and at 128 with one draft token."""
    setting: dict[str, Any] = {"per_position": [0.966], "layers": (24, 1)}
    speeds = [predict(**setting, plain=plain).speedup for plain in (10, 50, 342.2)]
    assert speeds[0].value > speeds[1].value > speeds[2].value
    assert predict(**setting).speedup == speeds[1]
    assert speeds[2].low < 128.3 / 342.2 < speeds[2].high
    assert not speeds[1].low < 128.3 / 342.2


def test_a_cost_that_is_given_replaces_the_parts() -> None:
    found = predict(tokens_per_step=3, gamma=4, step_cost=(1.2, 0.1))
    assert found.speedup.low == found.speedup.value == found.speedup.high == pytest.approx(3 / 1.6)
    assert found.parts.keys() == {"fixed cost", "draft tokens"}
    assert found.missing == ()
    ranges = predict(tokens_per_step=3, gamma=4, step_cost=(Range(1.2, 1.0, 1.4), Range(0.1, 0.1, 0.2))).speedup
    assert (ranges.low, ranges.high) == pytest.approx((3 / 2.2, 3 / 1.4))


def test_c_from_sizes_fits_what_was_published() -> None:
    table = pd.read_csv(REFERENCE / "draft_costs.csv")
    sizes, costs = np.log(table.draft_params / table.target_params), np.log(table.cost_ratio)
    assert (sizes * costs).sum() / (sizes**2).sum() == pytest.approx(EXPONENTS["params"], abs=0.005)
    both = {"params": (8e9, 1e9), "layers": (32, 16)}
    assert speed(cost_ratio=None, params=(8e9, 1e9)) == speed(cost_ratio=None, **both)
    # A draft in 4 bits of a target in 16 reads a quarter of what it would.
    quarter = speed(cost_ratio=None, params=(8e9, 1e9), draft_bytes_per_param=0.5)
    assert quarter == pytest.approx(speed(cost_ratio=None, params=(8e9, 0.25e9)))


VALID = {"alpha": 0.5, "gamma": 4}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gamma": 4}, "an acceptance is missing; give one of tokens_per_step"),
    (VALID | {"acceptance_rate": 0.9}, "acceptance_rate and alpha contradict each other"),
    ({"tokens_per_step": 2.5}, "gamma is missing"),
    (VALID | {"batch": "8"}, "batch is '8'; need a number"),
    (VALID | {"gpu": "8xH100"}, "gpu is '8xH100', like .*H100"),
    (VALID | {"alpha": 1.5}, r"alpha is 1\.5; need a number from 0 to 1"),
    ({"per_position": [0.5, 0.6]}, "conditional=True"),
    ({"per_position": [0.5], "gamma": 3}, "has 1 fractions; with gamma = 3"),
    (VALID | {"verified": 3}, "verified is 3; need a number from 4"),
    (VALID | {"overhead_ms": 2}, "overhead_ms needs plain"),
    (VALID | {"step_cost": (1, 0.1), "gpu": "H100"}, "step_cost and gpu contradict each other"),
    (VALID | {"step_cost": (1, float("nan"))}, "step_cost is nan"),
    (VALID | {"step_cost": (0, 0.1)}, "step_cost is 0"),
]


@pytest.mark.parametrize(("inputs", "message"), REFUSED)
def test_impossible_inputs_are_refused(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(**inputs)


# v(n) from a data sheet


def v(n: float, gpu: Any = None, **more: Any) -> Range:
    found = predict(tokens_per_step=1, gamma=n - 1, gpu=gpu, **more)
    return found.parts["verification"]


@given(n=st.integers(2, 100), rows=st.integers(1, 300))
@examples
def test_a_dense_model_reads_its_weights_once_whatever_the_number_of_tokens(n: int, rows: int) -> None:
    found = v(n, FAST, batch=rows)
    assert (found.value, found.low, found.high) == pytest.approx((1, 1, 1 + LAUNCHES * (n > 1)))


def test_v_is_the_roofline_at_half_of_the_overlap_from_1_to_its_largest_with_launches() -> None:
    for batch in (1, 30, 300):
        found = v(5, (100, 1000), batch=batch)  # ridge 100, and 40 at the slowest
        assert found.value == pytest.approx(float(roofline(5, 100, batch, overlap=0.5)))
        ends = [float(roofline(5, ridge, batch, overlap)) for ridge in (100, 40) for overlap in (0, 1)]
        assert (found.low, found.high) == pytest.approx((1, max(ends) + LAUNCHES))
    assert v(9, "H100", batch=32) == v(9, GPUS["H100"], batch=32)


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(4, 1, 3), (4, 2, 2), (5, 2, 3)])
def test_tokens_that_choose_their_experts_independently_read_more_of_them(
    experts: int, chosen: int, tokens: int
) -> None:
    choices = list(combinations(range(experts), chosen))
    used = [len(set().union(*drawn)) for drawn in product(choices, repeat=tokens)]
    mean = sum(used) / len(used) / chosen
    found = v(tokens, FAST, active=chosen / experts)
    assert (found.value, found.low, found.high) == pytest.approx((math.sqrt(mean), 1, mean + LAUNCHES))
    # Reads all experts, with and without drafts.
    large = v(16, FAST, active=0.1, batch=500)
    assert (large.low, large.high) == pytest.approx((1, 1 + LAUNCHES))


def test_passes_of_an_h200_lie_in_their_ranges() -> None:
    table = read_table("results/gpu")
    passes = table[(table.kind == "pass") & (table.model == "target") & (table.n > 1)]
    for one in passes.itertuples():
        found = v(int(one.n), "H200", batch=int(one.rows))
        assert found.low <= one.cost <= found.high, one
    assert len(passes) > 20


def test_conditional_rates_are_multiplied_up_and_falling_ones_are_said_to_be_either() -> None:
    rates = [0.75, 2 / 3, 0.5]
    assert predict(per_position=rates, conditional=True).tokens.value == pytest.approx(2.5)
    assert predict(per_position=[0.5, 0.6], conditional=True).tokens.value == pytest.approx(1.8)
    either = predict(per_position=rates)
    assert either.tokens.value == pytest.approx(1 + sum(rates))
    assert any("conditional=True: 2.50" in line for line in either.missing)
    assert not any("conditional" in line for line in predict(per_position=rates, conditional=False).missing)
    assert any("conditional" in line for line in explain(speedup=1.5, per_position=rates).assumed)


def test_weights_of_8_bits_meet_twice_the_arithmetic_on_devices_with_fp8() -> None:
    assert ridge_of("H100", 1, 1)[0].value == ridge_of("H100", 2, 1)[0].value
    assert ridge_of("A100-80GB", 1, 1)[0].value == ridge_of("A100-80GB", 2, 1)[0].value / 2


def test_the_slowest_arithmetic_is_that_of_the_worst_published_small_batch() -> None:
    table = pd.read_csv(REFERENCE / "small_batches.csv")
    cost = table.tokens * table.rate_of_one / table.rate_of_many
    ridge = (table.tokens - cost) / (cost - 1)  # of (1 + n / ridge) / (1 + 1 / ridge)
    assert ridge[table.bytes_per_param < 1].min() == pytest.approx(UNPACKING_RIDGE, abs=0.05)
    wide = table[table.bytes_per_param >= 1]
    sheets = np.array([500 * GPUS[gpu][0] / GPUS[gpu][1] for gpu in wide.gpu]) * wide.bytes_per_param
    slowest = (ridge[wide.index] / sheets).groupby([device_class(gpu) for gpu in wide.gpu]).min()
    assert slowest["Apple"] == pytest.approx(SLOWEST["Apple"], abs=0.005)
    assert slowest.drop("Apple").min() == pytest.approx(SLOWEST["datacentre"], abs=0.005)
    assert ridge_of("RTX 3090", 0.5, 1)[0].low == UNPACKING_RIDGE


PRINTED = {
    "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H100 PCIe": "H100-PCIe", "NVIDIA H100 NVL": "H100-NVL",
    "NVIDIA A100-SXM4-80GB": "A100-80GB", "NVIDIA A100-PCIE-40GB": "A100-40GB", "NVIDIA A100 80GB PCIe": "A100-80GB",
    "NVIDIA H200": "H200", "NVIDIA GH200 480GB": "GH200", "NVIDIA L40S": "L40S", "NVIDIA L4": "L4",
    "NVIDIA RTX A6000": "A6000", "NVIDIA GeForce RTX 4090": "RTX 4090", "NVIDIA GeForce RTX 2080 Ti": "RTX 2080 Ti",
    "NVIDIA RTX 6000 Ada Generation": "RTX 6000 Ada", "Tesla V100-SXM2-32GB": "V100", "Tesla T4": "T4",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "RTX PRO 6000", "NVIDIA GB10": "GB10",
    "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition": "RTX PRO 6000 Max-Q",
    "AMD Instinct MI300X": "MI300X", "Apple M2 Max": "Apple M2 Max", "rtx 3090": "RTX 3090",
}  # fmt: skip


def test_names_are_known_as_nvidia_smi_prints_them() -> None:
    assert {name: known_gpu(name) for name in PRINTED} == PRINTED
    assert all(known_gpu(gpu) == gpu for gpu in GPUS)


# The command


def _command(*words: str) -> subprocess.CompletedProcess[str]:
    code = "import sys; from specnb_audit.cli import main; status = main(sys.argv[1:])\n"
    code += "sys.exit(9 if {'torch', 'transformers', 'scipy'} & set(sys.modules) else status)"
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def test_the_command_says_what_the_function_says_without_torch() -> None:
    words = "--tokens-per-step 2.3 --gamma 4 --layers 32 1 --plain 150 --gpu"
    done = _command("predict", *words.split(), "NVIDIA H100 80GB HBM3")
    same = predict(tokens_per_step=2.3, gamma=4, layers=(32, 1), plain=150, gpu="H100")
    assert (done.returncode, done.stdout) == (0, f"{same}\n")
