"""Caches: cropping equals never having run the tokens, and what cannot be cropped is refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distributions_for_tests import examples
from hypothesis import given
from hypothesis import strategies as st
from tiny import ARCHITECTURES, LIMIT, ROUNDING, gpt2, llama
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, MistralConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from specnb.models.cache import Croppable, RaggedCache, crop, ragged_mask, why_not_croppable
from specnb.models.cached_model import CachedModel

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


def close(cache: DynamicCache, other: DynamicCache) -> bool:
    pairs = zip(as_tuple(cache), as_tuple(other), strict=True)
    return all(torch.allclose(a, b, rtol=0, atol=1e-12) for one, two in pairs for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("taken", range(LENGTH))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_cropped_cache_is_that_of_the_shorter_sequence(architecture: str, taken: int) -> None:
    model = ARCHITECTURES[architecture](dtype=torch.float64)
    cache = filled(model, TOKENS)
    assert crop(cache, taken) is cache
    assert cache.get_seq_length() == LENGTH - taken
    assert close(cache, filled(model, TOKENS[:, : LENGTH - taken]))
    # It goes on as if the tokens had never been there.
    with torch.inference_mode():
        following = model(input_ids=TOKENS[:, :2], past_key_values=cache).logits[:, -1]
        text = torch.cat([TOKENS[:, : LENGTH - taken], TOKENS[:, :2]], dim=1)
        assert torch.allclose(following, model(input_ids=text, use_cache=False).logits[:, -1], rtol=0, atol=1e-10)


def test_everything_can_be_taken_out() -> None:
    cache = filled(llama(), TOKENS)
    cropped = crop(cache, LENGTH)
    assert isinstance(cropped, DynamicCache)
    assert cropped.get_seq_length() == 0


@pytest.mark.parametrize("taken", [0, 1, 5, LENGTH])
def test_tuples_are_cropped_into_views_and_stay_as_they_were(taken: int) -> None:
    model = gpt2(dtype=torch.float64)
    whole = as_tuple(filled(model, TOKENS))
    cropped = crop(whole, taken)
    shorter = as_tuple(filled(model, TOKENS[:, : LENGTH - taken])) if taken < LENGTH else None
    for number, layer in enumerate(cropped):
        for part, states in enumerate(layer):
            assert states.shape[-2] == LENGTH - taken
            assert whole[number][part].shape[-2] == LENGTH
            if shorter is not None:
                assert states.data_ptr() == whole[number][part].data_ptr()
                assert torch.allclose(states, shorter[number][part], rtol=0, atol=1e-12)


def test_what_was_read_from_an_encoder_stays() -> None:
    own, cross = filled(llama(), TOKENS), filled(llama(), TOKENS[:, :5])
    cache = EncoderDecoderCache(own, cross)
    assert crop(cache, 3) is cache
    assert (own.get_seq_length(), cross.get_seq_length()) == (LENGTH - 3, 5)
    four = tuple((*mine, *read) for mine, read in zip(as_tuple(own), as_tuple(cross), strict=True))
    for cropped in crop(four, 1):
        assert [states.shape[-2] for states in cropped] == [LENGTH - 4, LENGTH - 4, 5, 5]


@pytest.mark.parametrize("taken", [-1, LENGTH + 1, 100])
@pytest.mark.parametrize("convert", [lambda cache: cache, as_tuple], ids=["dynamic", "tuple"])
def test_too_many_or_too_few_tokens_are_refused(convert: Callable[[DynamicCache], Croppable], taken: int) -> None:
    with pytest.raises(ValueError, match=f"cannot take {taken} tokens .* holds {LENGTH}; ask for 0 to {LENGTH}"):
        crop(convert(filled(llama(), TOKENS)), taken)


def layered(*layers: Any) -> DynamicCache:
    cache = DynamicCache()
    cache.layers = list(layers)
    return cache


def convolution_that_ran() -> LinearAttentionLayer:
    layer = LinearAttentionLayer()
    layer.update_conv_state(torch.ones(1, 2, 4))
    assert layer.is_croppable  # says transformers, and its crop raises
    return layer


REFUSED: dict[str, Callable[[], Any]] = {
    "StaticCache": lambda: StaticCache(config=llama().config, max_cache_len=LIMIT),
    "DynamicSlidingWindowLayer": lambda: DynamicCache(config=MistralConfig(sliding_window=4, num_hidden_layers=1)),
    "layer 1 is a DynamicSlidingWindowLayer": lambda: layered(DynamicLayer(), DynamicSlidingWindowLayer(4)),
    "LinearAttentionLayer": lambda: layered(LinearAttentionLayer()),
    "layer 0 is a LinearAttentionLayer": lambda: layered(convolution_that_ran()),
    "LinearAttentionAndFullAttentionLayer": lambda: layered(LinearAttentionAndFullAttentionLayer()),
    "RaggedCache": lambda: RaggedCache(2, 8),
    "list": lambda: [torch.zeros(1, 1, 3, 2)],
    "NoneType": lambda: None,
}


@pytest.mark.parametrize("name", REFUSED)
def test_caches_that_cannot_be_cropped_are_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        crop(REFUSED[name](), 1)


def test_an_encoder_decoder_cache_is_refused_for_its_decoder_part() -> None:
    static = StaticCache(config=llama().config, max_cache_len=LIMIT)
    with pytest.raises(TypeError, match="StaticCache cannot be cropped"):
        crop(EncoderDecoderCache(static, DynamicCache()), 1)


@pytest.mark.parametrize("bad", [(), ((),), (torch.zeros(1, 1, 3, 2),), ((torch.zeros(1, 1, 3, 2),),)])
def test_tuples_of_another_make_are_refused(bad: Any) -> None:
    with pytest.raises(TypeError, match="a tuple of 2 tensors"):
        crop(bad, 1)


def test_tuples_of_unequal_length_are_refused() -> None:
    layer = (torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 4, 2))
    with pytest.raises(TypeError, match=r"differ in length, axis -2: \[3, 4\]"):
        crop((layer,), 1)


def test_a_croppable_cache_has_nothing_in_the_way() -> None:
    assert why_not_croppable(DynamicCache(config=llama().config)) == ""
    assert "neither a DynamicCache" in why_not_croppable(object())


@examples
@given(
    slots=st.lists(st.lists(st.integers(0, 6), min_size=2, max_size=2), min_size=1, max_size=3),
    dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_a_token_sees_the_slots_up_to_its_own(slots: list[list[int]], dtype: torch.dtype) -> None:
    mask = ragged_mask(torch.tensor(slots), 7, dtype)
    assert mask.shape == (len(slots), 1, 2, 7)
    assert mask.dtype == dtype
    for row, places in enumerate(slots):
        for query, slot in enumerate(places):
            hidden = torch.finfo(dtype).min
            assert mask[row, 0, query].tolist() == [0.0 if place <= slot else hidden for place in range(7)]


# Rows of a RaggedCache that stand at different places: row 0 after 4 tokens, row 1 after 6.
ENDS = torch.tensor([[3], [5]])


def ragged(model: PreTrainedModel) -> CachedModel:
    runner = CachedModel(model, 10)
    runner.run(TOKENS[:, :6], torch.arange(6).expand(2, -1), keep=1)
    return runner


def uncached(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits
    return logits[0, -1]


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_row_goes_on_from_where_it_stands(architecture: str, attention: str) -> None:
    """Going back to a lower slot is the crop: what lies behind is overwritten or hidden."""
    model = ARCHITECTURES[architecture](dtype=torch.float64)
    model.set_attn_implementation(attention)
    logits = ragged(model).run(torch.tensor([[2], [0]]), ENDS, keep=1)[:, 0]
    assert torch.allclose(logits[0], uncached(model, [*TOKENS[0, :3].tolist(), 2]), rtol=0, atol=ROUNDING[attention])
    assert torch.allclose(logits[1], uncached(model, [*TOKENS[1, :5].tolist(), 0]), rtol=0, atol=ROUNDING[attention])


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_hidden_slots_have_no_influence(architecture: str, attention: str) -> None:
    model = ARCHITECTURES[architecture]()
    model.set_attn_implementation(attention)
    clean, poisoned = ragged(model), ragged(model)
    layers: Any = poisoned.cache.layers
    for layer in layers:
        for row, end in enumerate(ENDS[:, 0].tolist()):
            layer.keys[row, :, end + 1 :] = 1e30
            layer.values[row, :, end + 1 :] = -1e30
    tokens = torch.tensor([[2], [0]])
    assert torch.equal(clean.run(tokens, ENDS, keep=1), poisoned.run(tokens, ENDS, keep=1))


@torch.inference_mode()
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_nan_in_a_hidden_slot_is_loud(attention: str) -> None:
    """A mask cannot hide NaN, since 0 times NaN is NaN; then the whole row is NaN, which the loop reports."""
    model = llama()
    model.set_attn_implementation(attention)
    runner = ragged(model)
    layers: Any = runner.cache.layers
    for layer in layers:
        layer.values[0, :, -1] = torch.nan
    logits = runner.run(torch.tensor([[2], [0]]), ENDS, keep=1)
    assert logits[0].isnan().all()
    assert not logits[1].isnan().any()


def test_a_ragged_cache_holds_what_was_written_last_at_each_slot() -> None:
    cache = RaggedCache(layers=1, capacity=5)
    for slots, value in (([[0, 1, 2], [0, 1, 2]], 1.0), ([[1], [3]], 2.0)):
        at = torch.tensor(slots)
        cache.write_at(at)
        states = torch.full((2, 1, at.shape[1], 1), value)
        keys, values = cache.update(states, -states, 0)
    assert keys.flatten(1).tolist() == [[1, 2, 1, 0, 0], [1, 1, 1, 2, 0]]
    assert torch.equal(values, -keys)
    assert cache.get_mask_sizes(1, 0) == (5, 0)
    assert cache.get_max_length() == 5
