"""Models of a given shape with random weights, for examples, tests and times."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedModel


class Shape(NamedTuple):
    layers: int
    width: int
    feed_forward: int
    heads: int


def empty_model(shape: Shape, vocab: int, context: int, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model with the initial weights of transformers.

    >>> empty_model(Shape(1, 8, 8, 2), vocab=4, context=16, device="meta", dtype=torch.float32).num_parameters()
    544
    """
    config = GPTNeoXConfig(
        vocab_size=vocab, num_hidden_layers=shape.layers, hidden_size=shape.width, num_attention_heads=shape.heads,
        intermediate_size=shape.feed_forward, max_position_embeddings=context, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval()  # type: ignore[no-any-return]
