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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specnb.cache import RaggedCache
from specnb.step import Batch, Setup

WAITS = {"nonzero", "masked_select", "_unique2"}
"""Operations whose result has a size that depends on the values of a tensor. A number read by
Python is not found here (and need not be: what follows from it would not be replayed); tensors
without values show it."""


class Tape(TorchDispatchMode):
    """The operations of one call of `function`; later calls replay them."""

    def __init__(self, function: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.function = function
        self.operations: list[tuple[Callable[[], Any], list[Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} makes the host wait"
        again = partial(func, *args, **(kwargs or {}))
        result = again()
        known = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        new = [one if isinstance(one, Tensor) and _memory(one) not in known else None for one in tree_leaves(result)]
        self.operations.append((again, new))
        return result

    def __call__(self) -> Any:
        if not self.operations:
            with self, patch.object(RaggedCache, "shortens", False):
                self.result = self.function()
            return self.result
        for again, new in self.operations:
            for kept, made in zip(new, tree_leaves(again()), strict=True):
                if kept is not None:  # neither a view nor something changed in place
                    kept.copy_(made)
        return self.result


def taped(batch_class: type[Batch]) -> type[Batch]:
    """A subclass whose first step is recorded and whose later steps are replayed."""

    class Taped(batch_class):  # type: ignore[misc, valid-type]  # a base that is given
        def __init__(self, setup: Setup) -> None:
            super().__init__(setup)
            self.widths = (setup.gamma,)  # as on a device, where the host does not know what was proposed
            self.graph = Tape(self.in_parts)

    return Taped


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
