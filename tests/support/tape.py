"""A CUDA graph's terms, kept on a processor: what is captured once is replayed without any Python.

`Tape` runs a function once and writes down every operation on tensors; when replayed, the same operations
read and write the same memory, and nothing else happens. So whatever a step decides on the host, makes anew or
counts in Python would show as another text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"nonzero", "masked_select", "_unique2"}
"""Operations whose result has a size that depends on what is in a tensor. That Python reads a number is not seen
here (and needs not be: what it makes of it would not be replayed); tensors without values show it."""


class Tape(TorchDispatchMode):
    """The operations of one run of `function`; calling it replays them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.operations: list[tuple[Callable[[], Any], list[Tensor | None]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in WAITS, f"{name} makes the host wait"
        again = partial(func, *args, **(kwargs or {}))
        made = again()
        known = {_memory(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        new = [one if isinstance(one, Tensor) and _memory(one) not in known else None for one in tree_leaves(made)]
        self.operations.append((again, new))
        return made

    def __call__(self) -> None:
        if not self.operations:
            with self:
                self.function()
            return
        for again, new in self.operations:
            for own, made in zip(new, tree_leaves(again()), strict=True):
                if own is not None:  # neither a view nor something changed in place
                    own.copy_(made)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
