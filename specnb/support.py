"""Which models the decoding loop supports, and how long a context they have."""

from __future__ import annotations

import inspect

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specnb.cache import why_not_croppable

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""In which models compute. Weights of other dtypes, such as float8, belong to quantised models."""


def vocabulary(model: PreTrainedModel) -> int:
    """The number of tokens that `model` has, those included that only pad its embedding to a round
    size."""
    return int(model.config.get_text_config().vocab_size)


def head_size(model: PreTrainedModel) -> int:
    """The number of logits of `model` after each token."""
    return int(getattr(model.get_output_embeddings(), "out_features", vocabulary(model)))


def require_whole_head(model: PreTrainedModel) -> None:
    """Raises `ValueError` unless `model` has a logit for each token."""
    if head_size(model) != vocabulary(model):
        raise ValueError(
            f"the output head of {type(model).__name__} gives {head_size(model)} logits, and its vocabulary has "
            f"{vocabulary(model)} tokens; only a draft may have fewer: give ModelDrafter(model, vocab=..., tokens=...) "
            "the target's token of each logit"
        )


def require_same_vocabulary(target: PreTrainedModel, drafter: str, draft_vocab: int) -> None:
    """Raises `ValueError` unless a drafter, named `drafter`, proposes as many tokens as the target
    has."""
    vocab = vocabulary(target)
    if vocab != draft_vocab:
        raise ValueError(
            f"the target has {vocab} tokens and the {drafter} {draft_vocab}; a drafter proposes tokens of the target's "
            f"vocabulary: make it with vocab={vocab}, which ModelDrafter takes, too"
        )


def require_supported(model: PreTrainedModel) -> None:
    """Raises `TypeError`, with the reason, for a model that the loop cannot run exactly."""
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{name} is no model of transformers; give one of from_pretrained, of a Pair its target (pair.target), "
            "and of a PeftModel its merge_and_unload()"
        )
    if model.training or any(map(_drops, model.modules())):
        raise TypeError(
            f"{name} is in training mode, or a part of it, where dropout makes its distributions random; call its "
            "eval() first"
        )
    arguments = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder:
        raise TypeError(f"{name} is an encoder-decoder, and only models without an encoder are decoded; choose another")
    if "position_ids" not in arguments:
        raise TypeError(f"{name} takes no position_ids, which rows of different lengths need")
    if model.get_output_embeddings() is None or "logits_to_keep" not in arguments:
        raise TypeError(f"{name} gives no next-token logits; load it with load_pair or as a ...ForCausalLM")
    embedded = getattr(model.get_input_embeddings(), "num_embeddings", vocabulary(model))
    if embedded != vocabulary(model):
        raise TypeError(
            f"the configuration of {name} has {vocabulary(model)} tokens, and its embedding {embedded}; "
            "change both with its resize_token_embeddings()"
        )
    config = model.config.get_text_config(decoder=True)
    attention = config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise TypeError(f"{name} runs {attention} attention; load it with attn_implementation='sdpa' or 'eager'")
    # The loop keeps what a window leaves behind, and masks it. A chunk has the cache of a window,
    # and another mask.
    chunked = getattr(config, "attention_chunk_size", None) is not None
    plain = (DynamicLayer,) if chunked else (DynamicLayer, DynamicSlidingWindowLayer)
    reason = why_not_croppable(DynamicCache(config=model.config), plain)
    if reason:
        raise TypeError(f"the cache of {name} cannot be cropped: {reason}")


def _drops(part: nn.Module) -> bool:
    """Whether a part of a model sets random values to 0."""
    if not part.training:
        return False
    dropout = {value for name, value in vars(part).items() if "drop" in name and isinstance(value, float)}
    own = part.p if isinstance(part, nn.modules.dropout._DropoutNd) else 0.0
    return max(own, *dropout, 0.0) > 0


def sliding_window(config: PreTrainedConfig) -> int:
    """How many tokens, its own included, a token sees in the layers with a window; 0 if there are
    none."""
    layers = DynamicCache(config=config).layers
    windows = (layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0 for layer in layers)
    return max(windows, default=0)


def context_limit(model: PreTrainedModel) -> int | None:
    """The largest number of tokens that `model` has positions for; None if its configuration states
    no limit.

    >>> import torch
    >>> from specnb.shapes import Shape, empty_model
    >>> context_limit(empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="meta", dtype=torch.float32))
    64
    """
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):  # one for each type of layer
        if part.get("rope_type") == "longrope":
            # Beyond this length the angles of all rows depend on the longest sequence of the batch.
            limits.append(int(part["original_max_position_embeddings"]))
    return min((limit for limit in limits if limit is not None), default=None)
