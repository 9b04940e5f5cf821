"""The predicted peak against the measured one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from specnb.decoding.generate import generate
from studies.batching.memory import measured_peak, predicted_peak

SIZES: dict[str, Any] = {"vocab_size": 2048, "num_attention_heads": 4, "max_position_embeddings": 512}


def llama(layers: int = 4, width: int = 128) -> Any:
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, num_key_value_heads=2, **SIZES
    )
    return LlamaForCausalLM(config).eval()


def neox(layers: int = 4, width: int = 128) -> Any:
    config = GPTNeoXConfig(num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width, **SIZES)
    return GPTNeoXForCausalLM(config).eval()


@pytest.mark.parametrize("prompt", [2, 60])
@pytest.mark.parametrize("gamma", [0, 1, 9])
@pytest.mark.parametrize("make", [llama, neox])
def test_the_peak_is_the_predicted_one(make: Callable[..., Any], gamma: int, prompt: int) -> None:
    torch.manual_seed(0)
    target, draft = make(), make(layers=1, width=64)
    asked: dict[str, Any] = {"gamma": gamma, "max_new_tokens": 20, "progress": False}
    measured = measured_peak(lambda: generate(target, [[1] * prompt] * 6, draft, **asked), torch.device("cpu"))
    expected = predicted_peak(target, draft, rows=6, prompt=prompt, new_tokens=20, gamma=gamma)
    assert 0.9 < measured / expected < 1.02
