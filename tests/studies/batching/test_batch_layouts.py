"""Batch layouts: the tokens of the library's loop, the distributions of each row alone, and their sizes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import LIMIT, gpt2, llama, near_copy, neox, qwen2
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding import generate as loop
from specnb.distributions import Sampling, uniforms
from specnb.models.cache import cache_bytes
from specnb.rules import exact_match, token_verification
from studies.batching import batch_layouts
from studies.batching.batch_layouts import LAYOUTS, BatchContinuation, generate, mask_needed, slots_needed
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


# What each layout gives the model, holds and keeps, by hand: two sequences, then two tokens for each.

TWO = [[1], [2, 3]]
NEXT = torch.tensor([[3, 0], [1, 2]])


def calls_of(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The arguments of each later call of `model`; the mask as a table of what is visible."""
    calls: list[dict[str, Any]] = []

    def keep(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert not positional
        mask = named["attention_mask"]
        assert mask.dtype == model.dtype
        calls.append(named | {"attention_mask": (mask[:, 0] == 0).int().tolist()})

    model.register_forward_pre_hook(keep, with_kwargs=True)
    return calls


def test_padding_gives_the_model_rows_that_end_together() -> None:
    model = llama(dtype=torch.float64)
    calls = calls_of(model)
    rows: Any = batch_layouts.PaddedBatch(model, TWO, 9)
    assert rows.sizes() == (4, 8)
    assert rows.run(NEXT).shape == (2, 2, 4)
    first, second = calls
    assert first["input_ids"].tolist() == [[0, 1], [2, 3]]
    assert first["position_ids"].tolist() == [[0, 0], [0, 1]]
    assert first["attention_mask"] == [[[0, 0], [0, 1]], [[1, 0], [1, 1]]]
    assert second["input_ids"].tolist() == NEXT.tolist()
    assert second["position_ids"].tolist() == [[1, 2], [2, 3]]
    assert second["attention_mask"] == [[[0, 1, 1, 0], [0, 1, 1, 1]], [[1, 1, 1, 0], [1, 1, 1, 1]]]
    assert all(call["use_cache"] is True for call in calls)
    assert rows.sizes() == (8, 16)
    assert rows.owners.tolist() == [[0] * 4] * 2
    assert rows.positions.tolist() == [[-1, 0, 1, 2], [0, 1, 2, 3]]
    keys, values = rows.cache.layers[0].keys.clone(), rows.cache.layers[0].values.clone()
    rows.crop(torch.tensor([2, 0]))
    assert rows.lengths.tolist() == [1, 4]
    assert rows.positions.tolist() == [[-3, -2, -1, 0], [0, 1, 2, 3]]
    assert rows.owners.tolist() == [[0] * 4] * 2
    for now, before in ((rows.cache.layers[0].keys, keys), (rows.cache.layers[0].values, values)):
        assert torch.equal(now[0, :, 3], before[0, :, 1])
        assert torch.equal(now[1], before[1])
    rows.crop(torch.tensor([0, 3]))
    assert rows.sizes() == (2, 16)
    assert (rows.positions.tolist(), rows.owners.tolist()) == ([[0], [0]], [[0], [0]])
    assert torch.equal(rows.cache.layers[0].keys[:, :, 0], torch.stack([keys[0, :, 1], keys[1, :, 0]]))


def test_rows_of_equal_length_are_cropped_from_their_common_end() -> None:
    rows: Any = batch_layouts.PaddedBatch(llama(dtype=torch.float64), TWO, 9)
    rows.run(NEXT)
    keys = rows.cache.layers[0].keys.clone()
    rows.crop(torch.tensor([1, 1]))
    assert (rows.positions.tolist(), rows.lengths.tolist()) == ([[-1, 0, 1], [0, 1, 2]], [2, 3])
    assert rows.owners.shape == (2, 3)
    assert torch.equal(rows.cache.layers[0].keys, keys[:, :, :3])


def test_packing_gives_the_model_one_row_of_all_sequences() -> None:
    model = llama(dtype=torch.float64)
    calls = calls_of(model)
    rows: Any = batch_layouts.PackedBatch(model, TWO, 9)
    assert rows.sizes() == (3, 9)
    logits = rows.run(NEXT)
    assert logits.shape == (2, 2, 4)
    first, second = calls
    assert first["input_ids"].tolist() == [[1, 2, 3]]
    assert first["position_ids"].tolist() == [[0, 0, 1]]
    assert first["attention_mask"] == [[[1, 0, 0], [0, 1, 0], [0, 1, 1]]]
    assert second["input_ids"].tolist() == [[3, 0, 1, 2]]
    assert second["position_ids"].tolist() == [[1, 2, 2, 3]]
    assert second["attention_mask"] == [
        [[1, 0, 0, 1, 0, 0, 0], [1, 0, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 1, 0], [0, 1, 1, 0, 0, 1, 1]]
    ]
    assert all(call["use_cache"] is True for call in calls)
    assert rows.sizes() == (7, 28)
    keys = rows.cache.layers[0].keys
    rows.crop(torch.tensor([0, 0]))
    assert rows.cache.layers[0].keys is keys, "nothing is copied where nothing goes"
    rows.crop(torch.tensor([2, 1]))
    assert rows.lengths.tolist() == [1, 3]
    assert (rows.owners.tolist(), rows.positions.tolist()) == ([[0, 1, 1, 1]], [[0, 0, 1, 2]])
    assert torch.equal(rows.cache.layers[0].keys, keys[:, :, [0, 1, 2, 5]])
    assert rows.sizes() == (4, 28)


def test_pointers_give_the_model_slots_behind_each_row() -> None:
    model = llama(dtype=torch.float64)
    calls = calls_of(model)
    rows = batch_layouts.MaskedBatch(model, TWO, 5)
    assert rows.sizes() == (10, 0)
    assert rows.run(NEXT).shape == (2, 2, 4)
    first, second = calls
    assert first["input_ids"].tolist() == [[1, 0], [2, 3]]
    assert first["position_ids"].tolist() == [[0, 1], [0, 1]]
    assert first["logits_to_keep"] == 1
    assert second["position_ids"].tolist() == [[1, 2], [2, 3]]
    assert second["attention_mask"][0] == [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]
    assert second["logits_to_keep"] == 2
    assert rows.sizes() == (10, 20)
    rows.crop(torch.tensor([2, 1]))
    assert rows.lengths.tolist() == [1, 3]
    assert rows.sizes() == (10, 20)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_may_begin_without_any_token(layout: str) -> None:
    """No forward pass is made over nothing."""
    model = llama(dtype=torch.float64)
    calls = calls_of(model)
    rows = LAYOUTS[layout](model, [[], []], 8)
    assert not calls
    assert rows.sizes() == (16 if layout == "pointers" else 0, 0)
    assert max_logit_difference(LAYOUTS[layout], llama(dtype=torch.float64), [[], []], n=2, rounds=3) < APART


@pytest.mark.parametrize("layout", ["padding", "packing"])
@pytest.mark.parametrize("limit", [4, None])
def test_positions_up_to_the_model_s_limit_are_given_as_they_are(
    layout: str, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions behind the limit, of draft tokens that are never emitted, are replaced by the last."""
    monkeypatch.setattr(batch_layouts, "context_limit", lambda model: limit)
    model = llama(dtype=torch.float64)
    rows = LAYOUTS[layout](model, [[1, 2]], 8)
    calls = calls_of(model)
    rows.run(torch.tensor([[1, 2, 3, 0]]))
    assert calls[0]["position_ids"].tolist() == [[2, 3, 4 if limit is None else 3, 5 if limit is None else 3]]


class OnHost(batch_layouts.PaddedBatch):
    """The first entries are made on the CPU, whatever the default, and moved from there."""

    def initial_entries(self, sequences: batch_layouts.Sequences) -> tuple[Tensor, Tensor, Tensor]:
        with torch.device("cpu"):
            return super().initial_entries(sequences)


class PackedOnHost(batch_layouts.PackedBatch):
    def initial_entries(self, sequences: batch_layouts.Sequences) -> tuple[Tensor, Tensor, Tensor]:
        with torch.device("cpu"):
            return super().initial_entries(sequences)


@pytest.mark.parametrize("layout", [OnHost, PackedOnHost, batch_layouts.MaskedBatch])
def test_torch_s_default_device_makes_no_difference(layout: Any) -> None:
    """Every tensor of a step is made on the model's device."""
    target, draft = pair_of(llama)
    expected = generate(layout, target, PROMPTS, draft, gamma=2, max_new_tokens=6)
    with torch.device("meta"):
        assert generate(layout, target, PROMPTS, draft, gamma=2, max_new_tokens=6) == expected


def test_settings_that_are_left_out_have_the_defaults_of_the_loop() -> None:
    target, draft = pair_of(llama)
    made = BatchContinuation(LAYOUTS["pointers"], target, TWO, draft)
    assert (made.gamma, made.asked, made.steps) == (4, 64, 0)
    assert made.sequences == [[], []]
    assert made.newest.tolist() == [[1], [3]]
    assert made.sampling == Sampling()
    assert made.rule is token_verification
    for name in ("draft", "accept", "final"):
        assert torch.equal(getattr(made.uniforms, name), getattr(uniforms(0, [0, 1], 64, 4), name))
    rows: Any = made.target
    assert rows.runner.capacity == 2 + 64 + 4  # the longest prompt, all new tokens, and gamma rejected ones
    assert made.target.lengths.tolist() == made.draft.lengths.tolist() == [0, 1]


def test_a_step_says_what_each_row_got_and_leaves_the_newest_token() -> None:
    target, draft = pair_of(llama)
    made = BatchContinuation(LAYOUTS["packing"], target, PROMPTS, draft, gamma=3, max_new_tokens=5, seed=1)
    steps, before = 0, [0, 0, 0]
    while not made.done:
        emitted = made.step()
        steps += 1
        assert made.steps == steps
        assert emitted == [len(sequence) - old for sequence, old in zip(made.sequences, before, strict=True)]
        assert made.newest.tolist() == [[sequence[-1]] for sequence in made.sequences]
        before = [len(sequence) for sequence in made.sequences]
        assert made.done == (before == [5, 5, 5])


@pytest.mark.parametrize("prompts", [[], [[1], []]])
def test_the_prompts_that_are_refused_are_named(prompts: list[list[int]]) -> None:
    target, draft = pair_of(llama)
    with pytest.raises(ValueError, match="prompts are") as caught:
        BatchContinuation(batch_layouts.PaddedBatch, target, prompts, draft)
    assert str(caught.value) == f"prompts are {prompts!r}; give at least one, and at least one token in each"


def test_a_draft_that_cannot_be_run_is_refused() -> None:
    with pytest.raises(TypeError, match="training mode"):
        BatchContinuation(batch_layouts.PackedBatch, llama(), [[1]], llama().train())


def test_the_slots_and_masks_that_are_needed() -> None:
    lengths = [3, 7, 2]
    assert [slots_needed(layout, lengths, longest=10) for layout in LAYOUTS] == [3 * 7, 3 + 7 + 2, 3 * 10]
    needed = [mask_needed(layout, lengths, longest=10, n=4) for layout in LAYOUTS]
    assert needed == [4 * 3 * 7, (4 * 3) * (3 + 7 + 2), 4 * 3 * 10]


def test_what_every_layout_has_to_write() -> None:
    with pytest.raises(NotImplementedError):
        batch_layouts.CompactedBatch(llama(), TWO)
