"""The steps that are timed are those of the generation, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import llama

from specnb.decoding.generate import generate
from studies.batching.batch_layouts import LAYOUTS
from studies.batching.layout_speeds import LENGTHS, SMOKE, items, measure, steps_of

PROMPTS = [[1, 2, 3], [0, 2], [3, 1, 0, 2]]


@pytest.mark.parametrize("name", LAYOUTS)
@torch.inference_mode()
def test_the_steps_of_a_generation_are_repeated(name: str) -> None:
    """After each step the rows hold all their tokens but the newest, also where the record has more rows."""
    target, draft = llama(seed=0), llama(seed=1)
    record = generate(target, PROMPTS, draft, gamma=2, max_new_tokens=6, progress=False).record
    for size in (1, 3):
        made: list[Any] = []

        def layout(*arguments: Any, own: list[Any] = made) -> Any:
            own.append(LAYOUTS[name](*arguments))
            return own[-1]

        steps = list(steps_of(layout, target, PROMPTS[:size], record, 6))
        assert len(steps) == int(record.active.all(axis=0).sum())
        before = torch.tensor([len(prompt) - 1 for prompt in PROMPTS[:size]])
        for number, step in enumerate(steps):
            step()
            emitted = torch.from_numpy(record.emitted[:size, : number + 1].sum(axis=1))
            assert torch.equal(made[0].lengths, before + emitted)


def test_every_layout_and_size_has_a_line() -> None:
    assert items() == list(LENGTHS)
    table = measure("varied", **SMOKE)
    assert table.layout.tolist() == [*LAYOUTS] * 2
    assert table.rows.tolist() == [1] * 3 + [2] * 3
    assert (table.low <= table.ms).all()
    assert (table.ms <= table.high).all()
    assert (table.low > 0).all()
    assert (table.steps >= 1).all()
