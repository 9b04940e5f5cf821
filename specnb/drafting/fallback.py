"""Copy where there is a match, run a model or a head otherwise."""

from __future__ import annotations

from torch import Tensor

from specnb.drafting.base import Context, Drafter, Proposal, padded
from specnb.drafting.heads import HeadDrafter
from specnb.drafting.model import ModelDrafter
from specnb.rules import Outcome


class FallbackDrafter(Drafter):
    """A row whose sequence has a match copies for the whole step; the other rows sample from the
    model.

    Which of both is decided before anything is sampled, by the sequence alone, so the q of the one
    that is used is exact. When all rows copy, the model's forward passes are saved; its next one
    also evaluates what its cache lacks. A head, which reads the target's hidden states, is run in
    every step. `copy` has no model. The host reads whether all rows have a match, so on a CUDA
    device a step waits and cannot be captured; with a model, whose shapes differ between steps, it
    cannot be compiled.

    `copied` is what `gamma="auto"` stands for: the most tokens that are copied.
    """

    def __init__(self, copy: Drafter, model: ModelDrafter | HeadDrafter, copied: int | None = None) -> None:
        self.copy, self.model, self.usual = copy, model, copied
        self.vocab, self.draft_model, self.hidden_layers = model.vocab, model.draft_model, model.hidden_layers
        self.can_refill, self.every_step = copy.can_refill, copy.every_step

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.copy.start(context, rows)
        self.model.start(context, rows)

    def fewest(self, gamma: int) -> int:
        return self.model.fewest(gamma)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        copied = self.copy.propose(context, uniforms)
        copies = padded(*copied, uniforms.shape[1]).draft_tokens[:, 0] >= 0
        if bool(copies.all()) and not self.hidden_layers:
            return copied
        sampled = self.model.propose(context._replace(waits=True), uniforms)
        width = max(copied.draft_tokens.shape[1], sampled.draft_tokens.shape[1])
        copied, sampled = padded(*copied, width), padded(*sampled, width)
        return Proposal(
            copied.draft_tokens.where(copies[:, None], sampled.draft_tokens),
            copied.q.to(sampled.q.dtype).where(copies[:, None, None], sampled.q),
        )

    def update(self, context: Context, outcome: Outcome) -> None:
        self.copy.update(context, outcome)
        self.model.update(context, outcome)
