"""A CUDA device on the host: code for a GPU is executed, and what is forbidden there fails, without
one.

Within `simulated_cuda()`, tensors can be on "cuda". They say that they are there, and every
operation is carried out on the CPU as soon as it is called. As on a GPU

- operands on two devices are an error; only a number (a tensor without dimensions) and an index may
  be on the host
- a copy to pinned memory that does not wait is seen by the host once it waits for a later event, or
  for the device
- while a graph is captured, nothing can be copied from the host, and nothing can be read
  (`simulated_graph`)

The log has what happened. Time, races between streams, and the rounding of a GPU are not simulated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary

import cuda_guard
import pytest
import torch
from simulated_graph import Graph, address, aten, is_work, leaves, mapped
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
FREE = 2**30  # bytes
INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
TAKES_NUMBERS = {aten.masked_fill.Tensor, aten.masked_fill_.Tensor, aten.fill_.Tensor, *INDEXED}
"""Operations, besides the pointwise ones, with operands that may be numbers of the host."""
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Marks of operations that return values, or tensors whose shape depends on values."""
TENSORS: WeakValueDictionary[int, DeviceTensor] = WeakValueDictionary()
"""All that exist."""


class DeviceTensor(Tensor):
    """A tensor that says that it is on the device. `host` holds its values."""

    host: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=CUDA
        )
        made.host = host
        TENSORS[id(made)] = made
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.cpu().numpy() if force else super().numpy()

    @classmethod
    def __torch_dispatch__(cls, function: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise RuntimeError(f"{function} of a tensor on the simulated device, outside simulated_cuda()")


def in_use() -> set[int]:
    """The memory in which there are tensors on the device."""
    return {address(tensor.host) for tensor in TENSORS.values()}


class Pinned(Tensor):
    """Pinned memory of the host. What was in it before is nothing to rely on."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class SimulatedCuda(TorchDispatchMode):
    """The device, with a log of (kind, operation):

    launch    an operation on the device, views and allocations apart
    copy in   from the host
    copy out  to pinned memory, without waiting
    read      the host waits for values
    replay    of a graph, whose operations are no launches
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log: list[tuple[str, str]] = []
        self.graph: Graph | None = None  # that is being captured
        self.copies = 0  # to pinned memory so far
        self.unseen: list[tuple[int, Tensor, Tensor]] = []  # of these: number, destination, values

    def counts(self, since: int = 0) -> Counter[str]:
        """How often each kind is in the log, from entry `since` on."""
        return Counter(kind for kind, _ in self.log[since:])

    def note(self, kind: str, operation: Any) -> None:
        """Writes to the log. Raises `RuntimeError` for what cannot be captured."""
        if self.graph is not None and kind != "launch":
            raise RuntimeError(f"{kind} by {operation}: not permitted while a graph is captured")
        self.log.append((kind, name_of(operation)))

    def wait(self, copies: int | None = None) -> None:
        """Lets the host see the first `copies` copies to pinned memory, or all."""
        ready = [one for one in self.unseen if copies is None or one[0] < copies]
        self.unseen = self.unseen[len(ready) :]
        for _, destination, values in ready:
            destination.copy_(values)

    @contextmanager
    def capture(self, graph: Graph) -> Iterator[None]:
        """Operations are added to `graph`, and undone at the end."""
        assert self.graph is None, "a graph is being captured"
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None
            graph.undo()

    @contextmanager
    def recorded(self, graph: Graph) -> Iterator[None]:
        """`torch.cuda.graph`."""
        with self.capture(graph):
            yield
        graph.forget()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = leaves((args, kwargs))
        tensors = [leaf for leaf in given if isinstance(leaf, Tensor)]
        here = any(isinstance(tensor, DeviceTensor) for tensor in tensors)
        devices = [leaf for leaf in given if isinstance(leaf, torch.device)]
        to_here = devices[0].type == "cuda" if devices else here
        if not here and not to_here:
            return on_host(function, args, kwargs)
        # In inference mode, what consists of other operations arrives here whole.
        if is_composite(function):
            with self:
                return function._op_dk(COMPOSITE, *args, **kwargs)
        if function is aten.detach_.default:
            return args[0]
        if torch.Tag.inplace_view in function.tags:
            raise NotImplementedError(f"{function}, which gives a tensor another shape in place, is not simulated")
        if function is aten.copy_.default and not isinstance(args[0], DeviceTensor):
            return self.copied_out(function, *args)
        self.check(function, args, tensors, to_here)
        result = self.executed(function, args, kwargs)
        return mapped(self.wrapped(tensors), result) if to_here else result

    def copied_out(self, function: Any, destination: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """A copy from the device to the host."""
        assert isinstance(source, DeviceTensor)
        if non_blocking and isinstance(destination, Pinned):
            self.note("copy out", function)
            self.unseen.append((self.copies, destination, source.host.clone()))
            self.copies += 1
            return destination
        self.note("read", function)
        self.wait()
        return destination.copy_(source.host)

    def check(self, function: Any, args: Any, tensors: list[Tensor], to_here: bool) -> None:
        """Notes what the operation is for the device; raises for operands of which some are not
        there."""
        outside = [tensor for tensor in tensors if not isinstance(tensor, DeviceTensor)]
        moves = function in (aten._to_copy.default, aten.copy_.default)
        for tensor in outside:
            indexed = function in INDEXED and any(tensor is index for index in args[1])
            if moves or indexed:
                self.note("copy in", function)
            elif tensor.dim() or not (torch.Tag.pointwise in function.tags or function in TAKES_NUMBERS):
                raise RuntimeError(f"{function} of tensors on cuda:0 and cpu, where there is {tuple(tensor.shape)}")
        if not to_here or waits(function, args):
            self.note("read", function)
            self.wait()
        elif is_work(function) and not (outside and moves):
            self.note("launch", function)

    def executed(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of the operation on host tensors; it becomes part of the graph that is
        captured."""
        args, kwargs = mapped(self.on_host, args), mapped(self.on_host, kwargs)
        return function(*args, **kwargs) if self.graph is None else self.graph.add(function, args, kwargs)

    def on_host(self, leaf: Any) -> Any:
        """What stands for an argument on the host."""
        if isinstance(leaf, DeviceTensor):
            return leaf.host
        if isinstance(leaf, Tensor) and self.graph is not None:
            return self.graph.number(leaf)
        return CPU if isinstance(leaf, torch.device) else leaf

    def wrapped(self, tensors: list[Tensor]) -> Callable[[Any], Any]:
        """Makes tensors on the device of results on the host; what was changed in place is the
        tensor itself."""
        known = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, DeviceTensor)}

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or id(leaf) in known:
                return known.get(id(leaf), leaf)
            return DeviceTensor(leaf)

        return wrap


def on_host(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation of the host alone. Pinned memory is filled with what nobody would take for
    values."""
    pinned = kwargs.get("pin_memory")
    result = function(*args, **({**kwargs, "pin_memory": False} if pinned else kwargs))
    return result.fill_(torch.iinfo(result.dtype).min).as_subclass(Pinned) if pinned else result


@cache
def name_of(operation: Any) -> str:
    return str(operation)


@cache
def is_composite(function: Any) -> bool:
    """Whether the operation consists of other operations."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(function.name(), COMPOSITE)


def waits(function: Any, args: Any) -> bool:
    """Whether the host waits for values to carry the operation out."""
    if function not in INDEXED:
        return not WAITS.isdisjoint(function.tags)
    by_mask = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    # One value fills the mask.
    return by_mask and not (function is not aten.index.Tensor and args[2].dim() == 0)


class Event:
    """`torch.cuda.Event`: what was copied to pinned memory before `record`."""

    def __init__(self, device: SimulatedCuda) -> None:
        self.device, self.copies = device, 0

    def record(self) -> None:
        self.copies = self.device.copies

    def synchronize(self) -> None:
        self.device.wait(self.copies)


class Stream:
    """`torch.cuda.Stream`. All operations are carried out in the order of the calls, in whatever
    stream."""

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)


class CUDAGraph(Graph):
    """`torch.cuda.CUDAGraph`."""

    def __init__(self, device: SimulatedCuda) -> None:
        super().__init__(in_use)
        self.device = device

    def replay(self) -> None:
        self.device.note("replay", "a graph")
        super().replay()

    def require_current(self, function: Callable[[], Any]) -> None:
        """Raises `RuntimeError` unless `function` would do now what the graph does."""
        again = Graph(in_use)
        with self.device.capture(again):
            function()
        self.require_same(again)


@contextmanager
def simulated_cuda() -> Iterator[SimulatedCuda]:
    """What torch has for CUDA is the simulated device; everything is as before at the end."""
    device = SimulatedCuda()

    instead: dict[str, Any] = {
        "Event": partial(Event, device),
        "Stream": Stream,
        "current_stream": Stream,
        "stream": nullcontext,
        "CUDAGraph": partial(CUDAGraph, device),
        "graph": device.recorded,
        "synchronize": lambda *_: device.wait(),
        "mem_get_info": lambda *_: (FREE, FREE),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "get_device_name": lambda *_: "simulated",
    }
    guard = cuda_guard.library()
    kept = torch.__future__.get_overwrite_module_params_on_conversion()
    with pytest.MonkeyPatch.context() as patch, device:
        for name, replacement in instead.items():
            patch.setattr(torch.cuda, name, replacement)
        guard.require_initialisation(False)
        # `torch.tensor(..., device)` then copies where this sees it.
        torch._C._set_only_lift_cpu_tensors(True)
        # `Module.to` makes new parameters.
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            yield device
        finally:
            guard.require_initialisation(True)
            torch._C._set_only_lift_cpu_tensors(False)
            torch.__future__.set_overwrite_module_params_on_conversion(kept)
