"""The key-value cache of the decoding loop, from which tokens can be removed.

`RaggedCache` is the decoding loop's: preallocated, every row writes at its own slots, and a mask
hides the slots beyond its length. Removing tokens needs no operation on the cache: a row's
length counts what was emitted (`specnb.decoding.step.State.append`), so rejected tokens lie beyond
it, hidden until they are overwritten.
"""

from __future__ import annotations

import inspect
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

SEEN_MULTIPLE = 64
"""The slots that a pass reads are a multiple of this many, as kernels are prepared for each
size."""


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, `(batch, heads, capacity, head_dim)`, written at the cache's
    slots."""

    is_compileable = True
    is_sliding = False

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        written, heads, _, key_dim = key_states.shape
        batch, capacity = self.cache.batch or written, self.cache.capacity
        self.keys = key_states.new_zeros(batch, heads, capacity, key_dim)
        self.values = value_states.new_zeros(batch, value_states.shape[1], capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        # By index and not by scatter, for which compiled code would copy the whole cache.
        written, slots = self.cache.index
        self.keys[written, :, slots] = key_states.transpose(1, 2)
        self.values[written, :, slots] = value_states.transpose(1, 2)
        rows = slice(None) if self.cache.rows is None else self.cache.rows
        seen = slice(self.cache.seen)
        return self.keys[rows, :, seen], self.values[rows, :, seen]

    def clear(self) -> None:
        """Zeros everywhere: hidden values must be finite, because 0 * NaN is NaN."""
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys.zero_()
            self.values.zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.seen, 0

    def get_seq_length(self) -> int:
        return 0  # rows differ; positions and mask are always given explicitly

    def get_max_length(self) -> int:
        return self.cache.capacity


class RaggedCache(Cache):
    """A cache whose rows have different lengths: `write_at` sets the slots of the next tokens of
    each row.

    A forward pass reads the first `seen` slots: attention to slots that none of its tokens sees
    would change nothing and take time. On the CPU `least` says how many they are; on another
    device, where the host would have to wait to know, and where `shortens` is false, it is all.
    """

    shortens = True

    index: tuple[Tensor, Tensor]
    rows: Tensor | None

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.seen = capacity
        self.batch: int | None = None  # its rows, where the first tokens are of some rows only
        self.ragged = [RaggedLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.ragged))

    def write_at(self, slots: Tensor, rows: Tensor | None = None, seen: int | None = None) -> None:
        """The next tokens are written to `slots` `(batch, n)` of all rows, or of `rows`
        `(batch,)`."""
        self.seen = self.capacity if seen is None else seen
        written = torch.arange(len(slots), device=slots.device) if rows is None else rows
        self.rows, self.index = rows, (written[:, None], slots)

    def least(self, slots: Tensor, visible: Tensor | None = None) -> int:
        """How many slots tokens need that see up to their own `slots`, or what is true in `visible`
        `(.., capacity)`.

        >>> RaggedCache(1, capacity=200).least(torch.tensor([70]))
        128
        """
        if not self.shortens or slots.device.type != "cpu" or torch.compiler.is_compiling():
            return self.capacity
        highest = slots.max() if visible is None else visible.flatten(0, -2).any(dim=0).nonzero().max()
        return min(self.capacity, (int(highest) // SEEN_MULTIPLE + 1) * SEEN_MULTIPLE)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copies the entries at slots `source` `(batch, n)` to slots `destination` `(batch, n)` of
        the same row."""
        every = torch.arange(len(source), device=source.device)[:, None]
        for layer in self.ragged:
            if layer.is_initialized:
                assert layer.keys is not None
                assert layer.values is not None
                layer.keys[every, :, destination] = layer.keys[every, :, source]
                layer.values[every, :, destination] = layer.values[every, :, source]

    def clear(self) -> None:
        """Empties the cache; its tensors stay where they are in memory."""
        for layer in self.ragged:
            layer.clear()


def ragged_mask(slots: Tensor, capacity: int, dtype: torch.dtype) -> Tensor:
    """The additive mask `(batch, 1, n, capacity)`: a token at slot s sees the slots up to s, its
    own included.

    >>> (ragged_mask(torch.tensor([[1]]), capacity=3, dtype=torch.float32) == 0).tolist()
    [[[[True, True, False]]]]
    """
    return additive_mask(torch.arange(capacity, device=slots.device) <= slots[..., None], dtype)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask `(batch, 1, n, capacity)` to add to attention scores: 0 where `visible`
    `(batch, n, capacity)` is true.

    >>> additive_mask(torch.tensor([[[True, False]]]), torch.float32).shape
    torch.Size([1, 1, 1, 2])
    """
    hidden = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, hidden)[:, None]


def why_not_croppable(cache: Any, plain: tuple[type, ...] = (DynamicLayer,)) -> str:
    """The reason why `cache` cannot be cropped; empty if it can, so if all its layers are `plain`.

    >>> why_not_croppable(DynamicCache())
    ''
    """
    if not isinstance(cache, DynamicCache):
        return "it is neither a DynamicCache nor a tuple of per-layer tensors"
    for number, layer in enumerate(cache.layers):
        # Not `is_croppable`, which is true for subclasses that drop tokens (a window, a
        # convolution) or hold more.
        if type(layer) not in plain:
            return f"its layer {number} is a {type(layer).__name__}, which is not plain full attention"
    return ""


def cache_argument(model: PreTrainedModel) -> str:
    """What the forward pass of `model` calls its cache, as an argument and in its output.

    `cache` from transformers 5.24 on, where the name before warns and ends with 5.40.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of the part of `model` that has a cache: not that of an encoder, or of what
    reads images."""
    part = model.get_decoder() if model.config.is_encoder_decoder else model
    return part.config.get_text_config(decoder=True)


def cache_bytes(model: PreTrainedModel) -> int:
    """Bytes of the keys and values of one token, summed over the layers; with an encoder, also of
    one of its input.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> cache_bytes(empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="meta", dtype=torch.float32))
    64
    """
    layers = decoder_config(model).per_layer_config
    return sum(_numbers_of_a_token(layers[number]) for number in range(len(layers))) * model.dtype.itemsize


def _numbers_of_a_token(layer: PreTrainedConfig) -> int:
    latent = getattr(layer, "kv_lora_rank", None)
    if latent:  # what keys and values of all heads are made from
        return int(latent + layer.qk_rope_head_dim)
    heads = layer.num_attention_heads
    width = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return int(2 * width * (getattr(layer, "num_key_value_heads", None) or heads))


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on `device`.

    >>> free_memory(torch.device("cpu")) > 2**20
    True
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return int(psutil.virtual_memory().available)
