"""What the argument `draft` of `specnb.generate` stands for."""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb.drafting.base import Drafter
from specnb.drafting.model import ModelDrafter
from specnb.drafting.ngram import PromptLookupDrafter
from specnb.models.support import vocabulary

Draft = PreTrainedModel | Drafter | Literal["auto"] | None


def as_drafter(draft: Draft, sampling: Sampling, target: PreTrainedModel, *, compile: bool = False) -> Drafter | None:
    """`draft` itself if it is a drafter or None; for a model, a new `ModelDrafter` that serves one
    batch only.

    "auto" is what needs no model and no training, copies from the text. A `target` that is no model
    is refused later, as it is without a draft.
    """
    vocab = vocabulary(target) if isinstance(target, PreTrainedModel) else None
    if isinstance(draft, str) and draft == "auto":
        return PromptLookupDrafter(vocab) if vocab else None
    if not isinstance(draft, PreTrainedModel):
        return draft
    return ModelDrafter(draft, sampling, vocab=vocab, compile=compile, capturable=True)
