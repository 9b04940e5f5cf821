"""Bytes moved are counted correctly; no test asserts a time."""

import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from specnb.measure.statistics import Estimate
from specnb.models.packing import pack
from specnb.models.shapes import Shape, empty_model
from studies.speed import memory_bandwidth
from studies.speed.memory_bandwidth import BytesMoved, bandwidth, bytes_moved, min_seconds, over_memory_bound

PLAIN, GATED = Shape(2, 32, 64, 4), Shape(3, 32, 48, 4, gated=True, kv_heads=2, head_dim=16)
VOCAB = 64


def made(shape: Shape = GATED, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return empty_model(shape, VOCAB, 32, "cpu", dtype)


@pytest.mark.parametrize("shape", [PLAIN, GATED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "tokens", "context"), [(1, 1, 0), (3, 5, 11)])
def test_weights_cache_and_logits_are_counted_once(
    shape: Shape, dtype: torch.dtype, rows: int, tokens: int, context: int
) -> None:
    model = made(shape, dtype)
    moved = bytes_moved(model, rows, tokens, context)
    embedding: Any = model.get_input_embeddings().weight
    others = sum(weights.nbytes for weights in model.parameters()) - embedding.nbytes
    assert moved.weights == others + rows * tokens * embedding[0].nbytes
    output = model(torch.zeros(rows, context + tokens, dtype=torch.int64))
    assert moved.cache == sum(layer.keys.nbytes + layer.values.nbytes for layer in output.past_key_values.layers)
    assert moved.logits == output.logits[:, -tokens:].nbytes
    assert moved.total == moved.weights + moved.cache + moved.logits


def test_a_packed_copy_is_read_in_place_of_the_weights() -> None:
    assert bytes_moved(pack(made())) == bytes_moved(made())


def test_a_tied_embedding_is_read_whole_once() -> None:
    model = made()
    apart = bytes_moved(model)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    assert bytes_moved(model) == apart


def test_bfloat16_moves_half_the_bytes_of_float32() -> None:
    exact, half = bytes_moved(made(), 2, 3, 7), bytes_moved(made(dtype=torch.bfloat16), 2, 3, 7)
    assert BytesMoved(*(2 * part for part in half)) == exact


def test_min_seconds_is_bytes_over_bandwidth() -> None:
    assert min_seconds(made(), 1e9, 2, 3, 5) == pytest.approx(bytes_moved(made(), 2, 3, 5).total / 1e9)


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_empty_forward_passes_are_refused(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, 1, 0"):
        bytes_moved(made(), *wrong)


def test_bandwidth_counts_reads_and_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of n bytes that takes 2 seconds moves 2 n bytes: n a second."""
    size = 2**20
    seconds = torch.tensor([[2.0, 4.0, 8.0]] * 5).numpy()
    monkeypatch.setattr(memory_bandwidth, "time_rounds", lambda *_, **__: seconds)
    assert bandwidth(size=size, repetitions=5) == Estimate(size, size, size, 5)
    seconds[:, 1] = 0.5
    assert bandwidth(size=size, repetitions=5).value == 2 * size


def test_memory_tests_state_their_bytes() -> None:
    for test in memory_bandwidth._memory_tests(torch.device("cpu"), 2**20):
        assert test.bytes in (2**20, 2**21)
        assert test.job.run() is not None


def test_bandwidth_and_forward_passes_are_measured() -> None:
    rate = bandwidth(size=2**20, repetitions=4)
    assert 0 < rate.low <= rate.value <= rate.high < math.inf
    ratio = over_memory_bound(made(), rows=2, tokens=3, context=5, repetitions=4, size=2**20, progress=False)
    assert 0 < ratio.low <= ratio.value <= ratio.high < math.inf
    assert ratio.n == 4


def test_time_over_the_memory_bound_uses_the_fastest_memory_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seconds for bytes that the fastest memory test moves in one."""
    moved = bytes_moved(made(), 1, 1, 9).total
    size = 2**20
    seconds = torch.tensor([[3.0, 4 * size / moved, size / moved, 9 * size / moved]] * 3, dtype=torch.float64).numpy()
    monkeypatch.setattr(memory_bandwidth, "time_rounds", lambda *_, **__: seconds)
    ratio = over_memory_bound(made(), context=9, repetitions=3, size=size, progress=False)
    assert ratio.value == pytest.approx(3)
