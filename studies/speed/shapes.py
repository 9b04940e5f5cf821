"""Shapes of published models, and their numbers of weights.

A decoding step of an encoder-decoder reads its decoder and, of cross-attention, only the query and output products:
the encoder and its keys and values are computed once, before the first token. So `t5-...` here is that step as a
decoder-only model: the decoder's layers, with a feed-forward part widened by what a step reads of cross-attention, and
a prompt in place of the encoder's input. T5-XXL has 11.1 billion weights and reads 5.6 billion per step. `whole` adds
the encoder's layers, which gives the published number of weights, all of them read in every step, as in a decoder-only
model of that size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from specnb.models.shapes import Shape, empty_model


class Published(NamedTuple):
    """A published shape, its vocabulary, the number of weights that its authors state, and the source.

    `held` is that of the whole model, for an encoder-decoder that of `whole(shape)`.
    """

    shape: Shape
    vocab: int
    held: float
    source: str


def t5(layers: int, width: int, feed_forward: int, heads: int) -> Shape:
    """A decoding step of T5 1.1 (gated, heads of width 64) as a decoder-only shape; see the module's docstring.

    >>> t5(8, 512, 1024, 6).feed_forward
    1280
    """
    crossed = 2 * heads * 64 / 3  # query and output of cross-attention, spread over the gated part's three matrices
    return Shape(layers, width, feed_forward + 8 * round(crossed / 8), heads, gated=True, head_dim=64)


def whole(shape: Shape) -> Shape:
    """A shape made by `t5` with the encoder's layers added: as many, with as many weights in all.

    >>> whole(t5(8, 512, 1024, 6)).layers
    16
    """
    return shape._replace(layers=2 * shape.layers)


TARGET = Shape(12, 768, 3072, 12)  # the paper's GPT-like pair on lm1b: 97M parameters
DRAFT = Shape(2, 256, 1024, 4)  # and 6M, at a vocabulary of 8k

_PAPER = "Leviathan et al. 2023, section 4.2"
_T5 = f"t5x, examples/t5/t5_1_1; weights: {_PAPER}"
PUBLISHED = {
    "gpt-like-97m": Published(TARGET, 8192, 97e6, _PAPER),
    "gpt-like-6m": Published(DRAFT, 8192, 6e6, _PAPER),
    "t5-small": Published(t5(8, 512, 1024, 6), 32128, 77e6, _T5),
    "t5-base": Published(t5(12, 768, 2048, 12), 32128, 250e6, _T5),
    "t5-large": Published(t5(24, 1024, 2816, 16), 32128, 800e6, _T5),
    "t5-xxl": Published(t5(24, 4096, 10240, 64), 32128, 11e9, _T5),
    "llama-3.1-8b": Published(
        Shape(32, 4096, 14336, 32, gated=True, kv_heads=8), 128256, 8.03e9, "Llama team 2024, table 3"
    ),
    "llama-2-13b": Published(Shape(40, 5120, 13824, 40, gated=True), 32000, 13.02e9, "Touvron et al. 2023"),
    # Too large for one device of today; Table 3 of the paper gives alphas of it and no times.
    "lamda-137b": Published(
        Shape(64, 8192, 65536, 128, gated=True, head_dim=128), 32000, 137e9, "Thoppilan et al. 2022, section 3"
    ),
}
# Draft models that read a hundredth of what their target reads per forward pass. Few wide layers rather than many
# narrow ones, because each layer takes a device a minimum of time.
HUNDREDTH = {
    "llama-3.1-8b": Shape(3, 512, 1792, 8, gated=True, kv_heads=2),
    "llama-2-13b": Shape(8, 1024, 2560, 8, gated=True),
}


class Size(NamedTuple):
    """Numbers of weights of a model.

    held  all weights
    read  weights that every forward pass reads: all but the input embedding, which is read one row per token
    """

    held: int
    read: int


def size(shape: Shape, vocab: int) -> Size:
    """The `Size` of a model of this shape, counted on the meta device.

    >>> size(Shape(1, 8, 8, 2), vocab=4)
    Size(held=544, read=512)
    """
    return size_of(empty_model(shape, vocab, 1024, "meta", torch.float32))


def size_of(model: PreTrainedModel) -> Size:
    """The `Size` of `model`; if input and output embedding are tied, the output layer still reads all of it."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    held = sum(weights.numel() for weights in model.parameters())
    looked_up = 0 if head.weight is embedding.weight else embedding.weight.numel()
    return Size(held, held - looked_up)
