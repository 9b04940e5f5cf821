"""Key-value caches: the cache of the decoding loop, a model together with it, and `crop` for caches of transformers.

In the loop's cache every row writes at its own slots, and a mask hides the slots beyond its length,
where rejected tokens lie until they are overwritten.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import psutil
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, EncoderDecoderCache

from specnb.arguments import shown, whole, whole_numbers
from specnb.support import TokenMap, context_limit, sliding_window, why_not_croppable

LEAST_SLOTS = 512  # of what is compiled or captured, because few sizes are
SEEN_MULTIPLE = 64  # a pass reads a multiple of this many slots, because kernels are prepared for each size


class RaggedLayer(CacheLayerMixin):
    is_compileable = True
    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(self, cache: RaggedCache) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.cache: RaggedCache = weakref.proxy(cache)  # so that memory is free as soon as nobody needs the cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        written, heads, _, key_dim = key_states.shape
        batch, capacity = self.cache.batch or written, self.cache.capacity
        self.keys = key_states.new_zeros(batch, heads, capacity, key_dim)
        self.values = value_states.new_zeros(batch, value_states.shape[1], capacity, value_states.shape[-1])
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return written_and_seen(self.keys, self.values, key_states, value_states, self.cache)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.cache.seen, 0

    def get_seq_length(self) -> int:
        return 0  # rows differ; positions and mask are always given explicitly

    def get_max_length(self) -> int:
        return self.cache.capacity


def written_and_seen(
    keys: Tensor, values: Tensor, key_states: Tensor, value_states: Tensor, at: Any
) -> tuple[Tensor, Tensor]:
    """Write the new tokens of one layer, and return the keys and values that their pass reads."""
    if at.keep_finite:
        for states in (key_states, value_states):
            at.overflowed |= ~states.isfinite().all(dim=-1).all(dim=1)
        key_states, value_states = key_states.nan_to_num(), value_states.nan_to_num()
    # By index and not by scatter, for which compiled code would copy the whole cache.
    written, slots = at.index
    keys[written, :, slots] = key_states.transpose(1, 2)
    values[written, :, slots] = value_states.transpose(1, 2)
    rows = slice(None) if at.rows is None else at.rows
    return keys[rows, :, : at.seen], values[rows, :, : at.seen]


class RaggedCache(Cache):
    """A cache whose rows have different lengths. A pass reads the first `seen` slots only."""

    shortens = True
    # Keep NaN out: a mask does not hide it, so the NaN of a draft token would reach tokens before it.
    keep_finite = False
    overflowed: Tensor  # of a pass with `keep_finite`, tokens `(batch, n)` that have keys or values that are not
    fills = False  # whether the pass is over prompts, of any length
    index: tuple[Tensor, Tensor]
    rows: Tensor | None

    def __init__(self, layers: int, capacity: int) -> None:
        self.capacity = capacity
        self.seen = capacity
        self.batch: int | None = None  # number of rows, if the first tokens are of some rows only
        self.ragged = [RaggedLayer(self) for _ in range(layers)]
        super().__init__(layers=list(self.ragged))

    def write_at(self, slots: Tensor, rows: Tensor | None = None, seen: int | None = None) -> None:
        """Write the next tokens to `slots` `(batch, n)`."""
        self.seen = self.capacity if seen is None else seen
        written = torch.arange(len(slots), device=slots.device) if rows is None else rows
        self.rows, self.index = rows, (written[:, None], slots.contiguous())
        if self.keep_finite:
            self.overflowed = torch.zeros_like(slots, dtype=torch.bool)

    def least(self, slots: Tensor, visible: Tensor | None = None, bound: LengthBound | None = None) -> int:
        """Slots to read for tokens that see up to their `slots`, or the `visible` ones; on a GPU, where the host would
        have to wait for these, what the `bound` says, by default all."""
        if not self.shortens:
            return self.capacity
        if slots.device.type != "cpu":
            return self.capacity if bound is None else bound.seen
        highest = slots.max() if visible is None else visible.flatten(0, -2).any(dim=0).nonzero().max()
        return min(self.capacity, (int(highest) // SEEN_MULTIPLE + 1) * SEEN_MULTIPLE)

    def clear(self, rows: Tensor | slice = slice(None)) -> None:
        """Zero all entries: hidden values must be finite, because 0 * NaN is NaN."""
        for layer in self.ragged:
            if layer.is_initialized:
                layer.keys[rows] = layer.values[rows] = 0


def readable(capacity: int) -> tuple[int, ...]:
    """Numbers of slots that a pass on a GPU may read; a graph is captured for each."""
    shares = {max(LEAST_SLOTS, -(-capacity // (share * SEEN_MULTIPLE)) * SEEN_MULTIPLE) for share in (4, 2)}
    return (*sorted(size for size in shares if size < capacity), capacity)


class LengthBound:
    """An upper bound on the tokens of any row, which the host knows without waiting for the device.

    Attributes
    ----------
    seen
        Slots that hold all tokens of the step that was last begun: one of the `readable` numbers.
    """

    def __init__(self, slots: int, gamma: int) -> None:
        self.slots, self.gamma = slots, gamma
        self.tokens, self.seen = 1, slots

    def begin(self) -> None:
        """No row has a sequence."""
        self.tokens = 1

    def enter(self, lengths: Iterable[int]) -> None:
        """Rows got prompts of these lengths."""
        self.tokens = max(self.tokens, *lengths)

    def step(self) -> None:
        """Each row gets up to gamma + 1 tokens, of which the last is in no slot yet."""
        self.seen = min((size for size in readable(self.slots) if size >= self.tokens + self.gamma), default=self.slots)
        self.tokens += self.gamma + 1

    def hear(self, lengths: Iterable[int]) -> None:
        """What the device said of the rows that go on, one step ago at most."""
        self.tokens = min(self.tokens, max(lengths, default=1) + self.gamma + 1)


def slots_for(prompt: int, new_tokens: int, gamma: int) -> int:
    """Cache slots of a row, with room for the draft tokens of the last step."""
    return prompt + new_tokens + gamma + 1


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """The mask to add to attention scores: 0 where `visible` is true."""
    hidden = torch.finfo(dtype).min
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, hidden)[:, None]


class CachedModel:
    """A model with the cache of one batch, of `capacity` slots a row.

    A token does not see slots above its own, so a row is cropped by running its next tokens at
    lower slots.
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.token_map = TokenMap(model)
        self.config = decoder_config(model)
        self.cache = RaggedCache(self.config.num_hidden_layers, capacity)
        self.cache_argument = cache_argument(model)
        self.window = sliding_window(self.config)
        self.places: Tensor | None = None  # with a window, the position of the token in each slot
        self.last_position = (context_limit(model) or capacity) - 1
        self.hidden_layers: tuple[int, ...] = ()
        self.hidden_states: Tensor | None = None

    def record_hidden_states(self, layers: tuple[int, ...], batch: int) -> None:
        last = self.config.num_hidden_layers
        if not all(-last - 1 <= layer <= last for layer in layers):
            raise ValueError(f"the drafter reads layers {layers}, and the target has {last}: give its own target")
        self.hidden_layers = layers
        width = self.config.hidden_size * len(layers)
        self.hidden_states = torch.zeros(batch, self.capacity, width, dtype=self.model.dtype, device=self.model.device)

    def clear(self, rows: Tensor | slice = slice(None)) -> None:
        self.cache.clear(rows)
        if self.hidden_states is not None:
            self.hidden_states[rows] = 0

    def run(
        self,
        tokens: Tensor,
        slots: Tensor,
        keep: int,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        rows: Tensor | None = None,
        seen: int | None = None,
    ) -> Tensor:
        """Logits `(batch, keep, vocab)` after the last `keep` of `tokens` `(batch, n)`, written at `slots`.

        For a tree, `positions` and `visible` `(batch, n, capacity)` say where tokens are and which
        slots they see.
        """
        self.cache.write_at(slots, rows, self.cache.least(slots, visible) if seen is None else seen)
        positions = slots if positions is None else positions
        seen, dtype = self.cache.seen, self.model.dtype
        mask: Any = self.mask(slots) if visible is None else additive_mask(visible[..., :seen], dtype)
        if self.window:
            mask = self.windowed(mask, positions, rows)
        more: dict[str, Any] = {"output_hidden_states": True} if self.hidden_layers else {}
        output = self.model(
            input_ids=self.token_map.inputs(tokens),
            # Draft tokens beyond the model's limit are never emitted; they only need a valid index.
            position_ids=positions.clamp_max(self.last_position),
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=keep,
            **{self.cache_argument: self.cache},
            **more,
        )
        if self.hidden_states is not None:
            states = [output.hidden_states[layer] for layer in self.hidden_layers]
            self.hidden_states[self.cache.index] = torch.cat(states, dim=-1)
        logits = self.token_map.logits(output.logits)
        if self.cache.keep_finite:
            # A token reads its own keys and values, so the model alone has NaN after it.
            logits = logits.masked_fill(self.cache.overflowed[:, -keep:, None], torch.nan)
        return logits

    def fill(self, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
        longest = int(lengths.max())
        if longest > 1:
            every = torch.arange(longest - 1)
            seen, slots = self.cache.least(every), every.to(tokens.device).expand(len(tokens), -1)
            self.cache.fills = True
            self.run(tokens[:, : longest - 1], slots, keep=1, rows=rows, seen=seen)
            self.cache.fills = False

    def mask(self, slots: Tensor) -> Tensor:
        """The additive mask `(batch, 1, n, seen)` by which a token sees the slots up to its own."""
        visible = torch.arange(self.cache.seen, device=slots.device) <= slots[..., None]
        return additive_mask(visible, self.model.dtype)

    def windowed(self, mask: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor | dict[str, Tensor]:
        """`mask` for a model with a sliding window, or one for each type of layer."""
        if self.places is None:
            self.places = torch.arange(self.capacity, device=mask.device).repeat(self.cache.batch or len(mask), 1)
        self.places[self.cache.index] = positions
        behind = (self.places if rows is None else self.places[rows])[:, : self.cache.seen]
        far = positions[..., None] - behind[:, None] >= self.window
        near = mask.masked_fill(far[:, None], torch.finfo(mask.dtype).min)
        several = getattr(self.config, "layer_types", None)
        return {"full_attention": mask, "sliding_attention": near} if several else near

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the entries at slots `source` `(batch, n)` to `destination`."""
        every = torch.arange(len(source), device=source.device)[:, None]
        for layer in self.cache.ragged:
            if layer.is_initialized:
                layer.keys[every, :, destination] = layer.keys[every, :, source]
                layer.values[every, :, destination] = layer.values[every, :, source]
        for kept in (self.hidden_states, self.places):
            if kept is not None:
                kept[every, destination] = kept[every, source]


def prefill(runner: CachedModel, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
    """Run the prompts without their last tokens in one pass; shorter rows also evaluate padding."""
    if rows is not None:
        runner.cache.batch = len(tokens)
        runner.clear(rows)
        tokens, lengths = tokens[rows], lengths[rows]
    runner.fill(tokens, lengths, rows)


def cache_argument(model: PreTrainedModel) -> str:
    """The name of the cache in the forward pass: `cache` from transformers 5.24 on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def decoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    part = model.get_decoder() if model.config.is_encoder_decoder else model
    return part.config.get_text_config(decoder=True)


def cache_bytes(model: PreTrainedModel) -> int:
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
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return int(psutil.virtual_memory().available)


TupleCache = tuple[tuple[Tensor, ...], ...]


def crop(
    cache: DynamicCache | EncoderDecoderCache | TupleCache | None, tokens: int | Sequence[int]
) -> DynamicCache | EncoderDecoderCache | TupleCache | None:
    """Remove the last tokens from a cache of transformers, as after rejected draft tokens.

    Parameters
    ----------
    cache
        A `DynamicCache`, cropped in place; an `EncoderDecoderCache`, of which the self-attention
        part is cropped; a tuple of per-layer tensors `(batch, heads, length, head_dim)`; or None.
    tokens
        Number of tokens to remove, or one for each row. If rows differ, their tokens move to the
        right; mask what is before them like left padding.

    Raises
    ------
    TypeError
        For a cache that cannot be cropped: recurrent state, a sliding window, a static or quantised
        cache.

    Examples
    --------
    >>> keys = values = torch.arange(5.0).expand(2, 1, 5).unsqueeze(-1)
    >>> crop(((keys, values),), tokens=[1, 3])[0][0][..., 0].tolist()
    [[[0.0, 1.0, 2.0, 3.0]], [[0.0, 0.0, 0.0, 1.0]]]
    """
    if cache is None:
        return None
    if isinstance(cache, EncoderDecoderCache):
        crop(cache.self_attention_cache, tokens)
        return cache
    length, number = _length(cache), whole(tokens)
    if number is None and whole_numbers(tokens) is None:
        raise TypeError(f"tokens is {shown(tokens)}; it must be a whole number, or a list of one for each row")
    counts = torch.as_tensor(tokens if number is None else number)
    if not bool(((counts >= 0) & (counts <= length)).all()):
        raise ValueError(f"cannot take {counts.tolist()} tokens out of a cache of {length}; ask for 0 to {length}")
    kept = length - int(counts.min())

    def cropped(entries: Tensor) -> Tensor:
        if not counts.ndim:
            return entries[..., :kept, :]
        # Row r keeps its first length - counts[r] entries, at the right end.
        moved = (counts - counts.min()).to(entries.device)
        if len(moved) != len(entries):
            raise ValueError(f"there are {len(moved)} numbers of tokens for {len(entries)} rows")
        at = (torch.arange(kept, device=entries.device) - moved[:, None]).clamp_min(0)
        return entries.take_along_dim(at[:, None, :, None], dim=-2)

    if isinstance(cache, tuple):
        return tuple((*map(cropped, layer[:2]), *layer[2:]) for layer in cache)
    for layer in cache.layers:
        full: Any = layer  # every layer is one of full attention
        if full.is_initialized:
            full.keys, full.values = cropped(full.keys), cropped(full.values)
    return cache


def _length(cache: DynamicCache | TupleCache) -> int:
    if isinstance(cache, tuple):
        if not cache or not all(
            isinstance(layer, tuple) and len(layer) in (2, 4) and all(isinstance(part, Tensor) for part in layer[:2])
            for layer in cache
        ):
            raise TypeError("a tuple cache holds a tuple of 2 tensors (4 with an encoder) per layer; this one does not")
        lengths = {tensor.shape[-2] for layer in cache for tensor in layer[:2]}
        if len(lengths) > 1:
            raise TypeError(f"the tensors of this tuple cache differ in length, axis -2: {sorted(lengths)}")
        return int(lengths.pop())
    reason = why_not_croppable(cache)
    if reason:
        raise TypeError(f"{type(cache).__name__} cannot be cropped: {reason}; use a DynamicCache of full attention")
    return int(cache.get_seq_length())
