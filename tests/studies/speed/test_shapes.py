"""What a shape holds and reads is what its authors published, and what a model that is made of it has."""

from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from specnb.models.shapes import Shape, empty_model
from studies.speed.shapes import DRAFT, HUNDREDTH, PUBLISHED, TARGET, size, size_of, whole

GATED = Shape(2, 32, 48, 4, gated=True, kv_heads=2, head_dim=16)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_weights(name: str) -> None:
    shape, vocab, held, _ = PUBLISHED[name]
    assert size(whole(shape) if name.startswith("t5") else shape, vocab).held == pytest.approx(held, rel=0.04)


def test_llamas_have_exactly_the_published_numbers() -> None:
    held = {name: size(PUBLISHED[name].shape, PUBLISHED[name].vocab).held for name in HUNDREDTH}
    assert held == {"llama-3.1-8b": 8_030_261_248, "llama-2-13b": 13_015_864_320}


def test_the_default_shapes_are_the_papers() -> None:
    assert Shape(layers=12, width=768, feed_forward=3072, heads=12) == TARGET
    assert Shape(layers=2, width=256, feed_forward=1024, heads=4) == DRAFT


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("t5-small", {"d_model": 512, "d_ff": 1024, "num_layers": 8, "num_heads": 6}),
        ("t5-base", {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12}),
        ("t5-large", {"d_model": 1024, "d_ff": 2816, "num_layers": 24, "num_heads": 16}),
        ("t5-xxl", {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64}),
    ],
)
def test_a_step_of_t5_reads_its_decoder_and_half_of_cross_attention(name: str, config: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(
            T5Config(**config, d_kv=64, vocab_size=32128, feed_forward_proj="gated-gelu")
        )
    head = model.lm_head.weight.numel()
    unread = ("embed_tokens", "EncDecAttention.k", "EncDecAttention.v")
    step = head + sum(
        weights.numel()
        for name, weights in model.decoder.named_parameters()
        if not any(part in name for part in unread)
    )
    everything = {id(weights): weights.numel() for weights in model.parameters()}
    everything.pop(id(model.lm_head.weight), None)
    everything.pop(id(model.shared.weight), None)
    shape = PUBLISHED[name].shape
    assert size(shape, 32128).read == pytest.approx(step, rel=1e-3)
    assert size(whole(shape), 32128).held == pytest.approx(sum(everything.values()) + 2 * head, rel=1e-3)


@pytest.mark.parametrize("name", HUNDREDTH)
def test_a_hundredth_reads_a_hundredth(name: str) -> None:
    target, vocab = PUBLISHED[name].shape, PUBLISHED[name].vocab
    assert size(target, vocab).read / size(HUNDREDTH[name], vocab).read == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("shape", [GATED, Shape(2, 32, 48, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_counted_is_what_is_made(shape: Shape, dtype: torch.dtype) -> None:
    model = empty_model(shape, 64, 16, "cpu", dtype)
    counted = size(shape, 64)
    assert counted == size_of(model)
    assert {weights.dtype for weights in model.parameters()} == {dtype}
    assert counted.bytes_held(dtype) == sum(weights.nbytes for weights in model.parameters())
    assert counted.bytes_held(dtype) - counted.bytes_read(dtype) == model.get_input_embeddings().weight.nbytes


def test_a_tied_head_is_read_whole() -> None:
    model = empty_model(GATED, 64, 16, "cpu", torch.float32)
    apart = size_of(model)
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    tied = size_of(model)
    assert tied.held == apart.held - 64 * 32
    assert tied.read == apart.read


def test_nothing_is_allocated_to_count() -> None:
    assert empty_model(PUBLISHED["lamda-137b"].shape, 32000, 1024, "meta", torch.float32).device.type == "meta"


def test_key_value_heads_need_a_gated_shape() -> None:
    with pytest.raises(ValueError, match="is not gated"):
        empty_model(Shape(1, 32, 32, 4, kv_heads=2), 64, 16, "meta", torch.float32)
