"""Linear layers that use, on a CPU, the product that is fastest there, with the same weights.

With the usual product a forward pass over five tokens can take three times as long as over one,
which leaves nothing to gain from speculation. Which is faster differs between processors, dtypes,
shapes and numbers of rows, by factors in all directions, so four are timed with the model's own
weights: the usual one, with the weight as saved, `(out, in)`; the same with a transposed copy; the
weight times the transposed states (swapped); and oneDNN's, with a packed copy. Compiled code uses
the weight as saved, whose layout the compiler chooses: with packed ones it failed or was slower.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

Array = NDArray[np.float64]
Module = TypeVar("Module", bound=nn.Module)
Product = Callable[[Tensor], Tensor]
TRANSPOSED, PACKED = 1, 3  # the second and the last of the four products
TIMED = 8  # layers of a shape that are timed, of which the others take the same product
ROWS = (1, 2, 5, 16)  # of the states that are timed; a choice holds from that number of rows on
MARGIN = 0.95  # another product is used if it takes less than this fraction of the usual one's time
# Rounds of timing; after the least number, none begins later than that,.
LEAST, ROUNDS, SECONDS = 3, 9, 0.3
# And after the first none begins later than so many seconds, as where other programs use the
# processor.
BUSY = 2.0
SMALLEST = 2**14  # elements of a weight; smaller ones take hardly longer than the call
SAMPLED = 16  # values of a weight by which a change is noticed that it does not tell of
LAYOUT_ROWS = 8  # rows for which oneDNN chooses its layout; it is good for 1 to hundreds of rows
packed_linear = torch.ops.mkldnn._linear_pointwise.default


class PackedLinear(nn.Linear):
    """`layer` with the same parameter objects, and `products` for 1, 2, ... rows; the last holds
    for more.

    Products round differently, so in float32 the last bits of a result depend on the number of
    rows, as they do in `torch.nn.Linear`. A layer that is copied, or moved to another dtype or
    device, uses the usual product again, and so does one whose weight was changed or replaced. What
    is assigned to `weight.data` is no change that the weight tells of: `generate` looks for it and
    calls `renew_if_changed` (`specnb.models.known`).
    """

    products: list[Product]
    chosen: list[int]
    of: tuple[Tensor, int | None, bytes]

    def __init__(self, layer: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.training = layer.in_features, layer.out_features, layer.training
        self.weight, self.bias, self.products = layer.weight, layer.bias, []

    def forward(self, input: Tensor) -> Tensor:
        products = self.products
        weight: Any = self._parameters["weight"]  # quicker than as an attribute
        # The compiler finds the fastest layout of a weight as saved, and a copy would give the
        # weight no gradient.
        if torch.compiler.is_compiling() or not products or torch.is_grad_enabled():
            return linear(input, weight, self.bias)
        of, changes, _ = self.of
        if weight is not of or (changes is not None and weight._version != changes):
            return linear(input, weight, self.bias)
        rows = input.numel() // self.in_features
        return products[rows - 1 if rows < len(products) else -1](input)

    def use(self, chosen: list[int]) -> None:
        """From now on uses the products `chosen` for 1, 2, ... rows, with copies of the weight as
        it is."""
        made = {at: self.product(at) for at in set(chosen)}
        self.products, self.chosen = [made[at] for at in chosen], chosen
        self.of = self.weight, version(self.weight), some_values([self.weight])

    @torch.no_grad()
    def renew_if_changed(self) -> None:
        """Makes the products again if they are of other values of the weight."""
        if self.products and some_values([self.weight]) != self.of[2]:
            self.use(self.chosen)

    def product(self, at: int) -> Product:
        """One of the four products, with the copy that it needs."""
        weight, bias = self.weight.detach(), self.bias
        copy = weight.t().contiguous() if at == TRANSPOSED else weight
        copy = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS) if at == PACKED else copy

        def plus_bias(found: Tensor) -> Tensor:
            return found if bias is None else found + bias

        def swapped(states: Tensor) -> Tensor:
            found = linear(weight, states.reshape(-1, states.shape[-1])).t().contiguous()
            return plus_bias(found.view(*states.shape[:-1], len(weight)))

        products: list[Product] = [
            lambda states: linear(states, weight, bias),
            lambda states: plus_bias(torch.matmul(states, copy)),
            swapped,
            lambda states: packed_linear(states, copy, bias, "none", [], ""),
        ]
        return products[at]

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLinear:
        self.products = []
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"products": [], "of": ()}


@torch.no_grad()
def pack(model: Module) -> Module:
    """`model`, changed in place: its linear layers use another product where that is faster on this
    CPU.

    Passes over eight layers of each shape are timed for 0.3 seconds, or three times if that takes
    longer. A layer keeps up to two copies of its weight. Nothing changes on other devices, in other
    dtypes than float32 and bfloat16, without oneDNN, and where memory is short. Pack again with
    another number of threads.

    >>> pack(nn.Linear(8, 8))
    Linear(in_features=8, out_features=8, bias=True)
    """
    linears = {name: layer for name, layer in model.named_modules() if type(layer) in (nn.Linear, PackedLinear)}
    found = {name: layer for name, layer in linears.items() if name and _can_be_packed(layer.weight)}
    if not 0 < 2 * sum(layer.weight.nbytes for layer in found.values()) < psutil.virtual_memory().available:
        return model
    try:
        made = {name: PackedLinear(layer) for name, layer in found.items()}
        timed = _sample(list(made.values()))
        products = [[layer.product(at) for at in range(PACKED + 1)] for layer in timed]
        seconds = least_seconds([layer.weight for layer in timed], products)
    except RuntimeError as error:
        names = {str(layer.weight.dtype).removeprefix("torch.") for layer in found.values()}
        what = f"oneDNN cannot pack {', '.join(names)} weights on this processor, so they are used as saved: "
        remedy = "the results are right, products may take longer. Load with packed=False to avoid this warning. "
        warnings.warn(f"{what}{remedy}oneDNN says: {str(error).splitlines()[0]}", RuntimeWarning, stacklevel=2)
        return model
    del products
    shapes = [layer.weight.shape for layer in timed]
    for name, layer in made.items():
        layer.use(fastest(seconds[[shape == layer.weight.shape for shape in shapes]].sum(axis=0)))
        model.set_submodule(name, layer)
    return model


def version(tensor: Tensor) -> int | None:
    """How often `tensor` was changed in place; None for one of inference mode, which does not count
    it."""
    return None if tensor.is_inference() else tensor._version


def some_values(tensors: Iterable[Tensor]) -> bytes:
    """`SAMPLED` values of each tensor at least, or all: for comparison with a later time.

    >>> some_values([torch.zeros(3, 3)]) == some_values([torch.zeros(9)])
    True
    """
    parts = []
    for tensor in (one.detach() for one in tensors):
        if tensor.is_contiguous():
            parts.append(tensor.view(-1)[:: max(1, tensor.numel() // SAMPLED)])
        else:
            few = tuple(slice(None, None, max(1, size // 4)) for size in tensor.shape)
            parts.append(tensor[few].flatten())
    if len({part.device for part in parts}) > 1:
        parts = [part.cpu() for part in parts]
    return torch.cat(parts).double().cpu().numpy().tobytes() if parts else b""


def _sample(layers: list[PackedLinear]) -> list[PackedLinear]:
    """Up to `TIMED` layers of each shape, spread over all of its layers, in their order."""
    chosen = []
    for shape in {layer.weight.shape for layer in layers}:
        same = [at for at, layer in enumerate(layers) if layer.weight.shape == shape]
        chosen += same[:: -(-len(same) // TIMED)]
    return [layers[at] for at in sorted(chosen)]


def _can_be_packed(weight: Tensor) -> bool:
    usual = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    return usual and weight.numel() >= SMALLEST and torch.backends.mkldnn.is_available()


def least_seconds(weights: Sequence[Tensor], products: Sequence[Sequence[Product]]) -> Array:
    """The least seconds `(weights, products, ROWS)`, of several passes over all weights, as a model
    makes them."""
    # Without other programs' time.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    least = np.full((len(weights), PACKED + 1, len(ROWS)), np.inf)
    start = clock()
    for number in range(ROUNDS):
        if number and clock() > start + (SECONDS if number >= LEAST else BUSY):
            break
        for at in range(PACKED + 1):
            # Most rows first, while these copies are not in the caches.
            for column in reversed(range(len(ROWS))):
                for weight, own, best in zip(weights, products, least[:, at], strict=True):
                    states = weight.new_ones(1, ROWS[column], weight.shape[1])
                    began = clock()
                    own[at](states)
                    best[column] = min(best[column], clock() - began)
    return least


def fastest(seconds: Array) -> list[int]:
    """For 1, 2, ... rows, the product with the least `seconds` `(products, ROWS)`; all but the
    usual need `MARGIN`.

    >>> seconds = [[1.0, 1.0, 3.0, 9.0], [0.8, 2.0, 2.0, 8.0], [0.9, 0.9, 2.0, 7.0], [0.9, 3.0, 1.0, 6.0]]
    >>> fastest(np.array(seconds))[:5]
    [1, 2, 2, 2, 3]
    """
    best = np.concatenate([MARGIN * seconds[:1], seconds[1:]]).argmin(axis=0)
    return [int(best[np.searchsorted(ROWS, rows, side="right") - 1]) for rows in range(1, ROWS[-1] + 1)]
