"""Faster forward passes on a CPU with the same weights: linear layers in oneDNN's packed layout.

Speculative decoding needs forward passes over a few tokens that take hardly longer than one over a single token. With
weights as saved in a checkpoint, a product with five rows can take three times as long as one with a single row; with
packed weights it often does not. Where packed weights are slower they are not used (`specnb.models.layout`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specnb.models import layout


class PackedLinear(nn.Linear):
    """A linear layer with a second copy of its weight in oneDNN's layout, used for the row counts it is faster for.

    `uses[rows]` is true for these; its last entry holds for all larger counts (`specnb.models.layout`). The two
    products round differently: in float32 the last bits of a result depend on how many rows are computed together, as
    they do in `torch.nn.Linear`. Use weights as saved for results that must not depend on this or on a measurement.
    """

    packed: Tensor | None
    uses: tuple[bool, ...]

    @classmethod
    def of(cls, layer: nn.Linear) -> PackedLinear:
        """`layer` with the same parameter objects, so that tied weights stay tied."""
        packed = cls.__new__(cls)
        nn.Module.__init__(packed)
        packed.in_features, packed.out_features = layer.in_features, layer.out_features
        packed.weight, packed.bias = layer.weight, layer.bias
        packed.training = layer.training
        packed.register_buffer("packed", None, persistent=False)
        packed._pack()
        return packed

    def _pack(self) -> None:
        choice = layout.choices([self.weight])[0]
        self.uses = layout.by_rows(choice)
        self.packed = layout.reordered(self.weight) if any(choice) else None

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        # While compiling, the compiler chooses the faster product itself.
        if self.uses[min(rows, len(self.uses) - 1)] or torch.compiler.is_compiling():
            packed = self.packed
            if packed is not None:
                return layout.packed_linear(input, packed, self.bias)
        return linear(input, self.weight, self.bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PackedLinear:
        self.packed = None  # the layout depends on dtype and device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._pack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_buffers": {"packed": None}}  # not copied: packed again by __setstate__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack()


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, changed in place: linear layers also keep packed weights where these are faster on this machine.

    Which layers, and for how many rows, is measured once for each shape (`specnb.models.layout.choices`). Packed
    layers take twice the memory; the others are not changed. Pack again after weights were changed in place or moved to
    another dtype, or with another number of threads. Without oneDNN, and on other devices, nothing is changed.

    >>> from specnb.models.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=8, device="cpu", dtype=torch.float32)
    >>> pack(model) is model
    True
    """
    layers = [
        (parent, name, layer)
        for parent in list(model.modules())
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, PackedLinear)
    ]
    found = layout.choices([layer.weight for _, _, layer in layers])
    for (parent, name, layer), choice in zip(layers, found, strict=True):
        if any(choice) or isinstance(layer, PackedLinear):
            setattr(parent, name, PackedLinear.of(layer))
    return model
