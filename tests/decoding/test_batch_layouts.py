"""Batch layouts: the tokens of the library's loop, the distributions of each row alone, and their sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import LIMIT, gpt2, llama, near_copy, neox, qwen2
from transformers import PreTrainedModel

from specnb.audit.bugs.layout import LAYOUT_BUGS, max_logit_difference
from specnb.decoding import batch_layouts, loop
from specnb.decoding.batch_layouts import LAYOUTS, BatchContinuation, generate, mask_needed, slots_needed
from specnb.models.memory import cache_bytes
from specnb.sampling.distributions import Sampling
from specnb.sampling.verification import exact_match

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
    for settings in (
        {"gamma": 3, "max_new_tokens": 9, "seed": 5},
        {"gamma": 1, "max_new_tokens": 4, "seed": 6, "sampling": Sampling(0.5, top_k=3)},
        {"gamma": 4, "max_new_tokens": LIMIT - 5, "seed": 7, "rule": exact_match},  # up to the last position
    ):
        expected = loop.generate(target, PROMPTS, draft, progress=False, **settings).tokens
        assert generate(LAYOUTS[layout], target, PROMPTS, draft, **settings) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("make", MAKERS)
def test_every_row_has_the_distributions_it_has_alone(make: Callable[..., PreTrainedModel], layout: str) -> None:
    assert max_logit_difference(LAYOUTS[layout], make(dtype=torch.float64), TEXTS, n=2, rounds=5) < APART


@pytest.mark.parametrize("bug", LAYOUT_BUGS)
@pytest.mark.parametrize("make", MAKERS)
def test_planted_bugs_are_found(make: Callable[..., PreTrainedModel], bug: str) -> None:
    layout = LAYOUT_BUGS[bug].layout
    target, draft = pair_of(make)
    assert max_logit_difference(layout, target, TEXTS, n=2, rounds=5) > 0.1
    asked: dict[str, Any] = {"gamma": 3, "max_new_tokens": 9}
    wrong = [
        seed
        for seed in range(6)
        if generate(layout, target, PROMPTS, draft, seed=seed, **asked)
        != loop.generate(target, PROMPTS, draft, seed=seed, progress=False, **asked).tokens
    ]
    assert wrong


def test_learned_positions_need_a_reset_and_rotary_ones_only_an_order() -> None:
    """Counting one text from another number: nothing changes where only differences of positions count."""
    tokens = torch.tensor([[1, 0, 3, 2]])
    with torch.inference_mode():
        for make, same in ((llama, True), (neox, True), (gpt2, False)):
            model = make(dtype=torch.float64)
            here, there = (model(tokens, position_ids=torch.arange(4)[None] + start).logits for start in (0, 7))
            # Angles are computed in float32.
            assert torch.allclose(here, there, rtol=0, atol=1e-5) == same


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sizes_are_as_computed(layout: str) -> None:
    target, draft = pair_of(qwen2)
    gamma, asked = 2, 7
    made = BatchContinuation(LAYOUTS[layout], target, PROMPTS, draft, gamma=gamma, max_new_tokens=asked, seed=3)
    longest = max(map(len, PROMPTS)) + asked + gamma
    while not made.done:
        before = made.target.lengths.tolist()
        made.step()
        for rows in (made.target, made.draft):
            slots, _ = rows.sizes()
            assert slots == slots_needed(layout, rows.lengths.tolist(), longest)
            held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers_of(rows))
            assert held == slots * cache_bytes(target)
        during = [length + gamma + 1 for length in before]
        assert made.target.sizes()[1] == mask_needed(layout, during, longest, gamma + 1)


def layers_of(rows: Any) -> Any:
    """The layers of the cache, which one of the layouts keeps in a runner."""
    return (rows.runner if hasattr(rows, "runner") else rows).cache.layers


def test_both_caches_hold_all_but_the_newest_token() -> None:
    target, draft = pair_of(gpt2)
    for layout in LAYOUTS.values():
        made = BatchContinuation(layout, target, PROMPTS, draft, gamma=3, max_new_tokens=6)
        emitted = [0, 0, 0]
        while not made.done:
            emitted = [old + new for old, new in zip(emitted, made.step(), strict=True)]
            assert emitted == [len(text) for text in made.sequences]
            known = [len(prompt) + new - 1 for prompt, new in zip(PROMPTS, emitted, strict=True)]
            assert made.target.lengths.tolist() == made.draft.lengths.tolist() == known


def test_equal_rows_are_cropped_without_a_copy() -> None:
    rows: Any = batch_layouts.PaddedBatch(llama(), [[1, 2], [3, 0]], 8)
    rows.run(torch.tensor([[1, 2, 3], [0, 0, 1]]))
    before = rows.cache.layers[0].keys.data_ptr()
    rows.crop(torch.tensor([2, 2]))
    assert rows.cache.layers[0].keys.data_ptr() == before
    rows.crop(torch.tensor([1, 0]))
    assert rows.cache.layers[0].keys.data_ptr() != before


def test_columns_of_padding_alone_are_cut_off() -> None:
    rows = batch_layouts.PaddedBatch(llama(), [[1], [3, 0, 2, 1]], 8)
    assert rows.positions.tolist() == [[-3, -2, -1, 0], [0, 1, 2, 3]]
    rows.crop(torch.tensor([0, 2]))
    assert rows.positions.tolist() == [[-1, 0], [0, 1]]


@pytest.mark.parametrize(("prompts", "message"), [([], "at least one"), ([[1], []], "at least one token in each")])
def test_no_prompts_and_empty_ones_are_refused(prompts: list[list[int]], message: str) -> None:
    target, draft = pair_of(llama)
    with pytest.raises(ValueError, match=message):
        BatchContinuation(batch_layouts.PaddedBatch, target, prompts, draft)


def test_models_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="same vocabulary"):
        BatchContinuation(batch_layouts.PackedBatch, llama(vocab=4), [[1]], llama(vocab=5))
    with pytest.raises(TypeError, match="training mode"):
        BatchContinuation(batch_layouts.PackedBatch, llama().train(), [[1]], llama())
