"""A published shape has the published number of weights."""

import pytest
import torch

from specnb.models.shapes import Shape, empty_model
from studies.speed.shapes import HUNDREDTH, PUBLISHED, size, size_of


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_weights(name: str) -> None:
    shape, vocab, held, _ = PUBLISHED[name]
    if not name.startswith("t5"):
        assert size(shape, vocab).held == pytest.approx(held, rel=0.04)


@pytest.mark.parametrize("name", HUNDREDTH)
def test_a_hundredth_reads_a_hundredth(name: str) -> None:
    target, vocab = PUBLISHED[name].shape, PUBLISHED[name].vocab
    assert size(target, vocab).read / size(HUNDREDTH[name], vocab).read == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize("shape", [Shape(2, 32, 48, 4, gated=True, kv_heads=2, head_dim=16), Shape(2, 32, 48, 4)])
def test_what_is_counted_is_what_is_made(shape: Shape) -> None:
    model = empty_model(shape, 64, 16, "cpu", torch.bfloat16)
    apart = size_of(model)
    assert size(shape, 64) == apart
    assert {weights.dtype for weights in model.parameters()} == {torch.bfloat16}
    assert apart.held - apart.read == 64 * 32  # the input embedding, which is read one row per token
    model.get_output_embeddings().weight = model.get_input_embeddings().weight
    tied = size_of(model)
    assert (tied.held, tied.read) == (apart.held - 64 * 32, apart.read)


def test_key_value_heads_need_a_gated_shape() -> None:
    with pytest.raises(ValueError, match="is not gated"):
        empty_model(Shape(1, 32, 32, 4, kv_heads=2), 64, 16, "meta", torch.float32)
