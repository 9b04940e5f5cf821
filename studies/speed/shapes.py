"""Shapes of published models, with their vocabularies and the number of weights that their authors state."""

from __future__ import annotations

from typing import NamedTuple

from specnb.models.shapes import Shape


class Published(NamedTuple):
    """A published shape, its vocabulary, and its number of weights."""

    shape: Shape
    vocab: int
    weights: float


TARGET = Shape(12, 768, 3072, 12)  # the paper's GPT-like pair on lm1b: 97M parameters
DRAFT = Shape(2, 256, 1024, 4)  # and 6M, at a vocabulary of 8k
PUBLISHED = {
    "gpt-like-97m": Published(TARGET, 8192, 97e6),  # Leviathan et al. 2023, section 4.2
    "llama-3.1-8b": Published(Shape(32, 4096, 14336, 32, gated=True, kv_heads=8), 128256, 8.03e9),  # 2024, table 3
    "llama-2-13b": Published(Shape(40, 5120, 13824, 40, gated=True), 32000, 13.02e9),  # Touvron et al. 2023
}
# Draft models that read a hundredth of what their target reads per forward pass, the input embedding not counted. Few
# wide layers rather than many narrow ones, because each layer takes a device a minimum of time.
HUNDREDTH = {
    "llama-3.1-8b": Shape(3, 512, 1792, 8, gated=True, kv_heads=2),
    "llama-2-13b": Shape(8, 1024, 2560, 8, gated=True),
}
