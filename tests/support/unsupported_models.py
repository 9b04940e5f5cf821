"""Models that the loop refuses, and one that must not be run."""

from __future__ import annotations

from typing import Any

from implementation_distribution import VOCAB
from tiny import LIMIT
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": LIMIT,
}


def encoder_decoder() -> PreTrainedModel:
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))


def without_positions() -> PreTrainedModel:
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=8, n_layer=1, n_head=2))


def convolving() -> PreTrainedModel:
    return Lfm2ForCausalLM(Lfm2Config(**SIZES, layer_types=["conv"]))


def refusing(model: Any) -> Any:
    """A model that fails when it is run."""

    def fail(*_: Any) -> None:
        raise AssertionError("a model ran before its input was checked")

    model.register_forward_pre_hook(fail)
    return model.eval()
