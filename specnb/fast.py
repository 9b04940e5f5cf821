"""The same numbers sooner: weights laid out once as the processor reads them, and functions compiled.

Speculation lives on runs over a few tokens costing hardly more than a run over one. A processor's usual
matrix product does not keep that promise: with weights as a checkpoint has them, five rows can take three
times as long as one. oneDNN's packed layout keeps it, and needs no compiler. Compiling takes half a minute
for a new shape and then leaves out everything between the products.
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

PACKABLE = (torch.float32, torch.bfloat16)
ROWS = 8  # the layout is chosen for runs over so many tokens; it serves 1 to hundreds
CAPTURE_AFTER = 3  # runs: the first ones set up libraries and compile, which a graph cannot hold
SMALLEST = 2**19  # multiplications below which handing a product to oneDNN costs more than it saves


class PackedLinear(nn.Linear):
    """A linear layer with a second copy of its weight in oneDNN's layout, used for all but the smallest products."""

    packed: Tensor | None
    least: int  # elements of an input from which on the packed weight is used

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
        packable = self.weight.device.type == "cpu" and self.weight.dtype in PACKABLE
        weight = self.weight.detach()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS) if packable else None
        self.least = SMALLEST // self.out_features

    def forward(self, input: Tensor) -> Tensor:
        # The first test is the cheapest, and for small layers the last; the compiler measures which product is faster.
        if input.numel() < self.least and not torch.compiler.is_compiling():
            return linear(input, self.weight, self.bias)
        if self.packed is None:
            return linear(input, self.weight, self.bias)
        flat = input.reshape(-1, self.in_features)
        made = torch.ops.mkldnn._linear_pointwise(flat, self.packed, self.bias, "none", [], "")
        return made.view(*input.shape[:-1], self.out_features)

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
    """`model`, whose linear layers now have their weights packed too where oneDNN is there and the dtype allows.

    Changes the model in place and doubles what its linear layers take of memory. Weights that are changed in
    place afterwards are not seen: pack again. Without oneDNN, and on other devices, nothing is changed.
    """
    if torch.backends.mkldnn.is_available():
        for parent in list(model.modules()):
            for name, layer in parent.named_children():
                if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, PackedLinear):
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
