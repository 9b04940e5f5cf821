"""Counts the operations of some code that matter on a GPU: kernel launches, synchronisations,
allocations, shapes.

They are counted from the dispatched operations, so the counts are the same on every machine and
need no GPU.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from studies.batching.operations import Operation, OperationRecorder

READS = {
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.__float__,
}  # fmt: skip
"""Functions that return a tensor's values to Python, for which the host waits until the device has
finished."""


class DeviceActivity:
    """A context manager that counts the operations inside it.

    launches   operations that compute something (views do not)
    waits      synchronisations: the host reads a value, or needs it to know a shape
    allocated  bytes of new tensors, temporary ones included
    layouts    each operation with the shapes of its arguments

    >>> values = torch.arange(4.0)
    >>> with DeviceActivity() as activity:
    ...     total = (values * 2).sum().item()
    >>> activity.launches, activity.waits
    (3, 1)
    """

    def __init__(self) -> None:
        self.launches = self.waits = self.allocated = 0
        self.layouts: set[tuple[str, ...]] = set()
        self._modes = (OperationRecorder(self._record), _Reads(self))

    def __enter__(self) -> DeviceActivity:
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]

    def _record(self, operation: Operation) -> None:
        inputs = operation.inputs
        self.waits += _has_unknown_shape(operation.function, inputs)
        if operation.function.is_view:
            return
        self.launches += 1
        self.layouts.add((str(operation.function), *(str(tuple(tensor.shape)) for tensor in inputs)))
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        new = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in operation.outputs}
        self.allocated += sum(size for storage, size in new.items() if storage not in known)


class _Reads(TorchFunctionMode):
    def __init__(self, watch: DeviceActivity) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.watch.waits += func in READS
        return func(*args, **(kwargs or {}))


def _has_unknown_shape(operation: Any, given: list[Tensor]) -> bool:
    """Whether the host must wait for the values of the arguments to know the shape of the
    result."""
    if operation is torch.ops.aten.index.Tensor:
        return any(index.dtype == torch.bool for index in given[1:])
    return operation in (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)
