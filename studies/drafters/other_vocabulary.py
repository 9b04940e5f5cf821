"""A draft model with a vocabulary of its own: token-level intersection (Timor et al. 2025, Algorithm 4).

The draft model samples only tokens that both vocabularies have, written alike, and its distribution is renormalised
over them. That is the q of the tokens as the target numbers them, so every rule stays exact. Tokens of the target
that the draft does not know are never proposed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specnb.distributions import Sampling, standardise
from specnb.drafting.base import ChainDrafter, Context
from specnb.models.cached_model import CachedModel
from specnb.models.support import context_limit, require_supported

SLOTS_PER_TOKEN = 4
"""Slots of the draft's cache for each slot of the target's; a row gets draft tokens only as far as they fit."""


class OtherVocabularyDrafter(ChainDrafter):
    """A chain of tokens of `model`, whose tokens are those of `own`, for a target whose tokens are those of `target`.

    `vocab` is the size of the target's vocabulary. At the start of a step the host decodes each row and encodes it with
    `own`, which takes longer the longer the row is; a forward pass evaluates the tokens from the first change on.
    Raises `TypeError` for a model that the loop cannot run, `ValueError` for vocabularies without a common token.
    """

    runner: CachedModel
    slots: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        own: PreTrainedTokenizerBase,
        target: PreTrainedTokenizerBase,
        vocab: int,
        sampling: Sampling = Sampling(),
    ) -> None:
        require_supported(model)
        self.model = self.draft_model = model
        self.own, self.target, self.vocab, self.sampling = own, target, vocab, sampling
        ours, theirs = shared_tokens(own, target)
        inside = (ours < model.config.vocab_size) & (theirs < vocab)
        self.ours, self.theirs = ours[inside].to(model.device), theirs[inside].to(model.device)
        if not len(self.ours):
            raise ValueError("the two vocabularies have no token in common; choose a draft that has some")
        self.to_own = torch.full((vocab,), -1, device=model.device).index_put((self.theirs,), self.ours)
        self.hidden = torch.full((model.config.vocab_size,), -torch.inf, device=model.device)
        self.hidden[self.ours] = 0.0

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        if rows is None:
            slots = min(context_limit(self.model) or 2**31, SLOTS_PER_TOKEN * context.tokens.shape[1])
            self.runner = CachedModel(self.model, slots)
            self.seen: list[list[int]] = [[] for _ in context.tokens]
        else:
            for row in rows.tolist():
                self.seen[row] = []

    def distribution(self, context: Context, position: int) -> Tensor:
        if position:
            newest = self.to_own[context.newest[:, None]]
            slots = self.slots[:, -1:] + 1
        else:
            newest, slots = self._encoded(context.tokens, context.lengths)
        self.fits &= slots[:, -1] < self.runner.capacity
        self.slots = slots.clamp_max(self.runner.capacity - 1)
        logits = self.runner.run(newest.clamp_min(0), self.slots, keep=1)[:, -1] + self.hidden
        own = standardise(logits, self.sampling, check=False)
        q = own.new_zeros(len(own), self.vocab).index_copy(1, self.theirs, own[:, self.ours])
        return q.where(self.fits[:, None], 0.0)

    def _encoded(self, tokens: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """What the cache lacks of each row, in the draft's tokens, and the slots of it, both `(rows, longest)`."""
        words = [self._in_own(row[:length]) for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]
        fits = [0 < len(row) <= self.runner.capacity for row in words]
        self.fits = torch.tensor(fits, device=tokens.device)
        words = [row if fit else [0] for row, fit in zip(words, fits, strict=True)]
        unseen = [len(row) - min(_common(row, old), len(row) - 1) for row, old in zip(words, self.seen, strict=True)]
        self.seen = words
        count = torch.arange(max(unseen), 0, -1)
        slots = (torch.tensor([len(row) for row in words])[:, None] - count).clamp_min(0)
        newest = torch.tensor([[row[slot] for slot in at] for row, at in zip(words, slots.tolist(), strict=True)])
        return newest.to(tokens.device), slots.to(tokens.device)

    def _in_own(self, row: list[int]) -> list[int]:
        text = str(self.target.decode(row, clean_up_tokenization_spaces=False))
        return list(self.own.encode(text, add_special_tokens=False))


def shared_tokens(own: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
    """The numbers of the tokens that both tokenizers write alike, in `own` and in `target`, each `(tokens,)`."""
    ours, theirs = own.get_vocab(), target.get_vocab()
    both = sorted(ours.keys() & theirs.keys())
    return torch.tensor([ours[token] for token in both]), torch.tensor([theirs[token] for token in both])


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common beginning."""
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))
