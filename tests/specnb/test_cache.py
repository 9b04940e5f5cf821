"""The cache of the loop, whose rows stand at different places, and cropping the caches of
transformers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, LIMIT, ROUNDING, llama
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, MistralConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from specnb.cache import CachedModel, RaggedCache, cache_argument, crop

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
def test_a_cache_is_given_by_the_name_that_the_model_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cache` in newer versions of transformers, which warn of the older name."""
    model, slots = llama(), torch.arange(LENGTH).expand(2, -1)
    expected = CachedModel(model, LENGTH).run(TOKENS, slots, keep=1)
    known, forward = cache_argument(model), model.forward

    def renamed(*, cache: Any, **more: Any) -> Any:
        return forward(**{known: cache}, **more)

    monkeypatch.setattr(model, "forward", renamed)
    assert torch.equal(CachedModel(model, LENGTH).run(TOKENS, slots, keep=1), expected)


# Cropping caches of transformers.


def filled(model: PreTrainedModel, tokens: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens, past_key_values=cache)
    return cache


def as_tuple(cache: DynamicCache) -> tuple[tuple[Tensor, Tensor], ...]:
    layers: Any = cache.layers
    return tuple((layer.keys, layer.values) for layer in layers)


@torch.inference_mode()
@pytest.mark.parametrize("taken", [0, 1, LENGTH, [2, 2], [1, 3], [4, 0], [LENGTH, 2]], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_cropped_cache_goes_on_as_the_shorter_sequences(architecture: str, taken: int | list[int]) -> None:
    """Each row ends with its newest token, and what stands before its first is masked, as padding on
    the left is."""
    model, new = ARCHITECTURES[architecture](dtype=torch.float64), TOKENS[:, :2]
    cache = filled(model, TOKENS)
    whole = as_tuple(cache)
    of_tuple: Any = crop(whole, taken)
    assert crop(cache, taken) is cache
    for layer, other, before in zip(as_tuple(cache), of_tuple, whole, strict=True):
        for states, cropped, old in zip(layer, other, before, strict=True):
            assert torch.equal(states, cropped)
            assert old.shape[-2] == LENGTH, "a tuple stays as it was"
    own = LENGTH - torch.tensor(taken).expand(2)
    width = int(own.max())
    mask = (torch.arange(width + 2) >= width - own[:, None]).long()
    positions = own[:, None] + torch.arange(2)
    following = model(input_ids=new, past_key_values=cache, attention_mask=mask, position_ids=positions).logits
    for row, length in enumerate(own.tolist()):
        alone = model(input_ids=torch.cat([TOKENS[row, :length], new[row]])[None], use_cache=False).logits
        torch.testing.assert_close(following[row], alone[0, -2:], rtol=0, atol=1e-10)


def test_what_was_read_from_an_encoder_stays_and_no_cache_is_none() -> None:
    assert crop(None, 1) is None
    own, cross = filled(llama(), TOKENS), filled(llama(), TOKENS[:, :5])
    cache = EncoderDecoderCache(own, cross)
    assert crop(cache, 3) is cache
    assert (own.get_seq_length(), cross.get_seq_length()) == (LENGTH - 3, 5)
    four = tuple((*mine, *read) for mine, read in zip(as_tuple(own), as_tuple(cross), strict=True))
    cropped: Any = crop(four, 1)
    for layer in cropped:
        assert [states.shape[-2] for states in layer] == [LENGTH - 4, LENGTH - 4, 5, 5]


def layered(*layers: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


def convolution_that_ran() -> LinearAttentionLayer:
    layer = LinearAttentionLayer()
    layer.update_conv_state(torch.ones(1, 2, 4))
    assert layer.is_croppable  # says transformers, and its crop raises
    return layer


def static() -> StaticCache:
    return StaticCache(config=llama().config, max_cache_len=LIMIT)


STATES = torch.zeros(1, 1, 3, 2)
NOT_CROPPABLE: list[Callable[[], Any]] = [
    static,
    lambda: EncoderDecoderCache(static(), DynamicCache()),
    lambda: DynamicCache(config=MistralConfig(sliding_window=4, num_hidden_layers=1)),
    lambda: layered(DynamicLayer(), DynamicSlidingWindowLayer(4)),
    lambda: layered(convolution_that_ran()),
    lambda: layered(LinearAttentionAndFullAttentionLayer()),
    lambda: RaggedCache(2, 8),
    lambda: (),
    lambda: (STATES,),
    lambda: ((STATES,),),
    lambda: ((None, None),),
    lambda: ((STATES, STATES), (STATES, None)),
    lambda: ((STATES, STATES[:, :, 1:]),),
]


@pytest.mark.parametrize("make", NOT_CROPPABLE)
def test_caches_that_cannot_be_cropped_are_refused(make: Callable[[], Any]) -> None:
    for taken in (1, [1]):
        with pytest.raises(TypeError):
            crop(make(), taken)


@pytest.mark.parametrize("taken", [1.5, True, None, [1, 1.5], torch.tensor([True, False])], ids=str)
def test_what_is_no_number_of_tokens_is_refused(taken: Any) -> None:
    with pytest.raises(TypeError, match="whole number"):
        crop(((STATES, STATES),), taken)


def test_numbers_for_other_rows_are_refused() -> None:
    cache = filled(llama(), TOKENS)
    for one in (cache, as_tuple(cache)):
        with pytest.raises(ValueError, match=f"1 numbers of tokens for {len(TOKENS)} rows"):
            crop(one, [2])


@pytest.mark.parametrize("taken", [-1, LENGTH + 1, [0, LENGTH + 1], [-1, 2]], ids=str)
def test_too_many_or_too_few_tokens_are_refused(taken: Any) -> None:
    cache = filled(llama(), TOKENS)
    for one in (cache, as_tuple(cache)):
        with pytest.raises(ValueError, match="tokens out of a cache"):
            crop(one, taken)
