"""Faster forward passes with the same weights: linear layers in a packed layout, and compiled functions.

Speculative decoding needs forward passes over a few tokens that cost hardly more than one over a single token. With
weights as a checkpoint has them, five rows can take three times as long as one. With oneDNN's packed layout they
often do not, and it needs no compiler; where it is slower it is not used (`specnb.models.layout`). Compiling takes half a
minute for a new shape and then leaves out everything between the products.
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
    """A linear layer with a second copy of its weight in oneDNN's layout, used for as many rows as it is faster for.

    `uses[rows]` says so, its last entry for all larger numbers (`specnb.models.layout`). The two products round differently:
    in float32 the last bits of a result depend on how many rows are computed together, as they do in
    `torch.nn.Linear`. What must not depend on that, or on what was measured, is computed with weights as saved.
    """

    packed: Tensor | None
    uses: tuple[bool, ...]

    @classmethod
    def of(cls, layer: nn.Linear) -> PackedLinear:
        """`layer` with its very parameters, so that weights tied to others stay tied."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.in_features, made.out_features = layer.in_features, layer.out_features
        made.weight, made.bias = layer.weight, layer.bias
        made.training = layer.training
        made.register_buffer("packed", None, persistent=False)
        made._pack()
        return made

    def _pack(self) -> None:
        choice = layout.choices([self.weight])[0]
        self.uses = layout.by_rows(choice)
        self.packed = layout.reordered(self.weight) if any(choice) else None

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // self.in_features
        # Compiled code uses whichever product the compiler measures to be faster.
        if self.uses[min(rows, len(self.uses) - 1)] or torch.compiler.is_compiling():
            packed = self.packed
            if packed is not None:
                return layout.packed_linear(input, packed, self.bias)
        return linear(input, self.weight, self.bias)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PackedLinear:
        self.packed = None  # another dtype or device has another layout, or none
        super()._apply(fn, recurse)
        self._pack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_buffers": {"packed": None}}  # the layout is not to be copied, but made again

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._pack()


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, whose linear layers also keep their weights in oneDNN's layout where that is faster on this machine.

    Which layers, and for how many rows, is measured when a shape is met for the first time and then kept
    (`specnb.models.layout.choices`). Changes the model in place; the layers that are packed take twice the memory, the others
    stay what they are. Weights that are changed in place, moved to another dtype, or used with another number of
    threads afterwards should be packed again. Without oneDNN, and on other devices, nothing is changed.
    """
    places = [
        (parent, name, layer)
        for parent in list(model.modules())
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, PackedLinear)
    ]
    found = layout.choices([layer.weight for _, _, layer in places])
    for (parent, name, layer), choice in zip(places, found, strict=True):
        if any(choice) or isinstance(layer, PackedLinear):
            setattr(parent, name, PackedLinear.of(layer))
    return model
