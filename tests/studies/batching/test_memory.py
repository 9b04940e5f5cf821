"""The predicted peak against the measured one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from specnb.decoding.generate import generate
from specnb.models.cache import cache_bytes
from specnb.models.cached_model import CachedModel
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


@pytest.mark.parametrize("make", [llama, neox])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_of_a_token_is_as_large_as_predicted(make: Callable[..., Any], dtype: torch.dtype) -> None:
    model = make().to(dtype)
    runner = CachedModel(model, 10)
    with torch.inference_mode():
        runner.run(torch.zeros(3, 2, dtype=torch.int64), torch.arange(2).expand(3, -1), keep=1)
    layers: Any = runner.cache.ragged
    held = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    assert held == 3 * 10 * cache_bytes(model)


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
