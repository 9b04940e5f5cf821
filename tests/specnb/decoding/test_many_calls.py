"""Many prompts, many calls and many compiled settings: all come to their end, and nothing stays in memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tiny import llama, near_copy

from specnb.decoding import generate as loop
from specnb.decoding.generate import Study, forget_compiled, generate
from specnb.decoding.step import Batch

TARGET = llama(dtype=torch.float64)
DRAFT = near_copy(TARGET, 0.1)


def test_a_thousand_prompts_take_turns_in_64_rows() -> None:
    """Each gets the tokens that it would get alone."""
    prompts = [[number % 4, number // 4 % 4, number // 16 % 4] for number in range(1000)]
    asked: dict[str, Any] = {"gamma": 2, "max_new_tokens": 4, "eos": 3, "progress": False}
    made = generate(TARGET, prompts, DRAFT, batch_size=64, **asked)
    assert len(made.tokens) == len(made.record.emitted) == 1000
    assert all(len(tokens) == 4 or tokens[-1] == 3 for tokens in made.tokens)
    for row in (0, 63, 64, 500, 999):
        assert generate(TARGET, [prompts[row]], DRAFT, study=Study(rows=[row]), **asked).tokens == [made.tokens[row]]


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def test_thirty_calls_leave_no_tensor_behind() -> None:
    def call(seed: int) -> None:
        generate(TARGET, [[1], [2, 3]], DRAFT, gamma=seed % 4, max_new_tokens=3, seed=seed, progress=False)

    call(0)
    before = live_tensors()
    for seed in range(30):
        call(seed)
    assert live_tensors() <= before  # fewer where something of an earlier test goes meanwhile


def test_of_ten_compiled_settings_eight_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two used longest ago are forgotten with their tensors. Steps are kept as if compiled, but run eagerly."""
    batches: list[weakref.ref[Batch]] = []

    class Watched(Batch):
        def __init__(self, *settings: object) -> None:
            super().__init__(*settings)  # type: ignore[arg-type]
            batches.append(weakref.ref(self))

    monkeypatch.setattr(loop, "Compiled", lambda function: function)
    forget_compiled()
    for rows in range(1, 11):
        for _ in range(2):  # the second call finds the step of the first
            generate(
                TARGET, [[1]] * rows, max_new_tokens=3, compile=True, progress=False, study=Study(batch_class=Watched)
            )
    gc.collect()
    assert [batch() is not None for batch in batches] == [False] * 2 + [True] * 8
    forget_compiled()
    gc.collect()
    assert all(batch() is None for batch in batches)
