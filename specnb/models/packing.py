"""Faster forward passes with the same weights: linear layers in a packed layout, and compiled functions.

Speculative decoding needs forward passes over a few tokens that cost hardly more than one over a single token. With
weights as a checkpoint has them, five rows can take three times as long as one. With oneDNN's packed layout they
often do not, and it needs no compiler; where it is slower it is not used (`specnb.layout`). Compiling takes half a
minute for a new shape and then leaves out everything between the products.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch.nn.functional import linear
from transformers import PreTrainedModel

from specnb import layout

CAPTURE_AFTER = 3  # runs: the first ones set up libraries and compile, which a graph cannot hold


class PackedLinear(nn.Linear):
    """A linear layer with a second copy of its weight in oneDNN's layout, used for as many rows as it is faster for.

    `uses[rows]` says so, its last entry for all larger numbers (`specnb.layout`). The two products round differently:
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
    (`specnb.layout.choices`). Changes the model in place; the layers that are packed take twice the memory, the others
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


class Compiled:
    """A function of tensors that is compiled once for each of their layouts; what is compiled is kept on disk too.

    What else the function reads must stay what it is: weights of models become constants, and nothing is
    checked. Tensors that it changes in place may change, but not their shapes. Raises `RuntimeError` where
    there is no C++ compiler.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.ready: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        layout = tuple((tensor.shape, tensor.stride()) for tensor in tensors)
        if layout not in self.ready:
            on_host = all(tensor.device.type == "cpu" for tensor in tensors)
            self.ready[layout] = self._for_this_layout(on_host)
            # Weights become constants, laid out as the processor reads them; a device would keep them twice.
            with inductor.patch(freezing=on_host), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the compiler's own doings
                return self.ready[layout](*tensors)
        return self.ready[layout](*tensors)

    def _for_this_layout(self, on_host: bool) -> Callable[..., Any]:
        if on_host:
            require_compiler()
        # What guards would check at every call is fixed: the layout by `ready`, the rest by contract.
        options = {
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
            "max_autotune": on_host,
            "autotune_num_choices_displayed": 0,
            "max_autotune_report_choices_stats": False,
        }
        function: Any = lambda *tensors: self.function(*tensors)  # noqa: E731  # a new one each time shares nothing
        return torch.compile(  # type: ignore[call-overload]  # the stub lacks isolate_recompiles
            function, fullgraph=True, dynamic=False, isolate_recompiles=True, options=options
        )


class Captured:
    """A function of CUDA tensors that is captured as a graph at its first call and replayed at every later one.

    Its first call runs it a few times, on side: what it changes in place must bear that. Later ones copy what they
    are given to where the first call's inputs lay, and return the very tensors that the first call returned.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        if self.graph is None:
            self._capture(tensors)
        assert self.graph is not None
        for own, given in zip(self.inputs, tensors, strict=True):
            own.copy_(given)
        self.graph.replay()
        return self.outputs

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        self.inputs = [tensor.clone() for tensor in tensors]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(CAPTURE_AFTER):
                self.function(*self.inputs)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.function(*self.inputs)


def require_compiler() -> None:
    """Raises `RuntimeError`, saying what to do, where code for the processor cannot be compiled."""
    try:
        get_cpp_compiler()
    except Exception as error:
        raise RuntimeError("compile=True needs a C++ compiler: install g++, or leave compile=False") from error
