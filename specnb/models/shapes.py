"""Shapes of models that others published, and what a model of such a shape holds, counted without making it.

A decoding step of an encoder-decoder reads its decoder, and of cross-attention only the two products that are
not kept: the encoder and the keys and values of its text were run once, before the first token. So `t5-...` here
is that step as a decoder: the decoder's layers, whose feed-forward part is wider by what a step reads of
cross-attention, and a prompt in place of the encoder's text. T5-XXL holds 11.1 billion weights and reads 5.6 billion
a step. `whole` lays the encoder's layers on top, which gives exactly the published number of weights, all of
them read in every step: the paper's 11B as a decoder of today would spend it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, MistralConfig, PreTrainedConfig, PreTrainedModel


class Shape(NamedTuple):
    """A decoder: layers, width, feed-forward width, heads; and whether it is `gated`.

    One that is not gated is GPT-NeoX, with biases; one that is has none and is of Llama's kind (in the code of
    Mistral, which lets heads and width be any numbers). `kv_heads`, as many as heads unless given, and `head_dim`,
    width / heads, are for gated shapes only.
    """

    layers: int
    width: int
    feed_forward: int
    heads: int
    gated: bool = False
    kv_heads: int | None = None
    head_dim: int | None = None


class Published(NamedTuple):
    """A shape, its vocabulary, the number of weights that its authors state, and where.

    `held` of the whole model that the shape stands for; see `whole` for an encoder-decoder's.
    """

    shape: Shape
    vocab: int
    held: float
    source: str


def t5(layers: int, width: int, feed_forward: int, heads: int) -> Shape:
    """A decoding step of T5 1.1 (gated, heads of 64) with so many layers in its decoder; see the module's text."""
    crossed = 2 * heads * 64 / 3  # query and output of cross-attention, spread over the gated part's three matrices
    return Shape(layers, width, feed_forward + 8 * round(crossed / 8), heads, gated=True, head_dim=64)


def whole(shape: Shape) -> Shape:
    """The encoder's layers on top of the decoder's, for a shape made by `t5`: as many, and together as heavy."""
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
# Drafts that read a hundredth of what their target reads in a run, few layers wide rather than many narrow:
# a layer takes a device some time however little there is in it.
HUNDREDTH = {
    "llama-3.1-8b": Shape(3, 512, 1792, 8, gated=True, kv_heads=2),
    "llama-2-13b": Shape(8, 1024, 2560, 8, gated=True),
}


class Size(NamedTuple):
    """What a model holds, and what a run over a few tokens reads of it.

    held  weights in all
    read  weights that every run reads: all but the input embedding, of which it reads a row for each token
    """

    held: int
    read: int

    def bytes_held(self, dtype: torch.dtype) -> int:
        """Bytes of the weights in `dtype`."""
        return self.held * dtype.itemsize

    def bytes_read(self, dtype: torch.dtype) -> int:
        """Bytes of weights that a run reads in `dtype`."""
        return self.read * dtype.itemsize


def size(shape: Shape, vocab: int) -> Size:
    """What a model of this shape holds and reads, counted on one that has no memory."""
    return size_of(empty_model(shape, vocab, 1024, "meta", torch.float32))


def size_of(model: PreTrainedModel) -> Size:
    """`Size` of a model that exists; where input and output embedding are tied, the head still reads them whole."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    held = sum(weights.numel() for weights in model.parameters())
    looked_up = 0 if head.weight is embedding.weight else embedding.weight.numel()
    return Size(held, held - looked_up)


def empty_model(shape: Shape, vocab: int, context: int, device: str, dtype: torch.dtype) -> PreTrainedModel:
    """A model of this shape made where and as it will stay, its weights whatever transformers begins with.

    Raises `ValueError` for key-value heads or a head's width of a shape that is not gated.
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
    return model.eval()
