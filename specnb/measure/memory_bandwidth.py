"""The time that memory traffic alone needs: a floor under every run, whoever wrote the loop.

A run over a few tokens does two operations with each weight that it reads, and devices do a hundred while they
read one; so the time of a run is the time to read the weights, once, whatever the number of tokens. What a run
moves is counted, how fast memory is gets measured here, and their ratio is what a run can at best take.

A model that fits into the processor's cache may well be below the floor: from one run to the next its
weights never leave the cache. And a large batch is far above it, where arithmetic takes longer than reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specnb.measure.cost import Job, forward_pass_of, time_interleaved
from specnb.measure.statistics import Estimate, bootstrap_indices, interval, ratio_of_medians
from specnb.models.memory import cache_bytes
from specnb.models.shapes import size_of

Array = NDArray[np.float64]
SMALLEST_TEST = 2**28  # bytes that are copied or read at once: more than a processor's caches hold
LARGEST_TEST = 2**30


class BytesMoved(NamedTuple):
    """Bytes that a target run must move: weights, keys and values, logits."""

    weights: int
    cache: int
    logits: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def bytes_moved(model: PreTrainedModel, rows: int = 1, tokens: int = 1, context: int = 128) -> BytesMoved:
    """What a run over `tokens` tokens of each of `rows` rows moves, after `context` tokens, at the very least.

    Every weight is read once, also where a second, packed copy of it is what is read; of an input embedding
    only the rows that are asked for, and all of it where it is tied to the head. Keys and values of the context
    are read, those of the new tokens written, and the logits written. Activations are taken to stay in caches.
    Raises `ValueError` for rows, tokens < 1 and a negative context.
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
    """Seconds that `bytes_moved` takes at `bandwidth` bytes per second."""
    return bytes_moved(model, rows, tokens, context).total / bandwidth


def bandwidth(device: str | torch.device = "cpu", repetitions: int = 15, size: int | None = None) -> Estimate:
    """Bytes per second between memory and `device`, with the threads that torch has: the best of three ways.

    Copying, which reads and writes each byte; summing; and a matrix times a vector, which only read. `size` is the
    number of bytes of what is copied or read. The interval resamples repetitions, of which there must be 3.
    """
    device = torch.device(device)
    ways = _memory_tests(device, size)
    seconds = time_interleaved([way.job for way in ways], device, repetitions, np.random.default_rng(0), progress=False)
    rates = np.array([way.bytes for way in ways]) / seconds
    best = rates[:, np.median(rates, axis=0).argmax()]
    spread = np.median(best[bootstrap_indices(len(best), 2000, 0)], axis=1)
    return Estimate(float(np.median(best)), *interval(spread), len(best))


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
    """How many times its floor a run of `model` takes here: runs, and the memory's speed, measured in turn.

    The arguments are those of `bytes_moved`, `bandwidth` and `generate`, and raise what they raise.
    """
    device = model.device
    moved = bytes_moved(model, rows, tokens, context).total
    order = np.random.default_rng(seed)
    text = torch.from_numpy(order.integers(model.config.vocab_size, size=(rows, context + tokens))).to(device)
    run = forward_pass_of(model, tokens, text, context, compile)
    ways = _memory_tests(device, size)
    seconds = time_interleaved(
        [Job(run, before=[run]), *(way.job for way in ways)], device, repetitions, order, progress
    )
    memory_bounds = moved * seconds[:, 1:] / np.array([way.bytes for way in ways])
    return ratio_of_medians(seconds[:, 0], memory_bounds[:, np.median(memory_bounds, axis=0).argmin()])


class _MemoryTest(NamedTuple):
    """A way to move memory, and the bytes that it moves."""

    job: Job
    bytes: int


def _memory_tests(device: torch.device, size: int | None) -> list[_MemoryTest]:
    size = size or (LARGEST_TEST if device.type == "cuda" else SMALLEST_TEST)
    source = torch.ones(size // 2**14, 2**12, device=device)
    goal, vector = torch.empty_like(source), torch.ones(2**12, device=device)
    moved = source.numel() * source.element_size()
    doings: list[tuple[Callable[[], Any], int]] = [
        (lambda: goal.copy_(source), 2 * moved), (source.sum, moved), (lambda: source @ vector, moved),
    ]  # fmt: skip
    return [_MemoryTest(Job(doing, before=[doing]), bytes_) for doing, bytes_ in doings]
