"""What the argument `draft` of `specnb.generate` stands for."""

from __future__ import annotations

from typing import Literal

from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb.drafting.base import Drafter
from specnb.drafting.fallback import FallbackDrafter
from specnb.drafting.heads import AttentionDrafter, shipped_head
from specnb.drafting.model import ModelDrafter
from specnb.drafting.ngram import PromptLookupDrafter
from specnb.models.support import vocabulary

AGREEING = 2  # tokens that agree before a copy is preferred to the head's tokens
COPIED, OF_HEAD = 10, 2  # the most tokens that are copied, and those of the head
COMPILED_COPIED, COMPILED_OF_HEAD = 6, 1  # the same where verifying a token costs more of a step

Draft = PreTrainedModel | Drafter | Literal["auto", "head"] | None


def as_drafter(draft: Draft, sampling: Sampling, target: PreTrainedModel, *, compile: bool = False) -> Drafter | None:
    """`draft` itself if it is a drafter or None; for a model, a new `ModelDrafter` that serves one
    batch only.

    "auto" is what needs no model and no training, copies from the text. "head" copies, too, and
    drafts with the head that ships for the target where there is nothing to copy. A `target` that
    is no model is refused later, as it is without a draft. Raises `ValueError` where no head ships.
    """
    vocab = vocabulary(target) if isinstance(target, PreTrainedModel) else None
    if isinstance(draft, str) and draft == "auto":
        return PromptLookupDrafter(vocab) if vocab else None
    if isinstance(draft, str) and draft == "head":
        return copies_or_head(target, sampling, compile=compile) if vocab else None
    if not isinstance(draft, PreTrainedModel):
        return draft
    return ModelDrafter(draft, sampling, vocab=vocab, compile=compile, capturable=True)


def copies_or_head(target: PreTrainedModel, sampling: Sampling, *, compile: bool = False) -> FallbackDrafter:
    """Copies from the text, or a token or two of the head that ships for `target`; raises what
    `shipped_head` does."""
    copied, most = (COMPILED_COPIED, COMPILED_OF_HEAD) if compile else (COPIED, OF_HEAD)
    head = AttentionDrafter(target, shipped_head(target), sampling, compile=compile, most=most)
    return FallbackDrafter(PromptLookupDrafter(vocabulary(target), shortest=AGREEING), head, copied)
