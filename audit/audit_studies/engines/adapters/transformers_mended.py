"""transformers with two generators of draft tokens mended: q is that of the draft tokens.

The released one for Gemma 4's assistant drafts the most probable tokens and returns the logits of
the whole vocabulary, so tokens that are certain are verified as if they had been sampled. This one
returns logits that are zero at each draft token and minus infinity elsewhere.

The released one for another tokenizer keeps the rows of the output matrix of common tokens in the
order in which the tokenizer lists its vocabulary, and takes their logits to be in the order of
token ids. This one lists the vocabulary in the order of token ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from audit_studies.engines.adapters import Models, transformers
from specnb_audit.cli.settings import Request, Settings

PACKAGE = transformers.PACKAGE
SUPPORTED = ("assistant", "other-tokenizer")


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """As `transformers.generate`, with the mends in place."""
    from transformers.generation import candidate_generator

    assistant: Any = candidate_generator.SinglePositionMultiTokenCandidateGenerator
    translator: Any = candidate_generator.AssistantToTargetTranslator
    candidates, common = assistant.get_candidates, translator._get_assistant_to_target_input_ids

    def certain_candidates(self: Any, input_ids: Any, **more: Any) -> Any:
        ids, logits = candidates(self, input_ids, **more)
        return ids, logits if logits is None else certain(logits, ids[:, input_ids.shape[1] :])

    def ordered(self: Any) -> Any:
        targets, assistants = common(self)
        return targets, dict(sorted(assistants.items(), key=lambda pair: pair[1]))

    assistant.get_candidates, translator._get_assistant_to_target_input_ids = certain_candidates, ordered
    yield from transformers.generate(models, requests, settings)


def certain(logits: Any, draft_tokens: Any) -> Any:
    """Logits `(1, gamma, vocab)` under which the draft tokens `(1, gamma)` have probability 1."""
    return logits.new_full(logits.shape, float("-inf")).scatter(-1, draft_tokens[..., None], 0.0)
