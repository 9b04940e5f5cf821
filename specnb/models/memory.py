"""The peak memory of a generation in bytes: a formula, the same number measured, and the batch size that fits.

    peak = weights + caches + state + max(prefill, step)

    caches   2 layers rows slots kv_heads head_dim itemsize, of the target and of the draft model
    state    8 rows (slots + (steps + 1) (4 gamma + 4)): sequences, uniforms, record
    prefill  rows forward(prompt)
    step     rows max(forward(gamma + 1), 4 vocab distributions)

    forward(n)     of a forward pass over n tokens: itemsize (n slots + max(n wide, 6 n width + repeated)) + n slots.
                   The first term is the mask; then either the feed-forward layer, wide = 4 width + 2 feed_forward
                   (3 if gated, 5 for gelu_new, which is not fused), or the attention, in which keys and values that
                   heads share are repeated, 2 heads slots head_dim
    distributions  (itemsize/4 + 1) (gamma + 1) + gamma + temporary: logits, p, q, and temporary tensors:
                   temporary = max(gamma, 5) for overlaps or sampling; (gamma + 1) times 2 with top-k, 5 with top-p
                   (its sort), and 1 more with a temperature

Everything but the weights is proportional to the number of rows, so the batch size that fits is one division.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb.models.operations import Operation, OperationRecorder

GB = 1e9


@dataclass(frozen=True)
class Memory:
    """Predicted bytes of a generation, by purpose; the terms of the module's formula.

    >>> Memory(weights=100, caches=20, state=3, prefill=4, step=5).peak
    128
    """

    weights: int
    caches: int
    state: int
    prefill: int
    step: int

    @property
    def generation(self) -> int:
        """The peak without the weights."""
        return self.caches + self.state + max(self.prefill, self.step)

    @property
    def peak(self) -> int:
        """The peak with the weights."""
        return self.weights + self.generation


def predicted(
    target: PreTrainedModel,
    draft: PreTrainedModel | None,
    *,
    rows: int,
    prompt: int,
    new_tokens: int,
    gamma: int = 4,
    sampling: Sampling = Sampling(),
) -> Memory:
    """The memory to generate `new_tokens` tokens in `rows` rows after prompts of `prompt` tokens (module's formula).

    >>> from studies.speed.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="meta", dtype=torch.float32)
    >>> one, two = (predicted(model, None, rows=rows, prompt=3, new_tokens=5).generation for rows in (1, 2))
    >>> two == 2 * one
    True
    """
    models = [target] if draft is None or gamma == 0 else [target, draft]
    gamma = gamma if len(models) == 2 else 0
    slots = prompt + new_tokens + gamma + 1
    return Memory(
        weights=sum(_weights(model) for model in {id(model): model for model in models}.values()),
        caches=rows * slots * sum(map(cache_bytes, models)),
        state=8 * rows * (slots + (new_tokens + 1) * (4 * gamma + 4)),
        prefill=rows * max(_forward(model, prompt - 1, slots) for model in models),
        step=rows * max(_forward(target, gamma + 1, slots), _distributions(target, gamma, sampling)),
    )


def _forward(model: PreTrainedModel, tokens: int, slots: int) -> int:
    """Bytes of one row for a forward pass over `tokens` tokens."""
    config, item = model.config, model.dtype.itemsize
    feed_forward = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None)
    gated = any(name.endswith("gate_proj") for name, _ in model.named_modules())
    times = 3 if gated else 5 if getattr(config, "activation_function", None) == "gelu_new" else 2
    width = int(config.hidden_size)
    wide = 4 * width + times * int(feed_forward or 4 * width)
    _, shared, heads, head = _attention(model)
    repeated = 2 * heads * slots * head if shared < heads else 0
    return item * (tokens * slots + max(tokens * wide, 6 * tokens * width + repeated)) + tokens * slots


def _distributions(target: PreTrainedModel, gamma: int, sampling: Sampling) -> int:
    """Bytes of one row while the distributions of a step are computed and verified."""
    filters = 5 if sampling.top_p < 1 else 2 if sampling.top_k is not None else 0
    filters += sampling.temperature not in (0, 1)
    temporary = max(gamma, 5, filters * (gamma + 1))
    probs = 8 if target.dtype == torch.float64 else 4
    logits = target.dtype.itemsize * (gamma + 1)
    return int(target.config.vocab_size * (logits + probs * (2 * gamma + 1 + temporary)))


def _attention(model: PreTrainedModel) -> tuple[int, int, int, int]:
    """Layers, key-value heads, heads, and the width of a head."""
    config = model.config
    heads = int(config.num_attention_heads)
    shared = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    return int(config.num_hidden_layers), int(shared), heads, int(head)


def cache_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, in all layers.

    >>> from studies.speed.shapes import Shape, empty_model
    >>> cache_bytes(empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="meta", dtype=torch.float32))
    64
    """
    layers, shared, _, head = _attention(model)
    return 2 * layers * shared * head * model.dtype.itemsize


def _weights(model: PreTrainedModel) -> int:
    """Bytes of parameters and buffers; tied weights count once, packed weights in addition to the originals."""
    kept = [*model.parameters(), *model.buffers()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in kept if tensor.layout == torch.strided}.values()) + sum(
        tensor.numel() * tensor.dtype.itemsize for tensor in kept if tensor.layout != torch.strided
    )


def available(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return int(psutil.virtual_memory().available)


def require_memory(need: Memory, rows: int, device: torch.device) -> None:
    """Raises `MemoryError`, naming the batch size that would fit, if `need` for `rows` is more than is available."""
    free = available(device)
    if need.generation > free:
        raise MemoryError(_what_fits(need, rows, device, free))


@contextmanager
def telling_what_fits(need: Memory, rows: int, device: torch.device) -> Iterator[None]:
    """Re-raises an out-of-memory error of the device as `MemoryError` naming the batch size that would fit."""
    free = available(device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(_what_fits(need, rows, device, min(free, need.generation - 1))) from error


def _what_fits(need: Memory, rows: int, device: torch.device, free: int) -> str:
    fitting = free * rows // need.generation
    advice = f"batch_size={fitting} would fit" if fitting else "not even one row fits; ask for fewer tokens"
    asked = f"{rows} rows need {need.generation / GB:.3g} GB beside the weights"
    return f"{asked}, and {device} has {free / GB:.3g} GB left: {advice}"


def measured_peak(function: Callable[[], Any], device: torch.device) -> int:
    """The largest number of bytes in use at a time while `function` runs, less those in use before.

    >>> measured_peak(lambda: torch.zeros(250), torch.device("cpu"))
    1000
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    live = _LiveMemory()
    with OperationRecorder(live.record):
        function()
    return live.peak


class _LiveMemory:
    """Sums the storages that operations allocate, each for as long as something refers to it.

    bytes, peak  now, and at most so far
    """

    def __init__(self) -> None:
        self.bytes, self.peak = 0, 0
        self.storages: dict[int, Any] = {}

    def record(self, operation: Operation) -> None:
        known = {storage._cdata for storage in _storages(operation.inputs)}
        for storage in _storages(operation.outputs):
            if storage._cdata not in known and storage._cdata not in self.storages:
                self._add(storage)
        self.peak = max(self.peak, self.bytes)

    def _add(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()

        def released(_: Any) -> None:
            self.bytes -= size
            del self.storages[key]

        self.storages[key] = weakref.ref(storage, released)
        self.bytes += size


def _storages(tensors: list[Tensor]) -> list[Any]:
    """Without those of packed weights, which give no access to their storage."""
    return [tensor.untyped_storage() for tensor in tensors if tensor.layout == torch.strided]
