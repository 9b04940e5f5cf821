"""A smaller transformers model as the drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.drafting.base import Context, Drafter, Proposal
from specnb.drafting.chain import ChainDrafter
from specnb.models.cached_model import CachedModel, prefill
from specnb.models.compilation import Compiled
from specnb.models.support import require_supported
from specnb.sampling.distributions import Sampling, require_sampling, sample, standardise


class ModelDrafter(ChainDrafter):
    """A chain of tokens sampled one after the other from `model`, as `sampling` says.

    `compile` compiles the forward passes and the sampling of a step as one function. `capturable` says that the
    drafter serves one batch only, so that a CUDA graph may hold its operations. Raises `TypeError` for a model
    that the loop cannot run, and for a `sampling` that is no `Sampling`.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> drafter = ModelDrafter(model, Sampling(temperature=0))
    >>> context = Context(tokens=torch.tensor([[1, 2, 0, 0, 0, 0]]), lengths=torch.tensor([2]))
    >>> drafter.start(context)
    >>> drafter.propose(context, torch.rand(1, 3, dtype=torch.float64)).q.shape
    torch.Size([1, 3, 4])
    """

    runner: CachedModel
    runner_class: type[CachedModel] = CachedModel

    def __init__(
        self,
        model: PreTrainedModel,
        sampling: Sampling = Sampling(),
        *,
        compile: bool = False,
        capturable: bool = False,
    ) -> None:
        require_supported(model)
        require_sampling(sampling)
        self.model = self.draft_model = model
        self.sampling = sampling
        self.vocab = model.config.vocab_size
        self.compile, self.capturable = compile, capturable
        self.allocated: tuple[Any, ...] = ()
        # After full acceptance the last draft token is not in the cache yet; otherwise it is. A forward pass over the
        # last two tokens serves both cases with one shape. A drafter that skips steps of this one sets more.
        self.unseen = 2

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """Fills the cache with the prompts; see `Drafter.start`."""
        tokens, lengths = context.tokens, context.lengths
        if rows is None:
            if self.allocated != self._allocation(*tokens.shape):
                self.allocate(*tokens.shape)
            self.runner.clear()
        prefill(self.runner, tokens, lengths, rows)

    def allocate(self, rows: int, slots: int) -> None:
        """Makes a cache of so many rows and slots. It is kept for later batches of that size, since compiled and
        captured functions belong to it."""
        self.allocated = self._allocation(rows, slots)
        self.runner = self.runner_class(self.model, slots)
        self.draft_tokens = Compiled(self._sample_tokens) if self.compile else self._sample_tokens

    def _allocation(self, rows: int, slots: int) -> tuple[Any, ...]:
        return rows, slots, self.model.dtype, self.model.device

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        return Proposal(*self.draft_tokens(context.tokens, context.lengths, uniforms))

    def _sample_tokens(self, tokens: Tensor, lengths: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
        newest, slots = self._newest(tokens, lengths, self.unseen)
        draft_tokens, distributions = [], []
        for uniform in uniforms.unbind(dim=1):
            distributions.append(self._after(newest, slots))
            draft_tokens.append(self.sample(distributions[-1], uniform))
            newest, slots = draft_tokens[-1][:, None], slots[:, -1:] + 1
        return torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1)

    def distribution(self, context: Context, position: int) -> Tensor:
        """See `ChainDrafter.distribution`: for mixtures and stopping rules, which sample from it themselves."""
        return self._after(*self._newest(context.tokens, context.lengths, 1 if position else self.unseen))

    def _newest(self, tokens: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` newest tokens of each row and their slots, both `(rows, count)`; slot 0 again in short rows."""
        back = torch.arange(count, 0, -1, device=lengths.device)
        slots = (lengths[:, None] - back).clamp_min(0)
        return tokens.gather(1, slots), slots

    def _after(self, newest: Tensor, slots: Tensor) -> Tensor:
        logits = self.runner.run(newest, slots, keep=1)[:, -1]
        return standardise(logits, self.sampling, check=False)

    def sample(self, probs: Tensor, uniform: Tensor) -> Tensor:
        """One token `(rows,)` from each of `probs` `(rows, vocab)`."""
        return sample(probs, uniform)


def as_drafter(draft: PreTrainedModel | Drafter | None, sampling: Sampling, *, compile: bool = False) -> Drafter | None:
    """`draft` itself if it is a drafter or None; for a model, a new `ModelDrafter` that serves one batch only."""
    if isinstance(draft, PreTrainedModel):
        return ModelDrafter(draft, sampling, compile=compile, capturable=True)
    return draft
