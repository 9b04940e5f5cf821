"""A CUDA graph emulated on the CPU: what is captured once is replayed without any Python.

`Tape` calls a function once and keeps every operation on tensors. When replayed, the same
operations read and write the same memory, and nothing else happens. So a step that decides
something on the host, allocates new state or counts in Python produces other tokens when it is
replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._pytree import tree_leaves

from specnb.cache import RaggedCache
from specnb.step import Batch
from studies.batching.operations import Operation, OperationRecorder

WAITS = {"nonzero", "masked_select", "_unique2"}
"""Operations whose result has a size that depends on the values of a tensor. A number read by
Python is not found here (and need not be: what follows from it would not be replayed); tensors
without values show it."""


class Tape:
    """The operations of one call of `function`; later calls replay them."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.operations: list[tuple[Callable[[], Any], list[Tensor | None]]] = []

    def record(self, operation: Operation) -> None:
        name = operation.function.overloadpacket.__name__
        assert name not in WAITS, f"{name} makes the host wait"
        again = partial(operation.function, *operation.args, **operation.kwargs)
        known = {_memory(tensor) for tensor in operation.inputs}
        results = tree_leaves(operation.result)
        new = [one if isinstance(one, Tensor) and _memory(one) not in known else None for one in results]
        self.operations.append((again, new))

    def __call__(self) -> None:
        if not self.operations:
            with OperationRecorder(self.record), patch.object(RaggedCache, "shortens", False):
                self.function()
            return
        for again, new in self.operations:
            for kept, made in zip(new, tree_leaves(again()), strict=True):
                if kept is not None:  # neither a view nor something changed in place
                    kept.copy_(made)


def taped(batch_class: type[Batch]) -> type[Batch]:
    """A subclass whose first step is recorded and whose later steps are replayed."""

    class Taped(batch_class):  # type: ignore[misc, valid-type]  # a base that is given
        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            self.wrap(Tape, "step")

    return Taped


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
