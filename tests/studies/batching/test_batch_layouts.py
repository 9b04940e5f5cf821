"""Batch layouts: the tokens of the library's loop, the distributions of each row alone, and their
sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from specnb.decoding import generate as loop
from tiny import LIMIT, gpt2, llama, near_copy, neox, qwen2
from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb.rules import exact_match
from specnb.sampler import generate as plain_generate
from studies.batching import batch_layouts
from studies.batching.batch_layouts import LAYOUTS, generate, mask_needed, slots_needed, steps_of
from studies.batching.layout_bugs import LAYOUT_BUGS, max_logit_difference

MAKERS = [llama, gpt2, neox, qwen2]
PROMPTS = [[1], [2, 3, 1], [0, 1, 2, 3, 3]]
TEXTS = [[], [2, 3, 1], [0, 1]]
APART = 1e-10


def pair_of(make: Callable[..., PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedModel]:
    target = make(dtype=torch.float64)
    return target, near_copy(target, noise=0.3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", MAKERS)
def test_every_layout_gives_the_tokens_of_the_library(make: Callable[..., PreTrainedModel], layout: str) -> None:
    target, draft = pair_of(make)
    asked: list[dict[str, Any]] = [
        {"gamma": 1, "max_new_tokens": 4, "seed": 6, "sampling": Sampling(0.5, top_k=3)},
        # Up to the last position.
        {"gamma": 4, "max_new_tokens": LIMIT - 5, "seed": 7, "rule": exact_match},
    ]
    for settings in asked:
        expected = loop.generate(target, PROMPTS, draft, progress=False, **settings).tokens
        assert generate(LAYOUTS[layout], target, PROMPTS, draft, **settings) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", MAKERS)
def test_every_row_has_the_distributions_it_has_alone(make: Callable[..., PreTrainedModel], layout: str) -> None:
    nothing: list[list[int]] = [[], []]  # a batch may begin without any token
    for texts in (TEXTS, nothing):
        assert max_logit_difference(LAYOUTS[layout], make(dtype=torch.float64), texts, n=2, rounds=5) < APART


@pytest.mark.parametrize("bug", LAYOUT_BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    layout, (target, draft) = LAYOUT_BUGS[bug].layout, pair_of(gpt2)
    assert max_logit_difference(layout, target, TEXTS, n=2, rounds=5) > 0.1
    asked: dict[str, Any] = {"gamma": 3, "max_new_tokens": 9}
    assert any(
        generate(layout, target, PROMPTS, draft, seed=seed, **asked)
        != loop.generate(target, PROMPTS, draft, seed=seed, progress=False, **asked).tokens
        for seed in range(6)
    )


def test_entries_are_copied_only_where_they_move() -> None:
    rows: Any = batch_layouts.PaddedBatch(llama(), [[1, 2], [3, 0]], 8)
    rows.run(torch.tensor([[1, 2, 3], [0, 0, 1]]))
    before = rows.cache.layers[0].keys.data_ptr()
    rows.crop(torch.tensor([2, 2]))
    assert rows.cache.layers[0].keys.data_ptr() == before
    rows.crop(torch.tensor([1, 0]))
    assert rows.cache.layers[0].keys.data_ptr() != before
    assert rows.positions.tolist() == [[-1, 0, 1], [0, 1, 2]]
    packed: Any = batch_layouts.PackedBatch(llama(), [[1], [2, 3]], 9)
    keys = packed.cache.layers[0].keys
    packed.crop(torch.tensor([0, 0]))
    assert packed.cache.layers[0].keys is keys


@pytest.mark.parametrize("name", LAYOUTS)
@torch.inference_mode()
def test_the_steps_that_are_timed_are_those_of_the_generation_and_sizes_are_as_computed(name: str) -> None:
    """After each step the rows hold all their tokens but the newest, also where the record has more
    rows."""
    target, draft = llama(seed=0), llama(seed=1)
    record = plain_generate(target, PROMPTS, draft, gamma=2, max_new_tokens=6, progress=False).record
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
            emitted = torch.from_numpy(record.emitted[:size, : number + 1])
            known = before + emitted.sum(1)
            assert torch.equal(made[0].lengths, known)
            during = (known - emitted[:, number] + 3).tolist()
            longest = max(map(len, PROMPTS[:size])) + 6 + 2
            sizes = slots_needed(name, known.tolist(), longest), mask_needed(name, during, longest, 3)
            assert made[0].sizes() == sizes
