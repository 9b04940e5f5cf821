"""Functions that are compiled, or captured as a CUDA graph, once for each shape."""

from __future__ import annotations

import sysconfig
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config as inductor
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.runtime.cache_dir_utils import cache_dir

AUTOTUNED = torch.float32
"""For weights in float32 the compiler's own kernels, timed against MKL's, make a forward pass 2 to
3 times as fast. In bfloat16 oneDNN's are faster, by 0 to 40%, than what wins a comparison with
weights that are still in the caches."""
# The first calls set up libraries and compile, which a graph cannot contain.
CALLS_BEFORE_CAPTURE = 3


class Compiled:
    """A function of tensors that is compiled once for each combination of their shapes, strides and
    dtypes.

    Compiled code is also cached on disk. Everything else that the function reads must not change:
    weights of models become constants, and nothing is checked. It may change tensors in place, but
    not their shapes. With `growing`, the second dimension of the first tensor may have any size,
    with one compilation. `dtype` is that of the weights.

    Raises `RuntimeError` at the first call where there is no C++ compiler.
    """

    def __init__(
        self, function: Callable[..., Any], dtype: torch.dtype | None = None, *, growing: bool = False
    ) -> None:
        self.function = function
        self.dtype, self.growing = dtype, growing
        self.ready: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        layout = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors[self.growing :])
        if layout not in self.ready:
            on_host = all(tensor.device.type == "cpu" for tensor in tensors)
            if self.growing and on_host:
                torch._dynamo.mark_dynamic(tensors[0], 1)
            self.ready[layout] = self._for_this_layout(on_host)
            # Weights become constants in the processor's preferred layout; a GPU would keep them
            # twice.
            with inductor.patch(freezing=on_host), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings inside the compiler
                return self.ready[layout](*tensors)
        return self.ready[layout](*tensors)

    def _for_this_layout(self, on_host: bool) -> Callable[..., Any]:
        if on_host:
            require_compiler()
        # Guards are not needed: `ready` is keyed by the layout, and the rest may not change.
        options = {
            "guard_filter_fn": torch.compiler.skip_all_guards_unsafe,
            "max_autotune": on_host and self.dtype == AUTOTUNED,
            "autotune_num_choices_displayed": 0,
            "max_autotune_report_choices_stats": False,
        }
        function: Any = lambda *tensors: self.function(*tensors)  # noqa: E731  # a new one each time shares nothing
        return torch.compile(  # type: ignore[call-overload, no-any-return]  # the stub lacks isolate_recompiles
            function, fullgraph=True, dynamic=False, isolate_recompiles=True, options=options
        )


class Captured:
    """A function of CUDA tensors that is captured as a graph at its first call and replayed at
    every later one.

    The first call executes the function several times, so what it changes in place must allow that.
    Later calls copy their arguments into the first call's inputs, and return the tensors that the
    first call returned.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        if self.graph is None:
            self._capture(tensors)
        assert self.graph is not None
        for captured, given in zip(self.inputs, tensors, strict=True):
            captured.copy_(given)
        self.graph.replay()
        return self.outputs

    def _capture(self, tensors: tuple[Tensor, ...]) -> None:
        self.inputs = [tensor.clone() for tensor in tensors]
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            for _ in range(CALLS_BEFORE_CAPTURE):
                self.function(*self.inputs)
        torch.cuda.current_stream().wait_stream(side_stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.function(*self.inputs)


def require_compiler() -> None:
    """Raises `RuntimeError`, with the remedy, where there is no C++ compiler, or a space in a path
    that it gets."""
    try:
        get_cpp_compiler()
    except Exception as error:
        raise RuntimeError("compile=True needs a C++ compiler: install g++, or leave compile=False") from error
    for path in (cache_dir(), torch.__file__, sysconfig.get_path("include")):
        if " " in path:  # torch cuts its command there
            remedy = "move the environment, or set TORCHINDUCTOR_CACHE_DIR if it is that, or leave compile=False"
            raise RuntimeError(f"compile=True fails because of the space in {path}: {remedy}")
