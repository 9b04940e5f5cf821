"""Which models the decoding loop supports, and how the vocabularies of target and draft go together."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specnb.arguments import require_whole

# Dtypes in which models compute; weights of other dtypes, such as float8, belong to quantised models
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def vocabulary(model: PreTrainedModel) -> int:
    """Number of tokens of `model`, those included that only pad its embedding."""
    return int(model.config.get_text_config().vocab_size)


def require_whole_head(model: PreTrainedModel) -> None:
    logits = getattr(model.get_output_embeddings(), "out_features", vocabulary(model))
    if logits != vocabulary(model):
        raise ValueError(f"{type(model).__name__} gives {logits} logits for a vocabulary of {vocabulary(model)} tokens")


def require_same_vocabulary(target: PreTrainedModel, drafter: str, draft_vocab: int | None) -> None:
    vocab = vocabulary(target)
    if vocab != draft_vocab:
        raise ValueError(f"the target has {vocab} tokens and the {drafter} {draft_vocab}: its vocab must be {vocab}")


def require_supported(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} is no model of transformers; of a PeftModel give its merge_and_unload()")
    if model.config.is_encoder_decoder:
        raise TypeError(f"{name} is an encoder-decoder, and only models without an encoder are decoded; choose another")
    if model.training or any(map(_drops, model.modules())):
        raise TypeError(f"{name} is in training mode, or a part of it, and dropout is random; call its eval() first")
    arguments = inspect.signature(model.forward).parameters
    if "position_ids" not in arguments:
        raise TypeError(f"{name} takes no position_ids, which rows of different lengths need")
    if model.get_output_embeddings() is None or "logits_to_keep" not in arguments:
        raise TypeError(f"{name} gives no next-token logits; load it with load_pair or as a ...ForCausalLM")
    config = model.config.get_text_config(decoder=True)
    attention = config._attn_implementation
    if attention not in ("eager", "sdpa"):
        raise TypeError(f"{name} runs {attention} attention; load it with attn_implementation='sdpa' or 'eager'")
    # The loop keeps and masks the tokens outside a window; a chunk has the same cache, and another mask.
    chunked = getattr(config, "attention_chunk_size", None) is not None
    plain = (DynamicLayer,) if chunked else (DynamicLayer, DynamicSlidingWindowLayer)
    reason = why_not_croppable(DynamicCache(config=model.config), plain)
    if reason:
        raise TypeError(f"the cache of {name} cannot be cropped: {reason}")


def why_not_croppable(cache: Any, plain: tuple[type, ...] = (DynamicLayer,)) -> str:
    """The reason why `cache` cannot be cropped; empty if all its layers are `plain`."""
    if not isinstance(cache, DynamicCache):
        return "it is neither a DynamicCache nor a tuple of per-layer tensors"
    for number, layer in enumerate(cache.layers):
        # `is_croppable` is true for subclasses that drop tokens, too (a window, a convolution).
        if type(layer) not in plain:
            return f"its layer {number} is a {type(layer).__name__}, which is not plain full attention"
    return ""


def _drops(part: nn.Module) -> bool:
    if not part.training:
        return False
    rates = [value for name, value in vars(part).items() if "drop" in name and isinstance(value, float)]
    if isinstance(part, nn.modules.dropout._DropoutNd):
        rates.append(part.p)
    return max(rates, default=0.0) > 0


def sliding_window(config: PreTrainedConfig) -> int:
    """Tokens that a token sees in layers with a window, itself included; 0 without such layers."""
    layers = DynamicCache(config=config).layers
    windows = (layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else 0 for layer in layers)
    return max(windows, default=0)


def context_limit(model: PreTrainedModel) -> int | None:
    config = model.config.get_text_config()
    limits = [getattr(config, "max_position_embeddings", None)]
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):  # one for each type of layer
        if part.get("rope_type") == "longrope":
            # Beyond this length the angles of all rows depend on the longest sequence of the batch.
            limits.append(int(part["original_max_position_embeddings"]))
    return min((limit for limit in limits if limit is not None), default=None)


def require_context(lengths: Sequence[int], max_new_tokens: int = 0, **models: PreTrainedModel | None) -> None:
    """Raise `ValueError` if prompts of `lengths`, with their new tokens, go beyond the positions of one of `models`."""
    longest = max(lengths)
    for role, model in models.items():
        limit = None if model is None else context_limit(model)
        if limit is not None and longest + max_new_tokens > limit:
            raise ValueError(
                f"prompt {lengths.index(longest)} of {longest} tokens and {max_new_tokens} new ones need "
                f"{longest + max_new_tokens} positions, and the {role}, {type(model).__name__}, has {limit}; shorten "
                "the prompt or ask for fewer tokens"
            )


class TokenMap:
    """Maps between the `vocab` tokens of a target and those of a draft model with more or fewer.

    Tokens of equal numbers are the same, as in one family with embeddings padded to different sizes.
    The logits become those of the target's tokens, -inf if the model lacks one. For a token that it
    lacks the model reads its token 0, which is no less exact.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=3, n_embd=8, n_layer=1, n_head=2))
    >>> TokenMap(model, vocab=5).logits(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[1., 2., 3., -inf, -inf]])
    """

    def __init__(self, model: PreTrainedModel, vocab: int | None = None) -> None:
        require_whole_head(model)
        self.own = vocabulary(model)
        self.vocab = self.own if vocab is None else vocab
        require_whole(vocab=(self.vocab, 1))

    def inputs(self, tokens: Tensor) -> Tensor:
        return tokens if self.vocab <= self.own else tokens.where(tokens < self.own, 0)

    def logits(self, logits: Tensor) -> Tensor:
        if self.vocab == self.own:
            return logits
        return pad(logits, (0, self.vocab - self.own), value=float("-inf"))  # a negative number cuts off
