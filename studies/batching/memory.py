"""The peak memory of a generation in bytes: a formula, and the same number measured.

peak = caches + state + max(prefill, step), beside the weights

caches   2 layers rows slots kv_heads head_dim itemsize, of the target and of the draft model
state    8 rows (slots + (steps + 1) (4 gamma + 4)): sequences, uniforms, record
prefill  rows forward(prompt)
step     rows max(forward(gamma + 1), distributions)

forward(n)     of a forward pass over n tokens: itemsize (n slots + max(n wide, 6 n width + repeated)) + n slots.
The first term is the mask; then either the feed-forward layer, wide = 4 width + 2 feed_forward
(3 if gated), or the attention, in which keys and values that heads share are repeated,
2 heads slots head_dim
distributions  vocab times: logits, p, q, and max(gamma, 5) temporary ones for overlaps or sampling, at temperature
1 without filters
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.models.cache import cache_bytes
from studies.batching.operations import Operation, OperationRecorder


def predicted_peak(
    target: PreTrainedModel, draft: PreTrainedModel, *, rows: int, prompt: int, new_tokens: int, gamma: int
) -> int:
    """Bytes, without weights, to generate `new_tokens` tokens in `rows` rows after prompts of `prompt` tokens."""
    models = [target, draft] if gamma else [target]
    slots = prompt + new_tokens + gamma + 1
    caches = slots * sum(map(cache_bytes, models))
    state = 8 * (slots + (new_tokens + 1) * (4 * gamma + 4))
    prefill = max(_forward(model, prompt - 1, slots) for model in models)
    step = max(_forward(target, gamma + 1, slots), _distributions(target, gamma))
    return rows * (caches + state + max(prefill, step))


def _forward(model: PreTrainedModel, tokens: int, slots: int) -> int:
    """Bytes of one row for a forward pass over `tokens` tokens."""
    config, item = model.config, model.dtype.itemsize
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    shared = getattr(config, "num_key_value_heads", None) or heads
    head = getattr(config, "head_dim", None) or width // heads
    gated = any(name.endswith("gate_proj") for name, _ in model.named_modules())
    wide = 4 * width + (3 if gated else 2) * int(getattr(config, "intermediate_size", None) or 4 * width)
    repeated = 2 * heads * slots * head if shared < heads else 0
    return item * (tokens * slots + max(tokens * wide, 6 * tokens * width + repeated)) + tokens * slots


def _distributions(target: PreTrainedModel, gamma: int) -> int:
    """Bytes of one row while the distributions of a step are computed and verified."""
    probs = 8 if target.dtype == torch.float64 else 4
    logits = target.dtype.itemsize * (gamma + 1)
    sampling = 5 if gamma else 4  # without draft tokens nothing is subtracted from p
    return int(target.config.vocab_size * (logits + probs * (2 * gamma + 1 + max(gamma, sampling))))


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
