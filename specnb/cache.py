"""A model together with the key-value cache of one batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import RaggedCache, additive_mask, cache_argument, decoder_config, ragged_mask
from specnb.fast import grouped
from specnb.support import TokenMap, context_limit, sliding_window, vocabulary


class CachedModel:
    """A model with the key-value cache of one batch: runs tokens at given slots and returns the
    logits there.

    A token does not see slots above its own, so a row is cropped by running its next tokens at
    lower slots. `capacity` is the number of slots of each row. A draft model of another vocabulary
    than the target's gets a `token_map`: tokens and logits are then the target's.

    hidden_states  (batch, capacity, width)  what `record_hidden_states` asked for, of the token in
                   each slot, or None

    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> tokens, slots = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 2]])
    >>> CachedModel(model, capacity=8).run(tokens, slots, keep=2).shape
    torch.Size([1, 2, 4])
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.token_map: TokenMap | None = None
        self.vocab, self.config = vocabulary(model), decoder_config(model)
        self.cache = RaggedCache(self.config.num_hidden_layers, capacity)
        self.cache_argument = cache_argument(model)
        self.window = sliding_window(self.config)
        # With a window, the position of what each slot of each row holds.
        self.places: Tensor | None = None
        self.last_position = (context_limit(model) or capacity) - 1
        self.hidden_layers: tuple[int, ...] = ()
        self.hidden_states: Tensor | None = None

    def record_hidden_states(self, layers: tuple[int, ...], batch: int) -> None:
        """Keeps the hidden states of `layers`, concatenated, for each slot of `batch` rows from now
        on.

        Layers are numbered as in `output_hidden_states` of transformers.
        """
        self.hidden_layers = layers
        width = self.config.hidden_size * len(layers)
        self.hidden_states = torch.zeros(batch, self.capacity, width, dtype=self.model.dtype, device=self.model.device)

    def clear(self) -> None:
        """Empties the cache; its tensors stay where they are in memory."""
        self.cache.clear()
        if self.hidden_states is not None:
            self.hidden_states.zero_()

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
        """Logits `(batch, keep, vocab)` after the last `keep` of `tokens` `(batch, n)`, put at
        `slots` `(batch, n)`.

        For a tree of tokens, `positions` `(batch, n)` are their positions in their sequences, and
        `visible` `(batch, n, capacity)` is true for the slots that each token sees, its own
        included. `rows` `(batch,)` are the cache rows of these tokens, if not all. `seen` is the
        number of slots that are read, if known.
        """
        self.cache.write_at(slots, rows, self.cache.least(slots, visible) if seen is None else seen)
        positions = slots if positions is None else positions
        seen, dtype = self.cache.seen, self.model.dtype
        mask: Any = self.mask(slots) if visible is None else additive_mask(visible[..., :seen], dtype)
        if self.window:
            mask = self.windowed(mask, positions, rows)
        more: dict[str, Any] = {"output_hidden_states": True} if self.hidden_layers else {}
        with grouped(self.config):
            output = self.model(
                input_ids=self.own_tokens(tokens),
                # Draft tokens beyond the model's limit are never emitted; they only need a valid
                # index.
                position_ids=positions.clamp_max(self.last_position),
                attention_mask=mask,
                use_cache=True,
                logits_to_keep=keep,
                **{self.cache_argument: self.cache},
                **more,
            )
        if self.hidden_states is not None:
            own = torch.cat([output.hidden_states[layer] for layer in self.hidden_layers], dim=-1)
            self.hidden_states[self.cache.index] = own
        return self.target_logits(output)

    def in_use(self, tokens: Tensor, highest: Tensor) -> Tensor:
        """`tokens` `(batch, slots)`, cut to the slots that a pass up to `highest` `(batch,)`
        reads."""
        seen = self.cache.least(highest)
        return tokens if seen == self.capacity else tokens[:, :seen]

    def own_tokens(self, tokens: Tensor) -> Tensor:
        """What the model reads for `tokens` of the target."""
        return tokens if self.token_map is None else self.token_map.inputs(tokens)

    def target_logits(self, output: Any) -> Tensor:
        """The logits in the model's `output`, of the target's tokens."""
        logits: Tensor = output.logits
        return logits if self.token_map is None else self.token_map.logits(logits)

    def fill(self, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Runs the first `lengths` - 1 of `tokens` `(batch, longest)`; see `prefill`."""
        longest = int(lengths.max())
        if longest > 1:
            slots = torch.arange(longest - 1, device=tokens.device).expand(len(tokens), -1)
            self.run(tokens[:, : longest - 1], slots, keep=1, rows=rows)

    def mask(self, slots: Tensor) -> Tensor:
        """The additive mask `(batch, 1, n, seen)` of tokens at `slots` `(batch, n)` that form a
        chain."""
        return ragged_mask(slots, self.cache.seen, self.model.dtype)

    def windowed(self, mask: Tensor, positions: Tensor, rows: Tensor | None) -> Tensor | dict[str, Tensor]:
        """`mask` as a model with a `window` in some layers takes it: one mask, or one for each type
        of layer."""
        if self.places is None:
            self.places = torch.arange(self.capacity, device=mask.device).repeat(self.cache.batch or len(mask), 1)
        self.places[self.cache.index] = positions
        behind = (self.places if rows is None else self.places[rows])[:, : self.cache.seen]
        far = positions[..., None] - behind[:, None] >= self.window
        near = mask.masked_fill(far[:, None], torch.finfo(mask.dtype).min)
        several = getattr(self.config, "layer_types", None)
        return {"full_attention": mask, "sliding_attention": near} if several else near

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copies what slots `source` `(batch, n)` hold to slots `destination` `(batch, n)` of the
        same row."""
        self.cache.move(source, destination)
        every = torch.arange(len(source), device=source.device)[:, None]
        for kept in (self.hidden_states, self.places):
            if kept is not None:
                kept[every, destination] = kept[every, source]


def require_hidden_layers(model: PreTrainedModel, layers: tuple[int, ...]) -> None:
    """Raises `ValueError` if one of `layers` is no hidden state of `model`.

    >>> from specnb.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> require_hidden_layers(model, (-1, 0))
    """
    outputs = decoder_config(model).num_hidden_layers + 1
    if not all(-outputs <= layer < outputs for layer in layers):
        raise ValueError(
            f"hidden layers {layers} are asked for, and {type(model).__name__} has the hidden states {-outputs} to "
            f"{outputs - 1}"
        )


def prefill(runner: CachedModel, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
    """One forward pass over the prompts `tokens` `(batch, longest)`, all or those in `rows`,
    without the last token.

    Rows of smaller `lengths` `(batch,)` also evaluate padding. It lies beyond the row's length,
    where it is invisible until it is overwritten.
    """
    if rows is not None:
        runner.cache.batch = len(tokens)
        tokens, lengths = tokens[rows], lengths[rows]
    runner.fill(tokens, lengths, rows)
