"""transformers' own `generate`, with each of the ways in which it drafts.

draft            a draft model that always drafts `gamma` tokens
stopping         a draft model as `generate` uses it by default: up to 20 tokens, fewer where it
is unsure
other-tokenizer  a draft model with a tokenizer of its own: tokens are translated where they are
sampled, text where decoding is greedy
lookup           n-grams of the prompt and the completion
early-exit       the target's own first layers
assistant        Gemma 4's assistant
mtp              next-token layers in the target's checkpoint (`use_mtp`)
dflash           a drafter of blocks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from audit_studies.engines.adapters import Models, batches
from specnb_audit.cli.settings import Request, Settings

PACKAGE = "transformers"
MODELS_OF_THEIR_OWN = ("draft", "stopping", "other-tokenizer", "assistant", "dflash")
SUPPORTED = ("none", "lookup", "early-exit", "mtp", *MODELS_OF_THEIR_OWN)
TOGETHER = 16  # completions without speculation in a batch, where all prompts have one length


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """The tokens that continue the prompt of each request, one request a call where it speculates:
    assisted generation has no batches."""
    import torch
    from transformers import AutoModel, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns of next-token layers, which it does not load with the target
    dtype = "auto" if settings.dtype == "default" else getattr(torch, settings.dtype)

    def loaded(folder: Any, kind: Any = AutoModelForCausalLM) -> Any:
        return kind.from_pretrained(folder, dtype=dtype, trust_remote_code=False, use_safetensors=True)

    target = loaded(models.target)
    arguments: dict[str, Any] = {"max_new_tokens": settings.max_new_tokens, "eos_token_id": None, "pad_token_id": 0}
    if settings.temperature > 0:
        arguments |= {"do_sample": True, "temperature": settings.temperature}
        arguments |= {"top_k": settings.top_k, "top_p": settings.top_p}
    else:
        arguments |= {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if settings.speculation in MODELS_OF_THEIR_OWN:
        kind = AutoModel if settings.speculation == "dflash" else AutoModelForCausalLM
        arguments["assistant_model"] = loaded(models.require_draft(), kind)
    if settings.speculation in ("draft", "other-tokenizer", "assistant"):
        _always_draft(arguments["assistant_model"], settings.gamma)
    if settings.speculation == "other-tokenizer":
        arguments |= _tokenizers(models)
    elif settings.speculation == "lookup":
        arguments["prompt_lookup_num_tokens"] = settings.gamma
    elif settings.speculation == "early-exit":
        _always_draft(target, settings.gamma)
        arguments["assistant_early_exit"] = target.config.num_hidden_layers // 2
    elif settings.speculation == "dflash":
        arguments["speculation_type"] = "dflash"
    elif settings.speculation == "mtp":
        arguments["use_mtp"] = True
        # The class knows the next-token layers of checkpoints of published sizes by their numbers.
        layers = target.config.num_hidden_layers
        target._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers + n}\." for n in range(8)]
        _load_once()
    for some in batches(requests, together(requests, settings)):
        torch.manual_seed(some[0].seed)
        ids = torch.tensor([request.prompt for request in some])
        made = target.generate(ids, attention_mask=torch.ones_like(ids), **arguments)
        yield from made[:, ids.shape[1] :].tolist()


def together(requests: Sequence[Request], settings: Settings) -> int:
    """How many completions are generated together."""
    one_length = len({len(request.prompt) for request in requests}) == 1
    return TOGETHER if settings.speculation == "none" and one_length else 1


def _always_draft(model: Any, gamma: int) -> None:
    """Sets `gamma` draft tokens in every step, however sure the model is."""
    model.generation_config.num_assistant_tokens = gamma
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0


def _load_once() -> None:
    """Keeps the next-token layers, which `generate` loads anew in each call."""
    from transformers import modeling_layers

    mtp: Any = modeling_layers.MtpModel
    load, found = mtp.from_pretrained, dict[int, Any]()

    def kept(main_model: Any, **more: Any) -> Any:
        if id(main_model) not in found:
            found[id(main_model)] = load(main_model, **more)
        return found[id(main_model)]

    mtp.from_pretrained = kept


def _tokenizers(models: Models) -> dict[str, Any]:
    from transformers import AutoTokenizer

    return {
        "tokenizer": AutoTokenizer.from_pretrained(models.target, trust_remote_code=False),
        "assistant_tokenizer": AutoTokenizer.from_pretrained(models.require_draft(), trust_remote_code=False),
    }


def default_dtype(target: str) -> str:
    """The name of the dtype under `dtype="auto"`, transformers' default from version 5 on: that of
    the model's file."""
    from transformers import AutoConfig

    return str(AutoConfig.from_pretrained(target, trust_remote_code=False).dtype).removeprefix("torch.")
