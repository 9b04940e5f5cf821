"""Faster forward passes on a CPU with the same weights: linear layers that use the product that is fastest.

Speculative decoding needs forward passes over a few tokens that take hardly longer than one over a single token. With
the usual product, five rows can take three times as long as a single one; with copies of the weights in another layout
they often do not, and a single row is faster too. What is slower is not used (`specnb.models.layout`).
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
    """A linear layer that uses, for each number of rows, the product that is fastest on this machine.

    `uses[rows]` names it; its last entry holds for all larger counts. `transposed` and `packed` are the copies of the
    weight that these products need (`specnb.models.layout`). The products round differently: in float32 the last bits
    of a result depend on how many rows are computed together, as they do in `torch.nn.Linear`. Use weights as saved for
    results that must not depend on this or on a measurement.
    """

    transposed: Tensor | None
    packed: Tensor | None
    uses: tuple[str, ...]
    products: list[Callable[[Tensor], Tensor]]

    @classmethod
    def of(cls, layer: nn.Linear) -> PackedLinear:
        """`layer` with the same parameter objects, so that tied weights stay tied."""
        packed = cls.__new__(cls)
        nn.Module.__init__(packed)
        packed.in_features, packed.out_features = layer.in_features, layer.out_features
        packed.weight, packed.bias = layer.weight, layer.bias
        packed.training = layer.training
        for copied in layout.Copies._fields:
            packed.register_buffer(copied, None, persistent=False)
        packed._pack()
        return packed

    def _pack(self) -> None:
        choice = layout.choices([self.weight])[0]
        self.uses = layout.by_rows(choice)
        copies = self.transposed, self.packed = layout.Copies.of(self.weight, choice)
        by_name = {name: layout.multiplication(name, self.weight, copies, self.bias) for name in set(self.uses)}
        self.products = [by_name[name] for name in self.uses]

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # no gradient of the weight would come from a copy
            return linear(input, self.weight, self.bias)
        if torch.compiler.is_compiling():  # the compiler chooses the faster product itself
            if self.packed is None:
                return linear(input, self.weight, self.bias)
            return layout.packed_linear(input, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]
        products = self.products
        rows = input.numel() // self.in_features
        return products[rows if rows < len(products) else -1](input)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> PackedLinear:
        self.transposed = self.packed = None  # the layout depends on dtype and device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._pack()
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "products": [],
            "_buffers": dict.fromkeys(layout.Copies._fields),
        }  # made again by __setstate__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack()


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, changed in place: linear layers use another product where it is faster on this machine.

    Which, and for how many rows, is measured once for each shape (`specnb.models.layout.choices`). A layer
    keeps up to two copies of its weight for this; those that gain nothing are not changed. Pack again after weights
    were changed in place or moved to another dtype, or with another number of threads. Without oneDNN, and on other
    devices, nothing is changed. Where gradients are computed, the product is the usual one.

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
        if choice != layout.AS_SAVED or isinstance(layer, PackedLinear):
            setattr(parent, name, PackedLinear.of(layer))
    return model
