"""Functions that are compiled, or captured as a CUDA graph, once for each shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler

CAPTURE_AFTER = 3  # runs: the first ones set up libraries and compile, which a graph cannot hold


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
