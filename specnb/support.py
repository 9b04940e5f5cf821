"""Which models the decoding loop supports, and how the vocabularies of target and draft go together."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from specnb.arguments import require_whole, shown

# Dtypes in which models compute; weights of other dtypes, such as float8, belong to quantised models
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def vocabulary(model: PreTrainedModel) -> int:
    """Number of tokens of `model`, those included that only pad its embedding."""
    return int(model.config.get_text_config().vocab_size)


def head_size(model: PreTrainedModel) -> int:
    return int(getattr(model.get_output_embeddings(), "out_features", vocabulary(model)))


def require_whole_head(model: PreTrainedModel) -> None:
    if head_size(model) != vocabulary(model):
        raise ValueError(
            f"the output head of {type(model).__name__} gives {head_size(model)} logits, and its vocabulary has "
            f"{vocabulary(model)} tokens; only a draft may have fewer: give ModelDrafter(model, vocab=..., tokens=...) "
            "the target's token of each logit"
        )


def require_same_vocabulary(target: PreTrainedModel, drafter: str, draft_vocab: int) -> None:
    vocab = vocabulary(target)
    if vocab != draft_vocab:
        raise ValueError(
            f"the target has {vocab} tokens and the {drafter} {draft_vocab}; a drafter proposes tokens of the target's "
            f"vocabulary: make it with vocab={vocab}, which ModelDrafter takes, too"
        )


def require_supported(model: PreTrainedModel) -> None:
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"{name} is no model of transformers; give one of from_pretrained, of a PeftModel its merge_and_unload()"
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


def require_context(model: PreTrainedModel | None, longest: int, max_new_tokens: int) -> None:
    limit = None if model is None else context_limit(model)
    if limit is not None and longest + max_new_tokens > limit:
        raise ValueError(
            f"a prompt of {longest} and {max_new_tokens} new tokens need {longest + max_new_tokens} positions, and "
            f"{type(model).__name__} has {limit}; shorten the prompt or ask for fewer tokens"
        )


class TokenMap:
    """Maps between the `vocab` tokens of a target and those of a draft model.

    The logits become those of the target's tokens, -inf if the model lacks one: q is the model's
    distribution restricted to the target's tokens. A model with as many logits as embeddings reads
    tokens in its own numbering, one with fewer logits in the target's; for a token that it lacks it
    reads its token 0, which is no less exact.

    Parameters
    ----------
    tokens
        The target's token of each logit, each once; -1 for none. None if both number their tokens
        alike, as padded embeddings of one family do.

    Examples
    --------
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=3, n_embd=8, n_layer=1, n_head=2))
    >>> TokenMap(model, vocab=5, tokens=[4, 0, -1]).logits(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[2., -inf, -inf, -inf, 1.]])
    """

    def __init__(self, model: PreTrainedModel, vocab: int | None = None, tokens: Any = None) -> None:
        own = vocabulary(model)
        self.vocab = own if vocab is None else vocab
        require_whole(vocab=(self.vocab, 1))
        if tokens is None:
            require_whole_head(model)
            of_logits = np.where(np.arange(own) < self.vocab, np.arange(own), -1)
        else:
            of_logits = torch.as_tensor(tokens).cpu().numpy()
            known, logits = of_logits[of_logits >= 0].tolist(), head_size(model)
            unique = len(set(known)) == len(known)
            if of_logits.shape != (logits,) or not unique or max(known, default=self.vocab) >= self.vocab:
                raise ValueError(
                    f"tokens is {shown(tokens)}; it must hold for each of {logits} logits a token of the target, 0 to "
                    f"{self.vocab - 1} and each once, or -1 for none; of offsets, as EAGLE-3's d2t has them, give "
                    "torch.arange(len(d2t)) + d2t"
                )
        every, has_token = np.arange(self.vocab), of_logits >= 0
        number = np.full(self.vocab, -1)  # of the logit of each of the target's tokens
        number[of_logits[has_token]] = np.arange(len(of_logits))[has_token]
        own_number = number if len(of_logits) == own else np.where(every < own, every, -1)
        self.same_logits = np.array_equal(of_logits, every)
        self.same_inputs = np.array_equal(own_number, every)
        self.missing = torch.tensor(number < 0, device=model.device)
        self.number, self.own_number = (
            torch.tensor(one.clip(min=0), device=model.device) for one in (number, own_number)
        )

    def inputs(self, tokens: Tensor) -> Tensor:
        return tokens if self.same_inputs else self.own_number[tokens]

    def logits(self, logits: Tensor) -> Tensor:
        if self.same_logits:
            return logits
        return logits.index_select(-1, self.number).masked_fill(self.missing, float("-inf"))
