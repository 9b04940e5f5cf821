"""v(n) from a data sheet: its limits, mixtures of experts, narrow weights, and the names of devices."""

import math
from itertools import combinations, product

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specnb.measure.predict import GPUS, UNPACKING_RIDGE, Target, known_gpu, verify_cost
from specnb.notebook.findings import ROOT

FAST = (1e9, 1.0)  # arithmetic takes no time


@given(n=st.floats(1, 100), rows=st.integers(1, 300))
def test_a_dense_model_reads_its_weights_once_whatever_the_number_of_tokens(n: float, rows: int) -> None:
    ends, _ = verify_cost(n, FAST, Target(batch=rows))
    assert ends == pytest.approx((1, 1, 1))


def test_a_device_is_named_or_given_by_its_figures() -> None:
    by_name, _ = verify_cost(9, "H100", Target(batch=32))
    by_figures, source = verify_cost(9, GPUS["H100"], Target(batch=32))
    assert by_name == by_figures
    assert source == "roofline of 989 teraflop/s and 3350 GB/s"


def test_without_overlap_time_is_reading_plus_arithmetic() -> None:
    (value, low, high), _ = verify_cost(5, (100, 1000), Target())  # ridge 100, and 50 at half the peak
    assert (value, low, high) == pytest.approx((1.05 / 1.01, 1, 1.1 / 1.02))


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(4, 1, 3), (4, 2, 2), (5, 2, 3)])
def test_tokens_that_choose_their_experts_independently_read_more_of_them(
    experts: int, chosen: int, tokens: int
) -> None:
    choices = list(combinations(range(experts), chosen))
    used = [len(set().union(*drawn)) for drawn in product(choices, repeat=tokens)]
    (value, low, high), _ = verify_cost(tokens, FAST, Target(active=chosen / experts))
    assert high == pytest.approx(sum(used) / len(used) / chosen)
    assert low == pytest.approx(1)
    assert value == pytest.approx(math.sqrt(high))


def test_a_large_batch_reads_all_experts_with_and_without_drafts() -> None:
    (_, low, high), _ = verify_cost(16, FAST, Target(active=0.1, batch=500))
    assert low == pytest.approx(1)
    assert high == pytest.approx(1)


def test_weights_below_8_bits_are_unpacked_at_a_cost_that_is_not_known() -> None:
    ends = {width: verify_cost(8, "RTX 3090", Target(width=width))[0] for width in (0.999, 1.0)}
    assert ends[0.999][1] == pytest.approx(ends[1.0][1])
    assert ends[0.999][0] > ends[1.0][0]
    assert ends[0.999][2] > ends[1.0][2]


def test_the_worst_cost_of_unpacking_is_the_worst_that_was_published() -> None:
    table = pd.read_csv(ROOT / "data" / "reference" / "small_batches.csv")
    cost = table.tokens * table.rate_of_one / table.rate_of_many
    ridges = (table.tokens - cost) / (cost - 1)  # of (1 + n / ridge) / (1 + 1 / ridge)
    assert ridges.min() == pytest.approx(UNPACKING_RIDGE, abs=0.05)


@pytest.mark.parametrize(
    ("said", "meant"),
    [("A100", "A100-80GB"), ("NVIDIA A100-SXM4-40GB", "A100-40GB"), ("8xH100", "H100"), ("h100 pcie", "H100-PCIe"),
     ("GeForce RTX4090", "RTX 4090"), ("RTX A6000", "A6000"), ("TPUv4", "TPU v4"), ("Tesla V100", "V100"),
     ("M2 Max", "Apple M2 Max"), ("Apple M1", "Apple M1"), ("2080Ti", "RTX 2080 Ti"), ("AMD Instinct MI210", "MI210")],
)  # fmt: skip
def test_a_gpu_is_known_by_the_names_that_people_write(said: str, meant: str) -> None:
    assert known_gpu(said) == meant


@pytest.mark.parametrize(
    "name", ["RTX 4090 Laptop", "RTX 3080 Ti", "Quadro RTX 6000", "RTX 2080", "M3 Max", "M2 Extreme Pro Max", "H1", ""]
)
def test_a_gpu_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="known are A10"):
        known_gpu(name)


def test_every_gpu_is_known_by_its_own_name_in_any_case() -> None:
    assert all(known_gpu(name) == known_gpu(name.lower()) == name for name in GPUS)
