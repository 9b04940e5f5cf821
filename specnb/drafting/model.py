"""A smaller transformers model as the drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.drafting.base import Proposal
from specnb.models.cached_model import CachedModel, prefill
from specnb.models.compilation import Compiled
from specnb.models.support import require_supported
from specnb.sampling.distributions import Sampling, sample, standardise


class ModelDrafter:
    """A smaller model of transformers, sampled one token after the other; with `compile`, in one compiled piece."""

    runner: CachedModel

    def __init__(self, model: PreTrainedModel, sampling: Sampling = Sampling(), *, compile: bool = False) -> None:
        require_supported(model)
        self.model = model
        self.sampling = sampling
        self.vocab = model.config.vocab_size
        self.compile = compile
        self.allocated: tuple[Any, ...] = ()

    def start(self, tokens: Tensor, lengths: Tensor, rows: Tensor | None = None) -> None:
        """Fills the cache with the prompts; see `Drafter.start`."""
        if rows is not None:
            prefill(self.runner, tokens, lengths, rows)
            return
        if self.allocated != self._allocation(*tokens.shape):
            self.allocate(*tokens.shape)
        self.runner.clear()
        prefill(self.runner, tokens, lengths)

    def allocate(self, rows: int, slots: int) -> None:
        """A cache for so many rows and slots, kept while it serves: what is compiled or captured belongs to it."""
        self.allocated = self._allocation(rows, slots)
        self.runner = CachedModel(self.model, slots)
        self.draft_tokens = Compiled(self._sample_tokens) if self.compile else self._sample_tokens

    def _allocation(self, rows: int, slots: int) -> tuple[Any, ...]:
        return rows, slots, self.model.dtype, self.model.device

    def propose(self, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        return Proposal(*self.draft_tokens(tokens, lengths, uniforms))

    def _sample_tokens(self, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        # After a full acceptance the last draft was never run, otherwise it was: running the last two
        # tokens each time serves both cases with one shape.
        slots = torch.stack([lengths - 2, lengths - 1], dim=1).clamp_min(0)
        newest = tokens.gather(1, slots)
        draft_tokens, distributions = [], []
        for uniform in uniforms.unbind(dim=1):
            logits = self.runner.run(newest, slots, keep=1)[:, -1]
            distributions.append(standardise(logits, self.sampling, check=False))
            draft_tokens.append(self.sample(distributions[-1], uniform))
            newest, slots = draft_tokens[-1][:, None], slots[:, -1:] + 1
        return torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1)

    def sample(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """One draft `(batch,)` from its `distribution` `(batch, vocab)`."""
        return sample(probs, uniform)
