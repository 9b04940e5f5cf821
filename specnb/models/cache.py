"""Key-value caches from which tokens can be taken back.

`RaggedCache` is the loop's own: preallocated, every row writes where it stands, and a mask hides what
lies behind it. Taking tokens back is then no operation at all: the row's length, a tensor, gets
smaller, and what was written there is hidden until it is overwritten. `crop` does the same for caches
that come from elsewhere, and refuses by name those that cannot do it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, EncoderDecoderCache

TupleCache = tuple[tuple[Tensor, ...], ...]
Croppable = DynamicCache | EncoderDecoderCache | TupleCache


class RaggedLayer(CacheLayerMixin):
    """Keys and values of one layer, `(batch, heads, capacity, head_dim)`, written at the cache's slots."""

    is_compileable = True
    is_sliding = False

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()
        self.cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        batch, heads, _, key_dim = key_states.shape
        capacity = self.cache.capacity
        self.keys = key_states.new_zeros(batch, heads, capacity, key_dim)
        self.values = value_states.new_zeros(batch, value_states.shape[1], capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        # Written by index and not by scatter, for which compiled code would copy the whole cache.
        rows, slots = self.cache.index
        self.keys[rows, :, slots] = key_states.transpose(1, 2)
        self.values[rows, :, slots] = value_states.transpose(1, 2)
        some = self.cache.rows
        return (self.keys, self.values) if some is None else (self.keys[some], self.values[some])

    def clear(self) -> None:
        """Zeros everywhere: what is hidden must be finite, since 0 times NaN is NaN."""
        if self.is_initialized:
            assert self.keys is not None
            assert self.values is not None
            self.keys.zero_()
            self.values.zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.capacity, 0

    def get_seq_length(self) -> int:
        return 0  # rows differ; positions and mask are always given explicitly

    def get_max_length(self) -> int:
        return self.cache.capacity


class RaggedCache(Cache):
    """A cache whose rows have lengths of their own: `write_at` says where the next tokens of each go."""

    index: tuple[Tensor, Tensor]
    rows: Tensor | None

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.ragged = [RaggedLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.ragged))

    def write_at(self, slots: Tensor, rows: Tensor | None = None) -> None:
        """The next tokens `(batch, n)` go to `slots`, of all rows or of `rows` `(batch,)`."""
        every = torch.arange(len(slots), device=slots.device) if rows is None else rows
        self.rows, self.index = rows, (every[:, None], slots)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copies the entries at slots `source` `(batch, n)` to slots `destination` `(batch, n)` of the same row."""
        every = torch.arange(len(source), device=source.device)[:, None]
        for layer in self.ragged:
            if layer.is_initialized:
                assert layer.keys is not None
                assert layer.values is not None
                layer.keys[every, :, destination] = layer.keys[every, :, source]
                layer.values[every, :, destination] = layer.values[every, :, source]

    def clear(self) -> None:
        """Forgets everything; the tensors stay where they are."""
        for layer in self.ragged:
            layer.clear()


def ragged_mask(slots: Tensor, capacity: int, dtype: torch.dtype) -> Tensor:
    """The additive mask `(batch, 1, n, capacity)`: a token at slot s sees the slots up to s, its own included."""
    return additive_mask(torch.arange(capacity, device=slots.device) <= slots[..., None], dtype)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask `(batch, 1, n, capacity)` to add to scores: 0 where `visible` `(batch, n, capacity)` is true."""
    hidden = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, hidden)[:, None]


def crop(cache: Croppable, tokens: int) -> Croppable:
    """`cache` without its last `tokens` tokens, the same number in every row.

    A `DynamicCache` is cropped in place and returned, and so is the decoder's own part of an
    `EncoderDecoderCache`. A tuple of per-layer tuples (keys, values and, of an encoder, two more that
    stay) with tensors `(batch, heads, length, head_dim)` gives a new tuple of views. Raises `TypeError`
    for a cache that cannot be cropped (recurrent state, a sliding window, a static or quantised cache),
    and `ValueError` for a negative number or more tokens than there are.
    """
    if isinstance(cache, EncoderDecoderCache):
        crop(cache.self_attention_cache, tokens)
        return cache
    length = _length(cache)
    if not 0 <= tokens <= length:
        raise ValueError(f"cannot take {tokens} tokens out of a cache that holds {length}; ask for 0 to {length}")
    if isinstance(cache, tuple):
        return tuple((*(own[..., : length - tokens, :] for own in layer[:2]), *layer[2:]) for layer in cache)
    cache.crop(-tokens)
    return cache


def _length(cache: DynamicCache | TupleCache) -> int:
    if isinstance(cache, tuple):
        if not cache or not all(isinstance(layer, tuple) and len(layer) in (2, 4) for layer in cache):
            raise TypeError("a tuple cache holds a tuple of 2 tensors (4 with an encoder) per layer; this one does not")
        lengths = {own.shape[-2] for layer in cache for own in layer[:2]}
        if len(lengths) > 1:
            raise TypeError(f"the tensors of this tuple cache differ in length, axis -2: {sorted(lengths)}")
        return int(lengths.pop())
    reason = why_not_croppable(cache)
    if reason:
        raise TypeError(f"{type(cache).__name__} cannot be cropped: {reason}; use a DynamicCache of full attention")
    return int(cache.get_seq_length())


def why_not_croppable(cache: Any) -> str:
    """Why tokens cannot be taken back out of `cache`, in words; empty if they can."""
    if not isinstance(cache, DynamicCache):
        return "it is neither a DynamicCache nor a tuple of per-layer tensors"
    for number, layer in enumerate(cache.layers):
        # Not `is_croppable`, which is true of subclasses that forget (a window, a convolution) or hold more.
        if type(layer) is not DynamicLayer:
            return f"its layer {number} is a {type(layer).__name__}, which is not plain full attention"
    return ""
