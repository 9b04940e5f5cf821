"""The predicted peak against the measured one, and what is said when there is not enough."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from specnb.decoding.generate import generate
from specnb.distributions import Sampling
from specnb.models import memory
from specnb.models import packing as layout
from specnb.models.cached_model import CachedModel
from specnb.models.memory import cache_bytes, measured_peak, predicted
from specnb.models.packing import pack

CPU = torch.device("cpu")
VOCAB = 2048
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def made(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    model.to(dtype)  # type: ignore[arg-type]
    model.eval()
    return model


def llama(layers: int = 4, width: int = 128, kv: int = 2, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=3 * width, num_attention_heads=4,
        num_key_value_heads=kv, max_position_embeddings=512, **SIZES,
    )  # fmt: skip
    return made(LlamaForCausalLM(config), dtype)


def gpt2(layers: int = 4, width: int = 128, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = GPT2Config(n_layer=layers, n_embd=width, n_head=4, n_positions=512, **SIZES)
    return made(GPT2LMHeadModel(config), dtype)


def neox(layers: int = 4, width: int = 128, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = GPTNeoXConfig(num_hidden_layers=layers, hidden_size=width, intermediate_size=4 * width,
                           num_attention_heads=4, max_position_embeddings=512, **SIZES)  # fmt: skip
    return made(GPTNeoXForCausalLM(config), dtype)


@pytest.mark.parametrize("make", [llama, gpt2, neox])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_of_a_token_is_as_large_as_predicted(
    make: Callable[..., PreTrainedModel], dtype: torch.dtype
) -> None:
    model = make(dtype=dtype)
    runner = CachedModel(model, 10)
    with torch.inference_mode():
        runner.run(torch.zeros(3, 2, dtype=torch.int64), torch.arange(2).expand(3, -1), keep=1)
    layers: Any = runner.cache.ragged
    held = sum(tensor.nbytes for layer in layers for tensor in (layer.keys, layer.values))
    assert held == 3 * 10 * cache_bytes(model)


@pytest.mark.parametrize(
    ("prompt", "sampling"),
    [(60, Sampling()), (2, Sampling(0.7, top_k=20)), (60, Sampling(0.7, top_k=20)), (2, Sampling(top_p=0.9))],
    ids=str,
)
@pytest.mark.parametrize("gamma", [0, 1, 9])
@pytest.mark.parametrize("make", [llama, gpt2, neox])
def test_the_peak_is_the_predicted_one(
    make: Callable[..., PreTrainedModel], gamma: int, sampling: Sampling, prompt: int
) -> None:
    torch.manual_seed(0)
    target, draft = make(), make(layers=1, width=64)
    rows, new = 6, 20

    def run() -> None:
        generate(
            target, [[1] * prompt] * rows, draft, gamma=gamma, max_new_tokens=new, sampling=sampling, progress=False
        )

    expected = predicted(target, draft, rows=rows, prompt=prompt, new_tokens=new, gamma=gamma, sampling=sampling)
    ratio = measured_peak(run, CPU) / expected.generation
    assert 0.9 < ratio < 1.02


def test_the_error_for_a_large_batch_names_one_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    target = llama()
    asked: dict[str, Any] = {"prompt": 50, "new_tokens": 20, "gamma": 0}
    monkeypatch.setattr(memory, "available", lambda device: predicted(target, None, rows=7, **asked).generation)
    generate(target, [[1] * 50] * 7, max_new_tokens=20, progress=False)
    with pytest.raises(
        MemoryError, match=r"8 rows need .* GB beside the weights, and cpu has .* GB left: batch_size=7"
    ):
        generate(target, [[1] * 50] * 8, max_new_tokens=20, progress=False)
    made = generate(target, [[1] * 50] * 8, max_new_tokens=20, batch_size=7, progress=False)
    assert len(made.tokens) == 8
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    with pytest.raises(MemoryError, match="not even one row fits; ask for fewer tokens"):
        generate(target, [[1] * 50], max_new_tokens=20, progress=False)


def test_an_out_of_memory_error_names_a_batch_that_fits() -> None:
    target = llama()

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    target.register_forward_pre_hook(out_of_memory)
    with pytest.raises(MemoryError, match="batch_size=3 would fit"):
        generate(target, [[1, 2]] * 4, max_new_tokens=20, progress=False)


@pytest.mark.skipif(not layout.supported(torch.float32), reason="no oneDNN")
def test_packed_weights_are_counted_and_do_not_disturb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of square layers here; which ones are packed is otherwise measured, and some may be and others not."""
    every = (layout.PACKED,) * len(layout.CLASSES)

    def square(weight: torch.Tensor) -> bool:
        return weight.shape[0] == weight.shape[1]

    monkeypatch.setattr(layout, "choices", lambda all_: [every if square(w) else layout.AS_SAVED for w in all_])
    packed = pack(llama())
    plain = predicted(llama(), None, rows=1, prompt=9, new_tokens=9)
    both = predicted(packed, None, rows=1, prompt=9, new_tokens=9)
    weights = [layer.weight for layer in packed.modules() if isinstance(layer, torch.nn.Linear)]
    assert both.weights - plain.weights == sum(weight.nbytes for weight in weights if square(weight)) > 0
    peak = measured_peak(lambda: generate(packed, [[1] * 9], max_new_tokens=9, progress=False), CPU)
    assert 0.7 < peak / both.generation < 1.02


def test_weights_are_counted_once() -> None:
    target = llama()
    counted = predicted(target, target, rows=1, prompt=2, new_tokens=1).weights
    assert counted == sum(weight.nbytes for weight in target.parameters()) + sum(b.nbytes for b in target.buffers())


def test_there_is_memory() -> None:
    assert 2**20 < memory.available(CPU) < 2**50
