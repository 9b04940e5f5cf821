"""Caches: cropping equals never having run the tokens, and what cannot be cropped is refused by
name."""

from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, ROUNDING, llama
from transformers import PreTrainedModel

from specnb.cache import CachedModel, cache_argument

TOKENS = torch.tensor([[0, 3, 1, 2, 0, 1, 1, 3], [2, 2, 0, 1, 3, 3, 0, 1]])
LENGTH = TOKENS.shape[1]


# Rows of a RaggedCache that stand at different places: row 0 after 4 tokens, row 1 after 6.
ENDS = torch.tensor([[3], [5]])


def ragged(model: PreTrainedModel) -> CachedModel:
    runner = CachedModel(model, 10)
    runner.run(TOKENS[:, :6], torch.arange(6).expand(2, -1), keep=1)
    return runner


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_row_goes_on_from_where_it_stands_whatever_is_hidden_behind(architecture: str, attention: str) -> None:
    """Going back to a lower slot is the crop: what lies behind is overwritten or hidden."""
    model = ARCHITECTURES[architecture](dtype=torch.float64)
    model.set_attn_implementation(attention)
    clean, poisoned = ragged(model), ragged(model)
    layers: Any = poisoned.cache.layers
    for layer in layers:
        for row, end in enumerate(ENDS[:, 0].tolist()):
            layer.keys[row, :, end + 1 :] = 1e30
            layer.values[row, :, end + 1 :] = -1e30
    tokens = torch.tensor([[2], [0]])
    logits = clean.run(tokens, ENDS, keep=1)
    assert torch.equal(logits, poisoned.run(tokens, ENDS, keep=1))
    for row, (end,) in enumerate(ENDS.tolist()):
        alone = model(input_ids=torch.cat([TOKENS[row, :end], tokens[row]])[None], use_cache=False).logits[0, -1]
        torch.testing.assert_close(logits[row, 0], alone, rtol=0, atol=ROUNDING[attention])


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_slots_that_no_token_sees_are_not_read_and_change_nothing(architecture: str) -> None:
    """Before and beyond the first multiple, and in a tree, whose tokens may see slots above their
    own."""
    few, every = (CachedModel(ARCHITECTURES[architecture](dtype=torch.float64), 200) for _ in range(2))
    every.cache.shortens = False
    branches = torch.zeros(2, LENGTH, 200, dtype=torch.bool)
    branches[..., :4] = branches[..., 150] = True
    ahead = torch.arange(LENGTH).expand(2, -1)
    for start, visible, seen in ((0, None, 64), (60, None, 128), (64, branches, 192)):
        there, expected = (one.run(TOKENS, ahead + start, 3, visible=visible) for one in (few, every))
        torch.testing.assert_close(there, expected, rtol=0, atol=1e-12)
        assert (few.cache.seen, every.cache.seen) == (seen, 200)


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_nan_in_a_hidden_slot_is_loud(attention: str) -> None:
    """A mask cannot hide NaN, since 0 times NaN is NaN; then the whole row is NaN, which the loop
    reports."""
    model = llama()
    model.set_attn_implementation(attention)
    runner = ragged(model)
    layers: Any = runner.cache.layers
    for layer in layers:
        layer.values[0, :, -1] = torch.nan
    logits = runner.run(torch.tensor([[2], [0]]), ENDS, keep=1)
    assert logits[0].isnan().all()
    assert not logits[1].isnan().any()


@torch.inference_mode()
def test_a_cache_is_given_by_the_name_that_the_model_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cache` in newer versions of transformers, which warn of the older name."""
    model, slots = llama(), torch.arange(LENGTH).expand(2, -1)
    expected = CachedModel(model, LENGTH).run(TOKENS, slots, keep=1)
    known, forward = cache_argument(model), model.forward

    def renamed(*, cache: Any, **more: Any) -> Any:
        return forward(**{known: cache}, **more)

    monkeypatch.setattr(model, "forward", renamed)
    assert torch.equal(CachedModel(model, LENGTH).run(TOKENS, slots, keep=1), expected)
