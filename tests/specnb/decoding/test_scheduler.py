"""The scheduler, with a batch that decodes nothing, and how the host reads how far the rows are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny import llama
from torch import Tensor

from specnb.decoding.record import CompletedRow
from specnb.decoding.request import Request
from specnb.decoding.scheduler import ProgressReader, Scheduler


class Rows:
    """Stands for `Batch`: remembers what enters which row; the result of a row is the prompt that it had."""

    def __init__(self) -> None:
        self.state = self
        self.prompt_in: dict[int, list[int]] = {}
        self.entered: list[tuple[Any, ...]] = []

    def uniforms(self, seed: int, numbers: list[int], new: int) -> tuple[int, list[int], int]:
        return seed, numbers, new

    def enter(self, rows: list[int], prompts: list[list[int]], own: Any, new: int) -> None:
        self.entered.append((rows, prompts, own, new))
        self.prompt_in.update(zip(rows, prompts, strict=True))

    def completed_rows(self, rows: list[int]) -> list[CompletedRow]:
        return [CompletedRow(self.prompt_in[row], np.zeros((0, 3), dtype=np.int64), np.zeros((0, 0))) for row in rows]


def test_prompts_enter_the_rows_that_have_ended_in_their_order() -> None:
    """Six prompts in three rows; each status is what remains in the rows."""
    rows: Any = Rows()
    prompts = [[number] for number in range(6)]
    request = Request(llama(6), prompts, max_new_tokens=5, seed=7, batch_size=3, numbers=range(10, 16))
    scheduler = Scheduler(request, rows)
    assert rows.entered == [([0, 1, 2], [[0], [1], [2]], (7, [10, 11, 12], 5), 5)]
    assert scheduler.expected == 30
    assert scheduler.tokens_to_come([5, 5, 5]) == 30
    assert scheduler.tokens_to_come([1, 4, 0]) == 5 + 15
    assert not scheduler.replace([1, 4, 2])
    assert scheduler.replace([0, 4, 0])
    assert rows.entered[1:] == [([0, 2], [[3], [4]], (7, [13, 14], 5), 5)]
    assert scheduler.tokens_to_come([5, 4, 5]) == 14 + 5
    assert scheduler.replace([0, 0, 3]), "one prompt waits for two rows"
    assert rows.entered[2:] == [([0], [[5]], (7, [15], 5), 5)]
    assert not scheduler.replace([0, 0, 0])
    assert len(rows.entered) == 3
    assert [row.tokens for row in scheduler.completed_rows()] == prompts


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
