"""transformers' own `generate`: assisted generation with a draft model, prompt lookup, or plain
sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from audit_studies.engines.adapters import Models
from specnb_audit.cli.settings import Request, Settings

PACKAGE = "transformers"
SUPPORTED = ("none", "draft", "lookup")


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """The tokens that continue the prompt of each request, one request a call: assisted generation
    has no batches."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    dtype = "auto" if settings.dtype == "default" else getattr(torch, settings.dtype)

    def loaded(folder: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False, use_safetensors=True)

    target = loaded(models.target)
    arguments: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "eos_token_id": None, "pad_token_id": 0}
    if settings.temperature > 0:
        arguments |= {"do_sample": True, "temperature": settings.temperature}
        arguments |= {"top_k": settings.top_k, "top_p": settings.top_p}
    else:
        arguments |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if settings.speculation == "draft":
        draft = loaded(models.require_draft())
        draft.generation_config.num_assistant_tokens = settings.gamma
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        # Stopping early would discard sampled tokens.
        draft.generation_config.assistant_confidence_threshold = 0.0
        arguments["assistant_model"] = draft
    elif settings.speculation == "lookup":
        arguments["prompt_lookup_num_tokens"] = settings.gamma
    for request in requests:
        torch.manual_seed(request.seed)
        ids = torch.tensor([request.prompt])
        made = target.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        yield made[0, ids.shape[1] :].tolist()


def default_dtype(target: str) -> str:
    """The name of the dtype under `dtype="auto"`, transformers' default from version 5 on: that of
    the model's file."""
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(target, trust_remote_code=False).dtype).removeprefix("torch.")
