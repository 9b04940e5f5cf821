"""transformers with the assistant of Gemma 4 mended: q is that of its draft tokens.

The released generator drafts the most probable tokens and returns the logits of the whole
vocabulary, so tokens that are certain are verified as if they had been sampled. This one returns
logits that are zero at each draft token and minus infinity elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from audit_studies.engines.adapters import Models, transformers
from specnb_audit.cli.settings import Request, Settings

PACKAGE = transformers.PACKAGE
SUPPORTED = ("assistant",)


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """As `transformers.generate`, with the mend in place."""
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator as Generator

    released = Generator.get_candidates

    def mended(self: Any, input_ids: Any, **more: Any) -> Any:
        ids, logits = released(self, input_ids, **more)
        return ids, logits if logits is None else certain(logits, ids[:, input_ids.shape[1] :])

    Generator.get_candidates = mended
    yield from transformers.generate(models, requests, settings)


def certain(logits: Any, draft_tokens: Any) -> Any:
    """Logits `(1, gamma, vocab)` under which the draft tokens `(1, gamma)` have probability 1."""
    return logits.new_full(logits.shape, float("-inf")).scatter(-1, draft_tokens[..., None], 0.0)
