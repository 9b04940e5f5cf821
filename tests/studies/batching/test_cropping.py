"""Cropping equals never having run the tokens, and what cannot be cropped is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import ARCHITECTURES, LIMIT, llama
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, MistralConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from specnb.cache import RaggedCache
from studies.batching.cropping import crop

TOKENS = torch.tensor([[0, 3, 1, 2, 0, 1, 1, 3], [2, 2, 0, 1, 3, 3, 0, 1]])
LENGTH = TOKENS.shape[1]


def filled(model: PreTrainedModel, tokens: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=tokens, past_key_values=cache)
    return cache


def as_tuple(cache: DynamicCache) -> tuple[tuple[Tensor, Tensor], ...]:
    layers: Any = cache.layers
    return tuple((layer.keys, layer.values) for layer in layers)


@torch.inference_mode()
@pytest.mark.parametrize("taken", [0, 1, 5, LENGTH - 1])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_cropped_cache_is_that_of_the_shorter_sequence(architecture: str, taken: int) -> None:
    model = ARCHITECTURES[architecture](dtype=torch.float64)
    cache, kept = filled(model, TOKENS), TOKENS[:, : LENGTH - taken]
    whole = as_tuple(cache)
    views: Any = crop(whole, taken)
    assert crop(cache, taken) is cache
    assert cache.get_seq_length() == LENGTH - taken
    for layer, view, old, fresh in zip(as_tuple(cache), views, whole, as_tuple(filled(model, kept)), strict=True):
        for states, viewed, before, expected in zip(layer, view, old, fresh, strict=True):
            torch.testing.assert_close(states, expected, rtol=0, atol=1e-12)
            assert torch.equal(viewed, states)
            # a tuple is cropped into views, and stays as it was.
            assert viewed.data_ptr() == before.data_ptr()
            assert before.shape[-2] == LENGTH
    # It goes on as if the tokens had never been there.
    following = model(input_ids=TOKENS[:, :2], past_key_values=cache).logits[:, -1]
    alone = model(input_ids=torch.cat([kept, TOKENS[:, :2]], dim=1), use_cache=False).logits[:, -1]
    torch.testing.assert_close(following, alone, rtol=0, atol=1e-10)


def test_everything_can_be_taken_out() -> None:
    cache = filled(llama(), TOKENS)
    assert crop(cache, LENGTH) is cache
    assert cache.get_seq_length() == 0


def test_what_was_read_from_an_encoder_stays() -> None:
    own, cross = filled(llama(), TOKENS), filled(llama(), TOKENS[:, :5])
    cache = EncoderDecoderCache(own, cross)
    assert crop(cache, 3) is cache
    assert (own.get_seq_length(), cross.get_seq_length()) == (LENGTH - 3, 5)
    four = tuple((*mine, *read) for mine, read in zip(as_tuple(own), as_tuple(cross), strict=True))
    for cropped in crop(four, 1):
        assert [states.shape[-2] for states in cropped] == [LENGTH - 4, LENGTH - 4, 5, 5]


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
REFUSED: list[tuple[str, Callable[[], Any]]] = [
    ("StaticCache", static),
    ("StaticCache", lambda: EncoderDecoderCache(static(), DynamicCache())),
    ("DynamicSlidingWindowLayer", lambda: DynamicCache(config=MistralConfig(sliding_window=4, num_hidden_layers=1))),
    ("layer 1 is a DynamicSlidingWindowLayer", lambda: layered(DynamicLayer(), DynamicSlidingWindowLayer(4))),
    ("layer 0 is a LinearAttentionLayer", lambda: layered(convolution_that_ran())),
    ("LinearAttentionAndFullAttentionLayer", lambda: layered(LinearAttentionAndFullAttentionLayer())),
    ("RaggedCache cannot be cropped: it is neither a DynamicCache", lambda: RaggedCache(2, 8)),
    ("NoneType", lambda: None),
    ("a tuple of 2 tensors", lambda: ()),
    ("a tuple of 2 tensors", lambda: (STATES,)),
    ("a tuple of 2 tensors", lambda: ((STATES,),)),
    (r"differ in length, axis -2: \[2, 3\]", lambda: ((STATES, STATES[:, :, 1:]),)),
]


@pytest.mark.parametrize(("message", "make"), REFUSED)
def test_caches_that_cannot_be_cropped_are_refused_by_name(message: str, make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=message):
        crop(make(), 1)


@pytest.mark.parametrize("taken", [-1, LENGTH + 1])
def test_too_many_or_too_few_tokens_are_refused(taken: int) -> None:
    cache = filled(llama(), TOKENS)
    for one in (cache, as_tuple(cache)):
        with pytest.raises(ValueError, match=f"cannot take {taken} tokens .* holds {LENGTH}; ask for 0 to {LENGTH}"):
            crop(one, taken)
