"""Which models the decoding loop supports, and how long a context they have."""

from __future__ import annotations

import inspect

from transformers import DynamicCache, PreTrainedModel

from specnb.models.cache import why_not_croppable


def require_same_vocabulary(target: PreTrainedModel, draft_vocab: int) -> None:
    """Raises `ValueError` unless the draft's vocabulary is as large as the target's."""
    vocab = target.config.vocab_size
    if vocab != draft_vocab:
        raise ValueError(
            f"the target has {vocab} tokens and the draft {draft_vocab}; both need the same "
            "vocabulary, so choose a draft of the target's own family"
        )


def require_supported(model: PreTrainedModel) -> None:
    """Raises `TypeError`, with the reason, for a model that the decoding loop cannot run exactly."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} is no model of transformers; load one with load_pair or from_pretrained")
    if model.training:
        raise TypeError(
            f"{name} is in training mode, where dropout makes its distributions random; call its eval() first"
        )
    if model.config.is_encoder_decoder:
        raise TypeError(f"{name} is an encoder-decoder; the loop runs decoder-only models")
    if "position_ids" not in inspect.signature(model.forward).parameters:
        raise TypeError(f"{name} takes no position_ids, which rows of different lengths need")
    if model.get_output_embeddings() is None or "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise TypeError(f"{name} gives no next-token logits; load it with load_pair or as a ...ForCausalLM")
    embedded = getattr(model.get_input_embeddings(), "num_embeddings", model.config.vocab_size)
    if embedded != model.config.vocab_size:
        raise TypeError(
            f"the configuration of {name} has {model.config.vocab_size} tokens, and its embedding {embedded}; "
            "change both with its resize_token_embeddings()"
        )
    attention = model.config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise TypeError(f"{name} runs {attention} attention; load it with attn_implementation='sdpa' or 'eager'")
    reason = why_not_croppable(DynamicCache(config=model.config))
    if reason:
        raise TypeError(f"the cache of {name} cannot be cropped: {reason}")


def context_limit(model: PreTrainedModel) -> int | None:
    """The largest number of tokens that `model` has positions for; None if its configuration states no limit.

    >>> import torch
    >>> from specnb.models.shapes import Shape, empty_model
    >>> context_limit(empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="meta", dtype=torch.float32))
    64
    """
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        # Beyond this length the angles of all rows depend on the longest sequence of the batch.
        return int(rope["original_max_position_embeddings"])
    return getattr(model.config, "max_position_embeddings", None)
