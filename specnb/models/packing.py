"""Faster forward passes on a CPU with the same weights: linear layers that use the product that is fastest.

Speculative decoding needs forward passes over a few tokens that take hardly longer than one over a single token. With
the usual product, five rows can take three times as long as a single one; with copies of the weights in another layout
they often do not, and a single row is faster too. What is slower is not used (`specnb.models.packing`).

Which product with a linear layer's weight is faster on this machine, by number of rows: measured once, then stored.

    usual       `torch.nn.functional.linear` with the weight as saved, `(out, in)` in memory
    transposed  the same product with a copy that is `(in, out)` in memory
    swapped     the transpose of the weight times the transposed states, with the weight as saved
    packed      oneDNN's product with a copy in a layout of its own

Which is faster depends on the processor, the shape and the number of rows, by factors in all directions, so no fixed
rule holds everywhere. Here all are timed for every shape and some numbers of rows. The results are stored in memory and
in `linear_products.json` in the user's cache folder; delete the file to measure again.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specnb.machine import processor_key


class PackedLinear(nn.Linear):
    """A linear layer that uses, for each number of rows, the product that is fastest on this machine.

    `uses[rows]` names it; its last entry holds for all larger counts. `transposed` and `packed` are the copies of the
    weight that these products need (`specnb.models.packing`). The products round differently: in float32 the last bits
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
        for copied in Copies._fields:
            packed.register_buffer(copied, None, persistent=False)
        packed._pack()
        return packed

    def _pack(self) -> None:
        choice = choices([self.weight])[0]
        self.uses = by_rows(choice)
        copies = self.transposed, self.packed = Copies.of(self.weight, choice)
        by_name = {name: multiplication(name, self.weight, copies, self.bias) for name in set(self.uses)}
        self.products = [by_name[name] for name in self.uses]

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_grad_enabled():  # no gradient of the weight would come from a copy
            return linear(input, self.weight, self.bias)
        if torch.compiler.is_compiling():  # the compiler chooses the faster product itself
            if self.packed is None:
                return linear(input, self.weight, self.bias)
            return packed_linear(input, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]
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
            "_buffers": dict.fromkeys(Copies._fields),
        }  # made again by __setstate__

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._pack()


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """`model`, changed in place: linear layers use another product where it is faster on this machine.

    Which, and for how many rows, is measured once for each shape (`specnb.models.packing.choices`). A layer
    keeps up to two copies of its weight for this; those that gain nothing are not changed. Pack again after weights
    were changed in place or moved to another dtype, or with another number of threads. Without oneDNN, and on other
    devices, nothing is changed. Where gradients are computed, the product is the usual one.

    >>> from studies.speed.shapes import Shape, empty_model
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
    found = choices([layer.weight for _, _, layer in layers])
    for (parent, name, layer), choice in zip(layers, found, strict=True):
        if choice != AS_SAVED or isinstance(layer, PackedLinear):
            setattr(parent, name, PackedLinear.of(layer))
    return model


PRODUCTS = USUAL, TRANSPOSED, SWAPPED, PACKED = "usual", "transposed", "swapped", "packed"

CLASSES = ((1,), (2,), (3,), (4,), (5,), (6, 8), (9, 16), (17, 32))
"""Classes of row counts that share a choice, each given by the counts that are timed; the last class is unbounded."""
ENDS = [rows[-1] for rows in CLASSES]
POINTS = [rows for timed in CLASSES for rows in timed]

PACKABLE = (torch.float32, torch.bfloat16)
LAYOUT_ROWS = 8  # the row count for which oneDNN chooses the layout; it is good for 1 to hundreds of rows
SMALLEST = 2**14  # elements of a weight; smaller ones take hardly longer than the call
LARGEST = 2**21  # elements; of a larger weight only this much is timed, because the time is proportional
WORKING_SET = 2**24  # elements of all weights that a pass reads: as in a model, they are not in the caches
ROUNDS = (5, 15)  # at least and at most
SECONDS = 0.5  # no round begins after this time
FINE = 1e-7  # resolution in seconds of a clock that can time one product
MARGIN = 0.95  # another product is used if it takes less than this fraction of the usual time (ties change nothing)
MOST_ROUNDS = 0.75  # and if it was faster in this fraction of the rounds (one disturbance changes nothing)

Choice = tuple[str, ...]  # for each of CLASSES, one of PRODUCTS
AS_SAVED: Choice = (USUAL,) * len(CLASSES)

packed_linear = torch.ops.mkldnn._linear_pointwise.default
_known: dict[str, Choice] = {}
_supported: dict[torch.dtype, bool] = {}


def choices(weights: Sequence[Tensor]) -> list[Choice]:
    """For each weight `(out, in)` of a model and each of `CLASSES`, the product that is fastest.

    Shapes that were not yet measured on this machine with this dtype and number of threads are measured now, together:
    in half a second, or five rounds if these take longer. A class uses another product than the usual one if that was
    faster by more than 5% at both its ends, in at least three of four rounds. The product is the usual one on other
    devices, in other dtypes, and below 2^14 elements.

    >>> choices([torch.ones(4, 4)]) == [AS_SAVED]
    True
    """
    keys = {dtype: processor_key(dtype) for dtype in {weight.dtype for weight in weights}}
    named = [
        f"{keys[weight.dtype]}; {weight.shape[1]} to {weight.shape[0]}" if _worthwhile(weight) else ""
        for weight in weights
    ]
    if set(named) - {""} - set(_known):
        _known.update(_read() | _known)
    shapes: dict[str, list[Tensor]] = {}
    for name, weight in zip(named, weights, strict=True):
        if name and name not in _known:
            shapes.setdefault(name, []).append(weight.detach())
    if shapes:
        measured = dict(zip(shapes, decide(measure(list(shapes.values()))), strict=True))
        _known.update(measured)
        _write(measured)
    return [_known[name] if name else AS_SAVED for name in named]


def by_rows(choice: Choice) -> Choice:
    """`choice` for 0, 1, ... rows; the last entry holds for all larger counts.

    >>> by_rows((TRANSPOSED, USUAL, *[PACKED] * 6))[:4]
    ('usual', 'transposed', 'usual', 'packed')
    """
    counts = range(1, POINTS[-2] + 1)
    return (USUAL, *(choice[np.searchsorted(ENDS[:-1], rows)] for rows in counts))


class Copies(NamedTuple):
    """The copies of a weight that its products need: `transposed` `(in, out)`, and `packed` in oneDNN's layout."""

    transposed: Tensor | None
    packed: Tensor | None

    @classmethod
    def of(cls, weight: Tensor, products: Collection[str] = PRODUCTS) -> Copies:
        """Those that `products` need.

        >>> Copies.of(torch.ones(2, 3), [TRANSPOSED]).transposed.shape
        torch.Size([3, 2])
        """
        transposed = weight.detach().t().contiguous() if TRANSPOSED in products else None
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LAYOUT_ROWS) if PACKED in products else None
        return cls(transposed, packed)


