"""A model together with the key-value cache of one batch."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.models.cache import RaggedCache, additive_mask, ragged_mask
from specnb.models.support import context_limit


class CachedModel:
    """A model with the cache of one batch; `run` evaluates tokens at given slots.

    A token does not see higher slots than its own, so a row is cropped by putting its next tokens at lower slots.
    `capacity` is the number of slots of each row.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> tokens, slots = torch.tensor([[1, 2, 3]]), torch.tensor([[0, 1, 2]])
    >>> CachedModel(model, capacity=8).run(tokens, slots, keep=2).shape
    torch.Size([1, 2, 4])
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.cache = RaggedCache(model.config.num_hidden_layers, capacity)
        self.last_position = (context_limit(model) or capacity) - 1

    def clear(self) -> None:
        """Empties the cache; its tensors stay where they are in memory."""
        self.cache.clear()

    def run(
        self,
        tokens: Tensor,
        slots: Tensor,
        keep: int,
        positions: Tensor | None = None,
        visible: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Logits `(batch, keep, vocab)` after the last `keep` of `tokens` `(batch, n)`, put at `slots` `(batch, n)`.

        For a tree of tokens, `positions` `(batch, n)` are their positions in their sequences, and `visible`
        `(batch, n, capacity)` is true for the slots that each token sees, its own included. `rows` `(batch,)` are the
        cache rows of these tokens, if not all.
        """
        self.cache.write_at(slots, rows)
        if visible is None:
            mask = ragged_mask(slots, self.capacity, self.model.dtype)
        else:
            mask = additive_mask(visible, self.model.dtype)
        output = self.model(
            input_ids=tokens,
            # Draft tokens beyond the model's limit are never emitted; they only need a valid index.
            position_ids=(slots if positions is None else positions).clamp_max(self.last_position),
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits


def prefill(runner: CachedModel, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
    """One forward pass over the prompts `tokens` `(batch, longest)`, all or those in `rows`, without the last token.

    Rows of smaller `lengths` `(batch,)` also evaluate padding. It lies beyond the row's length, where it is invisible
    until it is overwritten.
    """
    if rows is not None:
        tokens, lengths = tokens[rows], lengths[rows]
    longest = int(lengths.max())
    if longest > 1:
        slots = torch.arange(longest - 1, device=tokens.device).expand(len(tokens), -1)
        runner.run(tokens[:, : longest - 1], slots, keep=1, rows=rows)
