"""A model together with the key-value cache of one batch."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.models.cache import RaggedCache, additive_mask, ragged_mask
from specnb.models.support import context_limit


class CachedModel:
    """A model with the cache of one batch: runs tokens at given slots and returns the logits there.

    What lies at higher slots than a token is invisible to it, so a row is cropped by running its next
    tokens at lower slots. `capacity` is the number of slots of each row.
    """

    def __init__(self, model: PreTrainedModel, capacity: int) -> None:
        self.model = model
        self.capacity = capacity
        self.cache = RaggedCache(model.config.num_hidden_layers, capacity)
        self.last_position = (context_limit(model) or capacity) - 1

    def clear(self) -> None:
        """Forgets the texts that were run; the cache's tensors stay where they are."""
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
        """Logits `(batch, keep, vocab)` of the last `keep` of `tokens` `(batch, n)` put at `slots` `(batch, n)`.

        Where tokens do not stand in a line (a tree), `positions` `(batch, n)` says where each is in its text,
        and `visible` `(batch, n, capacity)` which slots it sees, its own among them. `rows` `(batch,)` are the rows
        of the cache that these tokens belong to, if they are not all of it.
        """
        self.cache.write_at(slots, rows)
        if visible is None:
            mask = ragged_mask(slots, self.capacity, self.model.dtype)
        else:
            mask = additive_mask(visible, self.model.dtype)
        output = self.model(
            input_ids=tokens,
            # Drafts beyond the model's limit are cut off before they are emitted; they only need a valid index.
            position_ids=(slots if positions is None else positions).clamp_max(self.last_position),
            attention_mask=mask,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        return output.logits


def prefill(runner: CachedModel, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
    """Runs the prompts, all or those in `rows`, through a model, but for the last token of the longest.

    Shorter rows run some tokens that are not theirs; those lie behind the row's length, invisible
    until they are overwritten.
    """
    if rows is not None:
        tokens, lengths = tokens[rows], lengths[rows]
    longest = int(lengths.max())
    if longest > 1:
        slots = torch.arange(longest - 1, device=tokens.device).expand(len(tokens), -1)
        runner.run(tokens[:, : longest - 1], slots, keep=1, rows=rows)