def multiplication(product: str, weight: Tensor, copies: Copies, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """`torch.nn.functional.linear` with `weight` `(out, in)` as a function of the states `(..., in)`, by `product`.

    >>> weight = torch.ones(2, 3)
    >>> multiplication(TRANSPOSED, weight, Copies.of(weight, [TRANSPOSED]), None)(torch.ones(1, 3))
    tensor([[3., 3.]])
    """
    transposed, packed = copies
    if product == PACKED:
        return lambda states: packed_linear(states, packed, bias, "none", [], "")
    if product == TRANSPOSED:
        assert transposed is not None
        if bias is None:
            return lambda states: torch.matmul(states, transposed)
        return lambda states: torch.matmul(states, transposed) + bias
    if product == SWAPPED:
        return partial(_swapped, weight=weight, bias=bias)
    return lambda states: linear(states, weight, bias)


def _swapped(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = states.reshape(-1, states.shape[-1])
    found = linear(weight, rows).t().contiguous().view(*states.shape[:-1], len(weight))
    return found if bias is None else found + bias


def supported(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed products in `dtype` on this processor; if it should and has not, warns once.

    >>> supported(torch.float64)
    False
    """
    if dtype not in PACKABLE or not torch.backends.mkldnn.is_available():
        return False
    if dtype not in _supported:
        try:
            with torch.inference_mode():
                weight = torch.ones(16, 16, dtype=dtype)
                multiplication(PACKED, weight, Copies.of(weight), None)(weight)
            _supported[dtype] = True
        except RuntimeError as error:
            first = all(_supported.values())
            _supported[dtype] = False  # before the warning, which may be turned into an error
            if first:
                warnings.warn(_unsupported(dtype, error), RuntimeWarning, stacklevel=2)
    return _supported[dtype]


def _unsupported(dtype: torch.dtype, error: RuntimeError) -> str:
    name = str(dtype).removeprefix("torch.")
    why = str(error).splitlines()[0]
    return (
        f"oneDNN cannot pack {name} weights on this processor, so they are used as saved: the results are right, "
        f"products may take longer. Load with packed=False to avoid this warning. oneDNN says: {why}"
    )


def _worthwhile(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.numel() >= SMALLEST and supported(weight.dtype)


def decide(seconds: NDArray[np.float64]) -> list[Choice]:
    """The choice for each shape, from `seconds` `(rounds, shapes, POINTS, PRODUCTS)` as `measure` returns them."""
    ratio = seconds / seconds[..., :1]
    faster = (np.median(ratio, axis=0) < MARGIN) & (np.quantile(ratio, MOST_ROUNDS, axis=0) < 1)
    faster[..., 0] = True  # the usual product is always possible
    starts = np.cumsum([0, *map(len, CLASSES[:-1])])
    possible = np.logical_and.reduceat(faster, starts, axis=1)
    time_of = np.add.reduceat(np.median(ratio, axis=0), starts, axis=1)
    best = np.where(possible, time_of, np.inf).argmin(axis=-1)
    return [tuple(PRODUCTS[product] for product in of_shape) for of_shape in best]


@torch.inference_mode()
def measure(shapes: Sequence[Sequence[Tensor]]) -> NDArray[np.float64]:
    """Seconds `(rounds, shapes, POINTS, PRODUCTS)` of each product with a weight of each shape, all in one dtype.

    `shapes` has the weights of each shape. A round makes a pass over the weights of all layers with every number of
    rows and every product, as a model does, in a new random order with one product right after the other.
    """
    layers = _layers(shapes)
    states = [[weights[0].new_ones(rows, weights[0].shape[1]) for rows in POINTS] for weights in shapes]
    clock, order = _clock(), np.random.default_rng(0)
    rounds: list[NDArray[np.float64]] = []
    until = time.perf_counter() + SECONDS
    while len(rounds) <= ROUNDS[0] or (len(rounds) <= ROUNDS[1] and time.perf_counter() < until):
        seconds = np.empty((len(shapes), len(POINTS), len(PRODUCTS)))
        for point in order.permutation(len(POINTS)):
            for product in order.permutation(len(PRODUCTS)):
                for shape, sample in enumerate(layers):
                    given = states[shape][point]
                    began = clock()
                    for products in sample:
                        products[product](given)
                    seconds[shape, point, product] = (clock() - began) / len(sample)
        rounds.append(seconds)
    return np.stack(rounds[1:])  # the first round sets up libraries


def _layers(shapes: Sequence[Sequence[Tensor]]) -> list[list[list[Callable[[Tensor], Tensor]]]]:
    """For each shape, and each of as many layers as `WORKING_SET` allows, its `PRODUCTS` as functions of the states."""
    count = max(2, WORKING_SET // sum(_part(weights[0]).numel() for weights in shapes))

    def of(weight: Tensor) -> list[Callable[[Tensor], Tensor]]:
        copies = Copies.of(weight)
        return [multiplication(product, weight, copies, None) for product in PRODUCTS]

    return [[of(_part(weight)) for weight in weights[:count]] for weights in shapes]


def _clock() -> Callable[[], float]:
    """CPU time if this thread computes alone, so that other programs are not counted; else wall-clock time."""
    alone = torch.get_num_threads() == 1 and time.get_clock_info("thread_time").resolution < FINE
    return time.thread_time if alone else time.perf_counter


def _part(weight: Tensor) -> Tensor:
    return weight[: max(1, LARGEST // weight.shape[1])]


def cache_file() -> Path | None:
    """The file of the stored choices, under `XDG_CACHE_HOME` or ~/.cache; None where there is no home folder."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return folder / "specnb" / "linear_products.json" if folder.is_absolute() else None


def _read() -> dict[str, Choice]:
    """The stored choices; none if the file cannot be read or is damaged, so that they are measured again."""
    file = cache_file()
    try:
        kept = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError, RecursionError):
        return {}
    entries = kept.items() if isinstance(kept, dict) else ()
    return {name: tuple(choice) for name, choice in entries if _is_choice(choice)}


def _is_choice(value: object) -> bool:
    return isinstance(value, list) and len(value) == len(CLASSES) and all(one in PRODUCTS for one in value)


def _write(measured: dict[str, Choice]) -> None:
    """Adds `measured` to the file by an atomic replacement; at worst another process's simultaneous entry is lost.

    Does nothing where the file cannot be written; every process then measures again.
    """
    file = cache_file()
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as partial:
            try:
                partial.write(json.dumps(measured | _read(), indent=1) + "\n")
                partial.close()
                os.replace(partial.name, file)
            except BaseException:
                os.unlink(partial.name)
                raise
    except OSError:
        return
