"""A published shape has the published number of weights, and its draft model reads a hundredth."""

import pytest
import torch

from specnb.models.shapes import Shape, empty_model
from studies.speed.shapes import HUNDREDTH, PUBLISHED


def weights(shape: Shape, vocab: int) -> int:
    return sum(own.numel() for own in empty_model(shape, vocab, 1024, "meta", torch.float32).parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_numbers_of_weights(name: str) -> None:
    shape, vocab, stated = PUBLISHED[name]
    assert weights(shape, vocab) == pytest.approx(stated, rel=0.04)


@pytest.mark.parametrize("name", HUNDREDTH)
def test_a_hundredth_reads_a_hundredth(name: str) -> None:
    target, vocab, _ = PUBLISHED[name]
    read = [weights(shape, vocab) - vocab * shape.width for shape in (target, HUNDREDTH[name])]
    assert read[0] / read[1] == pytest.approx(100, rel=0.02)


def test_key_value_heads_need_a_gated_shape() -> None:
    with pytest.raises(ValueError, match="is not gated"):
        empty_model(Shape(1, 32, 32, 4, kv_heads=2), 64, 16, "meta", torch.float32)
