"""How the host reads how far the rows are; which prompt gets which row is tested in test_generate.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specnb.decoding.scheduler import ProgressReader


def test_on_a_device_the_status_is_that_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied to memory from which the host can read it without waiting for the step in progress."""
    seen: list[Any] = []

    class Event:
        def __init__(self) -> None:
            self.number = seen.count("event")
            seen.append("event")

        def record(self) -> None:
            seen.append(("record", self.number))

        def synchronize(self) -> None:
            seen.append(("synchronize", self.number))

    class Pinned:
        def copy_(self, status: Tensor, non_blocking: bool = False) -> None:
            assert non_blocking
            self.values = status.clone()

        def tolist(self) -> Any:
            return self.values.tolist()

    def empty(shape: Any, dtype: torch.dtype, pin_memory: bool = False) -> Pinned:
        assert (shape, dtype, pin_memory) == ((2,), torch.int64, True)
        return Pinned()

    state = SimpleNamespace(tokens=SimpleNamespace(is_cuda=True), status=torch.tensor([5, 5]))
    reader = ProgressReader(SimpleNamespace(state=state))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", empty)
    assert reader.read() is None
    state.status.copy_(torch.tensor([4, 3]))
    assert reader.read() == [5, 5]
    state.status.copy_(torch.tensor([2, 1]))
    assert reader.read() == [4, 3]
    assert seen == [
        "event", ("record", 0), "event", ("record", 1), ("synchronize", 0), "event", ("record", 2), ("synchronize", 1),
    ]  # fmt: skip
    reader.discard()
    assert reader.read() is None
