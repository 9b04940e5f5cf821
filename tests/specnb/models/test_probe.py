"""A model that the loop would run wrongly is refused before the first step; one that it runs
exactly is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import gpt2, llama, mistral, neox, qwen2
from torch import Tensor
from transformers import (
    BertConfig,
    BertLMHeadModel,
    FalconConfig,
    FalconForCausalLM,
    GPTNeoConfig,
    GPTNeoForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    RobertaConfig,
    RobertaForCausalLM,
)

from specnb import beam_search, check_model, generate
from specnb.check import difference_from_itself, require_agreement, rounding

VOCAB = 24
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 64}


def _made(model: PreTrainedModel) -> PreTrainedModel:
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.5)
    return model.double().eval()  # type: ignore[no-any-return]


def _changed(change: Callable[[dict[str, Any]], None]) -> PreTrainedModel:
    """A Llama of which `change` alters the arguments of each forward pass."""
    model = llama(VOCAB, dtype=torch.float64)
    model.config.max_position_embeddings = 64

    def before(module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        change(given)
        return args, given

    model.model.register_forward_pre_hook(before, with_kwargs=True)
    return model


def shifted_positions() -> PreTrainedModel:
    def shift(given: dict[str, Any]) -> None:
        if given.get("position_ids") is not None:
            given["position_ids"] = given["position_ids"] // 2

    return _changed(shift)


def no_mask() -> PreTrainedModel:
    def leave_out(given: dict[str, Any]) -> None:
        if given.get("attention_mask") is not None:
            given["attention_mask"] = torch.zeros_like(given["attention_mask"])

    return _changed(leave_out)


def mask_by_length(window: int = 4, only: int = 0) -> PreTrainedModel:
    """As GPT-Neo's local layers, whose mask follows from the number of keys, here that of slots
    that a pass reads."""

    def cut(given: dict[str, Any]) -> None:
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 4 and only in (0, mask.shape[-1]):
            given["attention_mask"] = mask.masked_fill(torch.arange(mask.shape[-1]) < mask.shape[-1] - window, -1e9)

    return _changed(cut)


def gpt_neo() -> PreTrainedModel:
    config = GPTNeoConfig(vocab_size=VOCAB, hidden_size=16, num_layers=2, num_heads=2, max_position_embeddings=64,
                          attention_types=[[["global", "local"], 1]], window_size=32)  # fmt: skip
    return _made(GPTNeoForCausalLM(config))


def roberta() -> PreTrainedModel:
    return _made(RobertaForCausalLM(RobertaConfig(**SIZES, is_decoder=True, pad_token_id=1)))


def sees_the_future() -> PreTrainedModel:
    return _made(BertLMHeadModel(BertConfig(**SIZES)))


MASK = "it makes its attention mask"
WRONG = {
    shifted_positions: "it does not count positions 0, 1, 2",
    no_mask: MASK,
    mask_by_length: MASK,
    gpt_neo: MASK,
    roberta: "it does not count positions 0, 1, 2",
    sees_the_future: "depends on the tokens after it",
}


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_a_model_that_differs_is_refused_with_the_reason(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    reason = rf"{type(model).__name__} would be decoded from wrong distributions.*{WRONG[make]}"
    with pytest.raises(TypeError, match=reason):
        generate(model, [[3, 4]], None, max_new_tokens=40, progress=False)
    with pytest.raises(TypeError, match=reason):
        beam_search(model, [3, 4], width=2, max_new_tokens=30)


def test_a_mask_by_length_is_right_within_its_window() -> None:
    assert difference_from_itself(gpt_neo(), 32).found < rounding(torch.float64)
    assert difference_from_itself(gpt_neo(), 64).found > 0.05


@pytest.mark.parametrize("size", [64, 256])
def test_what_is_wrong_only_with_few_or_with_many_slots_is_found(size: int) -> None:
    """A pass reads the slots in use, and in compiled code all."""
    assert difference_from_itself(mask_by_length(only=size), 256).found > 0.05
    assert (difference_from_itself(mask_by_length(only=size), 128).found > 0.05) == (size == 64)


@pytest.mark.parametrize("make", [gpt_neo, roberta, mask_by_length])
def test_rounding_in_16_bits_hides_nothing(
    make: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in float32 decides."""
    model = make().bfloat16()
    with pytest.raises(TypeError, match=r"would be decoded from wrong distributions.*rounding gives 1e-04 at most"):
        require_agreement(model, 64)
    monkeypatch.setattr("specnb.check._copy_fits", lambda model: False)
    assert difference_from_itself(model, 64).allowed == rounding(torch.bfloat16)


def test_a_model_that_fails_in_the_loop_is_refused() -> None:
    model = FalconForCausalLM(FalconConfig(**{**SIZES, "alibi": True})).eval()
    with pytest.raises(TypeError, match=r"FalconForCausalLM fails where it gets positions, a mask and a cache"):
        generate(model, [[3, 4]], None, max_new_tokens=4, progress=False)


@pytest.mark.parametrize("make", [llama, gpt2, neox, qwen2, mistral])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_that_agrees_is_not_refused(make: Callable[..., PreTrainedModel], dtype: torch.dtype) -> None:
    model = make(vocab=VOCAB, dtype=dtype)
    for slots in (1, 16, 100):
        require_agreement(model, slots, tree=True)


def test_a_draft_may_differ() -> None:
    """Exactness does not depend on it."""
    made = generate(llama(VOCAB), [[3, 4]], gpt_neo().float(), gamma=2, max_new_tokens=12, progress=False)
    assert len(made.tokens[0]) == 12


@pytest.mark.parametrize("window", [3, 40])
def test_the_probe_reaches_across_a_window(window: int) -> None:
    """One that is longer than the probe is narrowed meanwhile; the model is left as it was."""
    base = mistral(VOCAB, dtype=torch.float64)
    config = copy.deepcopy(base.config)
    config.sliding_window = window
    model = MistralForCausalLM(config).double().eval()
    model.load_state_dict(base.state_dict())
    assert difference_from_itself(model, 60).found < rounding(torch.float64)
    assert model.config.sliding_window == window
    with pytest.MonkeyPatch.context() as everything_visible:
        everything_visible.setattr("specnb.cache.sliding_window", lambda config: 0)
        assert difference_from_itself(model, 60).found > 0.05


def test_the_probe_runs_once_for_a_model_and_its_settings() -> None:
    model, passes = llama(VOCAB), list[int]()
    model.register_forward_hook(lambda *called: passes.append(1))
    require_agreement(model, 20)
    first = len(passes)
    require_agreement(model, 30)  # the same power of two
    assert len(passes) == first == 3
    for _ in range(2):
        require_agreement(model, 40)
        assert len(passes) == 3 * first  # with these slots and with those that are known, once


def test_check_model_prints_what_agrees(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(check_model(llama(VOCAB))) == {"chain", "tree"}
    assert capsys.readouterr().out.count("agrees with the model's own forward pass") == 2
    assert check_model(roberta())["chain"].found > 0.05
    assert "chain: refused: RobertaForCausalLM would be decoded" in capsys.readouterr().out
