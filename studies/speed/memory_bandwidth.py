"""The memory bound: the least time of a forward pass if memory traffic alone took time.

A forward pass over a few tokens does two operations with each weight that it reads, and a device can do about a hundred
in that time. So its time is at least that of reading all weights once, whatever the number of tokens. The bytes moved
are counted, the memory bandwidth is measured, and their ratio is the bound.

A model that fits into the processor's cache can be faster than this bound, since its weights stay in the cache. A large
batch is far slower, since arithmetic takes longer than reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specnb.measure.cost import WARM_UP, forward_pass_of
from specnb.measure.statistics import Estimate, bootstrap, ratio_of_medians
from specnb.measure.timing import Job, device_clock, time_rounds
from specnb.models.cache import cache_bytes
from studies.speed.shapes import size_of

Array = NDArray[np.float64]
CPU_TEST_BYTES = 2**28  # copied or read at once: more than a processor's caches hold
GPU_TEST_BYTES = 2**30


class BytesMoved(NamedTuple):
    """Bytes that a forward pass moves at least: weights, keys and values, logits."""

    weights: int
    cache: int
    logits: int

    @property
    def total(self) -> int:
        """The sum."""
        return sum(self)


def bytes_moved(model: PreTrainedModel, rows: int = 1, tokens: int = 1, context: int = 128) -> BytesMoved:
    """The least bytes that a forward pass over `tokens` tokens of each of `rows` rows moves, after `context` tokens.

    Every weight is read once (packed models read a second copy of it instead); of the input embedding only the rows
    looked up, unless it is tied to the output head. Keys and values of the context are read, those of the new tokens
    and the logits are written. Activations are assumed to stay in caches. Raises `ValueError` for rows, tokens < 1 and
    a negative context.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 32, 32, 2), 64, 32, "cpu", torch.float32)
    >>> bytes_moved(model, rows=1, tokens=2, context=10).logits  # 2 tokens x 64 logits x 4 bytes
    512
    """
    if rows < 1 or tokens < 1 or context < 0:
        raise ValueError(f"rows, tokens, context are {rows}, {tokens}, {context}; they must be at least 1, 1, 0")
    width = model.dtype.itemsize
    looked_up = rows * tokens * model.config.hidden_size
    return BytesMoved(
        weights=(size_of(model).read + looked_up) * width,
        cache=rows * (context + tokens) * cache_bytes(model),
        logits=rows * tokens * model.config.vocab_size * width,
    )


def min_seconds(model: PreTrainedModel, bandwidth: float, rows: int = 1, tokens: int = 1, context: int = 128) -> float:
    """The memory bound of a forward pass: seconds to move `bytes_moved` at `bandwidth` bytes per second.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 32, 32, 2), 64, 32, "cpu", torch.float32)
    >>> min_seconds(model, bandwidth=1e9) == bytes_moved(model).total / 1e9
    True
    """
    return bytes_moved(model, rows, tokens, context).total / bandwidth


def bandwidth(device: str | torch.device = "cpu", repetitions: int = 15, size: int | None = None) -> Estimate:
    """Memory bandwidth of `device` in bytes per second, with torch's number of threads: the fastest of three tests.

    The tests are a copy, which reads and writes each byte, and a sum and a matrix-vector product, which only read.
    `size` is the number of bytes copied or read. The interval resamples repetitions.

    >>> bandwidth(size=2**20, repetitions=3).value > 0
    True
    """
    device = torch.device(device)
    tests = _memory_tests(device, size)
    rounds = [[test.job for test in tests]] * (WARM_UP + repetitions)
    order = np.random.default_rng(0)
    seconds = time_rounds(rounds, device_clock(device), order, warm_up=WARM_UP, progress=False)
    rates = np.array([test.bytes for test in tests]) / seconds
    best = rates[:, np.median(rates, axis=0).argmax()]
    return bootstrap(lambda chosen: np.median(best[chosen], axis=-1), len(best), 2000, 0)


@torch.inference_mode()
def over_memory_bound(
    model: PreTrainedModel,
    *,
    rows: int = 1,
    tokens: int = 1,
    context: int = 128,
    repetitions: int = 15,
    compile: bool | str = False,
    size: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Estimate:
    """Time of a forward pass of `model` over its memory bound, both measured in the same rounds.

    The arguments are those of `bytes_moved`, `bandwidth` and `generate`, and raise what they raise.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 32, 32, 2), 64, 32, "cpu", torch.float32)
    >>> over_memory_bound(model, context=8, repetitions=3, size=2**20).n
    3
    """
    device = model.device
    moved = bytes_moved(model, rows, tokens, context).total
    order = np.random.default_rng(seed)
    cache_tokens = torch.from_numpy(order.integers(model.config.vocab_size, size=(rows, context + tokens))).to(device)
    forward_pass = forward_pass_of(model, tokens, cache_tokens, context, compile)
    tests = _memory_tests(device, size)
    rounds = [[Job(forward_pass, before=[forward_pass]), *(test.job for test in tests)]] * (WARM_UP + repetitions)
    seconds = time_rounds(rounds, device_clock(device), order, warm_up=WARM_UP, progress=progress)
    bounds = moved * seconds[:, 1:] / np.array([test.bytes for test in tests])
    return ratio_of_medians(seconds[:, 0], bounds[:, np.median(bounds, axis=0).argmin()])


class _MemoryTest(NamedTuple):
    """A timed memory operation, and the bytes that it moves."""

    job: Job
    bytes: int


def _memory_tests(device: torch.device, size: int | None) -> list[_MemoryTest]:
    size = size or (GPU_TEST_BYTES if device.type == "cuda" else CPU_TEST_BYTES)
    source = torch.ones(size // 2**14, 2**12, device=device)
    destination, vector = torch.empty_like(source), torch.ones(2**12, device=device)
    moved = source.numel() * source.element_size()
    operations: list[tuple[Callable[[], Any], int]] = [
        (lambda: destination.copy_(source), 2 * moved), (source.sum, moved), (lambda: source @ vector, moved),
    ]  # fmt: skip
    return [_MemoryTest(Job(operation, before=[operation]), count) for operation, count in operations]
