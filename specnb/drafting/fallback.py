"""Copy where there is a match, run a model otherwise: the model is not run in steps that copy."""

from __future__ import annotations

from torch import Tensor

from specnb.drafting.base import Context, Drafter, Proposal
from specnb.drafting.chain import ChainDrafter
from specnb.drafting.mixture import require_equal_vocabularies
from specnb.drafting.model import ModelDrafter
from specnb.sampling.tree_verification import TreeOutcome
from specnb.sampling.verification import Outcome


class FallbackDrafter(Drafter):
    """A row whose sequence has a match copies for the whole step; the other rows sample from the model.

    Which of both is decided before anything is sampled, by the sequence alone, so the q of the one that is used is
    exact. When all rows copy, the model's forward passes are saved; it evaluates the tokens that it has missed in its
    next first forward pass. The host reads whether all rows have a match, so on a CUDA device a step waits; the shapes
    differ between steps, so it cannot be compiled or captured.

    Raises `ValueError` for different vocabularies.
    """

    def __init__(self, copy: ChainDrafter, model: ModelDrafter) -> None:
        require_equal_vocabularies(copy, model)
        self.copy, self.model = copy, model
        self.vocab, self.draft_model = model.vocab, model.draft_model
        self.missed = 0  # tokens that the model has not evaluated, at most

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """See `Drafter.start`."""
        if rows is None:
            self.missed = 0
        self.copy.start(context, rows)
        self.model.start(context, rows)

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        copied = self.copy.propose(context, uniforms)
        copies = copied.draft_tokens[:, 0] >= 0
        if bool(copies.all()):
            self.missed += uniforms.shape[1] + 1
            return copied
        self.model.unseen = min(2 + self.missed, context.tokens.shape[1])
        self.missed = 0
        sampled = self.model.propose(context, uniforms)
        return Proposal(
            copied.draft_tokens.where(copies[:, None], sampled.draft_tokens),
            copied.q.to(sampled.q.dtype).where(copies[:, None, None], sampled.q),
        )

    def update(self, context: Context, outcome: Outcome | TreeOutcome) -> None:
        """See `Drafter.update`."""
        self.copy.update(context, outcome)
        self.model.update(context, outcome)
