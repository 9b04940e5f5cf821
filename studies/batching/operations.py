"""Listen to the operations on tensors that some code executes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operation(NamedTuple):
    """One operation that was executed: an overload of `torch.ops`, its arguments and its result."""

    function: Any
    args: Any
    kwargs: Any
    result: Any

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @property
    def outputs(self) -> list[Tensor]:
        """The tensors of the result; some may be views of inputs or inputs changed in place."""
        return [leaf for leaf in tree_leaves(self.result) if isinstance(leaf, Tensor)]


class OperationRecorder(TorchDispatchMode):
    """While entered, calls `record` with every `Operation` right after it was executed.

    >>> import torch
    >>> names = []
    >>> with OperationRecorder(lambda operation: names.append(str(operation.function))):
    ...     _ = torch.zeros(2) + 1
    >>> names
    ['aten.zeros.default', 'aten.add.Tensor']
    """

    def __init__(self, record: Callable[[Operation], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.record(Operation(func, args, kwargs or {}, result))
        return result
