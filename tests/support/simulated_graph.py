"""`torch.cuda.CUDAGraph` on the simulated device: operations that were captured, carried out again
in place.

As on a GPU, a capture only records: memory that it changes is afterwards as before, and memory that
it makes holds nothing before the first replay. A graph keeps the memory and the numbers with which
it was captured. If one of them is no longer what the program has, a replay raises here; on a GPU it
would compute something wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default,
    aten.new_empty_strided.default,
}  # fmt: skip


class Number(Tensor):
    """A number that was on the host when an operation was captured."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class Operation(NamedTuple):
    """What is called again, what it gave, and its arguments in a form that can be compared."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    result: Any
    described: tuple[Any, ...]

    def replay(self) -> None:
        """Computes the same into the same memory."""
        again = self.function(*self.args, **self.kwargs)
        for kept, new in zip(tensors_of(self.result), tensors_of(again), strict=True):
            if kept is not new:
                kept.copy_(new)


class Graph:
    """What `torch.cuda.graph` captures, with host tensors in the place of those on the device.

    `in_use` gives the addresses of the memory in which the program has tensors.
    """

    def __init__(self, in_use: Callable[[], set[int]]) -> None:
        self.in_use = in_use
        self.operations: list[Operation] = []
        # Memory that the capture made: address -> number, a tensor.
        self.made: dict[int, tuple[int, Tensor]] = {}
        self.used: dict[int, Tensor] = {}  # memory that was there before
        self.before: dict[int, Any] = {}  # what of it the capture changes, as it was
        self.numbers: list[tuple[Tensor, Number]] = []  # numbers of the host, and as they were

    def add(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation, which is carried out to know what it gives."""
        for tensor in tensors_of(args, kwargs):
            if address(tensor) not in self.made:
                self.used.setdefault(address(tensor), tensor)
        for tensor in written(function, args, kwargs):
            if address(tensor) in self.used and address(tensor) not in self.before:
                self.before[address(tensor)] = tensor.untyped_storage().clone()
        described = (function, *map(self._described, leaves((args, kwargs))))
        result = function(*args, **kwargs)
        for tensor in tensors_of(result):
            if address(tensor) not in self.used:
                self.made.setdefault(address(tensor), (len(self.made), tensor))
        if is_work(function):
            self.operations.append(Operation(function, args, kwargs, result, described))
        return result

    def number(self, tensor: Tensor) -> Number:
        """A number of the host as it is now."""
        kept = tensor.clone().as_subclass(Number)
        self.numbers.append((tensor, kept))
        return kept

    def undo(self) -> None:
        """Restores what the operations have changed."""
        for at, held in self.before.items():
            self.used[at].untyped_storage().copy_(held)

    def forget(self) -> None:
        """What was made holds no values: NaN, or -1."""
        for _, tensor in self.made.values():
            tensor.untyped_storage().fill_(255)  # type: ignore[attr-defined]  # the stub lacks it

    def replay(self) -> None:
        """Carries out all operations. Raises `RuntimeError` if a number has changed since, or
        memory was freed."""
        for number, captured in self.numbers:
            if not torch.equal(number, captured):
                was, now = captured.item(), number.item()
                raise RuntimeError(f"the graph was captured with the number {was}, which is {now} now")
        in_use = self.in_use()
        for at, tensor in self.used.items():
            if at not in in_use and not isinstance(tensor, Number):
                raise RuntimeError(f"the graph uses a tensor {tuple(tensor.shape)} that no longer exists")
        for operation in self.operations:
            operation.replay()

    def require_same(self, other: Graph) -> None:
        """Raises `RuntimeError` unless the same function, captured again, has the same
        operations."""
        for captured, now in zip(self.operations, other.operations, strict=False):
            if captured.described != now.described:
                raise RuntimeError(f"the graph has {captured.described}, which would be {now.described} now")
        own, new = len(self.operations), len(other.operations)
        if own != new:
            raise RuntimeError(f"the graph has {own} operations, which would be {new} now")

    def _described(self, leaf: Any) -> Any:
        if isinstance(leaf, Number):
            return repr(leaf.item())
        if not isinstance(leaf, Tensor):
            return repr(leaf)  # NaN equals itself
        at = address(leaf)
        memory = f"tensor {self.made[at][0]} of the capture" if at in self.made else f"memory at {at}"
        return memory, leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.storage_offset()


def leaves(tree: Iterable[Any]) -> list[Any]:
    """What nested arguments or results consist of."""
    found: list[Any] = []
    for branch in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(branch, dict | list | tuple):
            found += leaves(branch)
        else:
            found.append(branch)
    return found


def tensors_of(*trees: Any) -> list[Tensor]:
    """All tensors in nested arguments or results."""
    return [leaf for leaf in leaves(trees) if isinstance(leaf, Tensor)]


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nested arguments or results with `function` of each leaf."""
    if isinstance(tree, dict):
        return {name: mapped(function, branch) for name, branch in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([mapped(function, branch) for branch in tree])
    return function(tree)


def address(tensor: Tensor) -> int:
    """Names the memory of a tensor; views have that of their base."""
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # torch does not say


@cache
def is_work(function: Any) -> bool:
    """Whether an operation computes or copies something: not a view, and not an allocation."""
    return not function.is_view and function not in ALLOCATIONS


def written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operation changes."""
    found = [args[number] if number < len(args) else kwargs.get(name) for number, name in _written(function)]
    return tensors_of(found)


@cache
def _written(function: Any) -> list[tuple[int, str]]:
    arguments = enumerate(function._schema.arguments)
    return [(number, one.name) for number, one in arguments if one.alias_info is not None and one.alias_info.is_write]
