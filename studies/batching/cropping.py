"""Tokens taken out of the caches of transformers, or refused where a cache cannot be cropped."""

from __future__ import annotations

from torch import Tensor
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from specnb.cache import why_not_croppable

TupleCache = tuple[tuple[Tensor, ...], ...]
Croppable = DynamicCache | EncoderDecoderCache | TupleCache


def crop(cache: Croppable, tokens: int) -> Croppable:
    """`cache` without its last `tokens` tokens, the same number in every row.

    A `DynamicCache` is cropped in place and returned, and so is the self-attention part of an
    `EncoderDecoderCache`. A tuple of per-layer tuples (keys, values and, with an encoder, two more
    that are kept) with tensors `(batch, heads, length, head_dim)` gives a new tuple of views.

    Raises `TypeError` for a cache that cannot be cropped (recurrent state, a sliding window, a
    static or quantised cache), and `ValueError` for a negative number or more tokens than there
    are.

    >>> import torch
    >>> keys = values = torch.zeros(1, 2, 5, 8)
    >>> crop(((keys, values),), tokens=2)[0][0].shape
    torch.Size([1, 2, 3, 8])
    """
    if isinstance(cache, EncoderDecoderCache):
        crop(cache.self_attention_cache, tokens)
        return cache
    length = _length(cache)
    if not 0 <= tokens <= length:
        raise ValueError(f"cannot take {tokens} tokens out of a cache that holds {length}; ask for 0 to {length}")
    if isinstance(cache, tuple):
        return tuple((*(kept[..., : length - tokens, :] for kept in layer[:2]), *layer[2:]) for layer in cache)
    cache.crop(-tokens)
    return cache


def _length(cache: DynamicCache | TupleCache) -> int:
    if isinstance(cache, tuple):
        if not cache or not all(isinstance(layer, tuple) and len(layer) in (2, 4) for layer in cache):
            raise TypeError("a tuple cache holds a tuple of 2 tensors (4 with an encoder) per layer; this one does not")
        lengths = {tensor.shape[-2] for layer in cache for tensor in layer[:2]}
        if len(lengths) > 1:
            raise TypeError(f"the tensors of this tuple cache differ in length, axis -2: {sorted(lengths)}")
        return int(lengths.pop())
    reason = why_not_croppable(cache)
    if reason:
        raise TypeError(f"{type(cache).__name__} cannot be cropped: {reason}; use a DynamicCache of full attention")
    return int(cache.get_seq_length())
