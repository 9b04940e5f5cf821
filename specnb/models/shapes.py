"""Models of a given shape with random weights: for examples, tests, and times that do not depend on what is learnt."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MistralConfig, PreTrainedConfig, PreTrainedModel


class Shape(NamedTuple):
    """The shape of a decoder-only model.

    A shape that is not `gated` is GPT-NeoX, with biases. A gated one is Llama-like, without biases (transformers'
    Mistral class, which allows any number of heads and any width). `kv_heads` (default: `heads`) and `head_dim`
    (default: width / heads) are for gated shapes only.

    >>> Shape(layers=2, width=64, feed_forward=256, heads=4).gated
    False
    """

    layers: int
    width: int
    feed_forward: int
    heads: int
    gated: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None


def empty_model(shape: Shape, vocab: int, context: int, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of this shape on `device` in `dtype`, with the initial weights of transformers.

    Raises `ValueError` for `kv_heads` or `head_dim` in a shape that is not gated.

    >>> empty_model(Shape(1, 8, 8, 2), vocab=4, context=16, device="meta", dtype=torch.float32).num_parameters()
    544
    """
    if not shape.gated and (shape.kv_heads or shape.head_dim):
        raise ValueError(f"{shape} is not gated, so it is GPT-NeoX, which has no kv_heads or head_dim to choose")
    common: dict[str, Any] = {
        "vocab_size": vocab, "num_hidden_layers": shape.layers, "hidden_size": shape.width,
        "num_attention_heads": shape.heads, "intermediate_size": shape.feed_forward,
        "max_position_embeddings": context, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    config: PreTrainedConfig
    if shape.gated:
        kv_heads = shape.kv_heads or shape.heads
        head_dim = shape.head_dim or shape.width // shape.heads
        config = MistralConfig(**common, num_key_value_heads=kv_heads, head_dim=head_dim, sliding_window=None)
    else:
        config = GPTNeoXConfig(**common)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()  # type: ignore[no-any-return]
