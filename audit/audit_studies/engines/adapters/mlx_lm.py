"""mlx-lm: speculative generation with a draft model, or plain generation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from audit_studies.engines.adapters import Models
from specnb_audit.cli.settings import Request, Settings

PACKAGE = "mlx-lm"
SUPPORTED = ("none", "draft")


def _loaded(folder: Path, dtype: str) -> Any:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    if dtype != "default":  # weights stored as bfloat16 would also be computed with in bfloat16
        model.set_dtype(getattr(mx, dtype))
    return model


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """The tokens that continue the prompt of each request, one after the other."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step, speculative_generate_step
    from mlx_lm.sample_utils import make_sampler

    target = _loaded(models.target, settings.dtype)
    draft = _loaded(models.require_draft(), settings.dtype) if settings.speculation == "draft" else None
    sampler = make_sampler(temp=settings.temperature, top_p=settings.top_p, top_k=settings.top_k)
    common = {"max_tokens": settings.max_new_tokens, "sampler": sampler}
    for request in requests:
        mx.random.seed(request.seed)
        prompt = mx.array(request.prompt)
        if draft is None:
            made: Any = generate_step(prompt, target, **common)
        else:
            made = speculative_generate_step(prompt, target, draft, num_draft_tokens=settings.gamma, **common)
        yield [int(step[0]) for step in made]
