"""What is known of a model is forgotten when it is changed, in whatever way; what does not change
it changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from specnb.models import packing
from specnb.models.known import known_of
from tiny import llama
from torch import nn
from transformers import PreTrainedModel

from specnb import beam_search, check_model, generate
from specnb.fast import PACKED, PackedLinear, pack

PROMPTS: list[list[int]] = [[1, 2], [3]]
ASKED: dict[str, Any] = {"max_new_tokens": 6, "progress": False}
Change = Callable[[Any], object]


def _layer(model: Any) -> Any:
    return model.model.layers[0].self_attn.q_proj


def in_place(model: Any) -> None:
    with torch.no_grad():
        _layer(model).weight.mul_(-1)


def by_data(model: Any) -> None:
    """As adapters are merged: the weight's version stays."""
    before = _layer(model).weight._version
    _layer(model).weight.data += 1.5
    assert _layer(model).weight._version == before


def other_data(model: Any) -> None:
    _layer(model).weight.data = -_layer(model).weight.data


def other_weight(model: Any) -> None:
    _layer(model).weight = nn.Parameter(-_layer(model).weight)


def other_layer(model: Any) -> None:
    made = nn.Linear(_layer(model).in_features, _layer(model).out_features, bias=False)
    model.model.layers[0].self_attn.q_proj = made.to(model.dtype).eval()


def by_optimizer(model: Any) -> None:
    model.requires_grad_(True)
    tokens = torch.tensor([[1, 2, 3]])
    model(input_ids=tokens, labels=tokens).loss.backward()
    torch.optim.SGD(model.parameters(), lr=5.0).step()


def hook(model: Any) -> None:
    _layer(model).register_forward_hook(lambda layer, given, made: made * -1)


def switched(model: Any) -> None:
    """As `disable_adapters` switches adapters off: an attribute of a part."""
    model.model.layers[0].self_attn.scaling *= 3


def nested(model: Any) -> None:
    _layer(model).scaling["default"] = 2.0


def setting(model: Any) -> None:
    model.config.rms_norm_eps = 1.0


def attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def dtype(model: Any) -> None:
    model.double()


CHANGES: tuple[Change, ...] = (
    in_place, by_data, other_data, other_weight, other_layer, by_optimizer, hook, switched, nested, setting, attention,
    dtype,
)  # fmt: skip
OF_WEIGHTS: tuple[Change, ...] = (in_place, by_data, other_data, other_weight, other_layer, by_optimizer)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_noticed_and_no_call_is_one(change: Change) -> None:
    model = llama(8)
    _layer(model).scaling = {"default": 1.0}
    generate(model, PROMPTS, llama(8, seed=5), gamma=2, **ASKED)
    beam_search(model, PROMPTS[0], width=2, max_new_tokens=3)
    known_of(model)["answer"] = True
    generate(model, PROMPTS, **ASKED)
    beam_search(model, PROMPTS[0], width=2, max_new_tokens=3)
    assert "answer" in known_of(model)
    change(model)
    assert "answer" not in known_of(model)


@pytest.fixture
def packed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers take the packed product, whatever they take in time."""
    seconds = np.ones((PACKED + 1, len(packing.ROWS)))
    seconds[PACKED] = 0.5
    monkeypatch.setattr(packing, "SMALLEST", 1)
    monkeypatch.setattr(packing, "least_seconds", lambda weights, products: np.stack([seconds] * len(weights)))


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not in this torch")
@pytest.mark.parametrize("change", OF_WEIGHTS)
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.usefixtures("packed_ones")
def test_packed_layers_have_the_weights_that_the_model_has(change: Change, used: bool) -> None:
    """With copies of the old weights for some numbers of rows, tokens would be of neither model."""
    model, plain = pack(llama(8)), llama(8)
    assert isinstance(_layer(model), PackedLinear)
    if used:
        before = generate(model, PROMPTS, None, **ASKED).tokens
        assert before == generate(plain, PROMPTS, None, **ASKED).tokens
    change(model)
    change(plain)
    if change is other_layer:
        _layer(plain).load_state_dict(_layer(model).state_dict())
    tokens = torch.tensor([[1, 2, 3]])
    if change not in (by_data, other_data):  # which the weight does not tell of
        with torch.inference_mode():
            assert torch.allclose(model(tokens).logits, plain(tokens).logits, atol=1e-4)
    check_model(model)
    with torch.inference_mode():
        assert torch.allclose(model(tokens).logits, plain(tokens).logits, atol=1e-4)
    assert generate(model, PROMPTS, None, **ASKED).tokens == generate(plain, PROMPTS, None, **ASKED).tokens


def steering(part: nn.Module, given: Any, made: Any) -> Any:
    """Adds to the state of the last token of a pass, as activations are steered."""
    state = made[0] if isinstance(made, tuple) else made
    state[:, -1] += 3.0
    return made


@pytest.mark.parametrize("before", [False, True])
def test_a_hook_on_the_last_position_is_refused_also_after_a_call_without_it(before: bool) -> None:
    model = llama(8)
    if before:
        generate(model, PROMPTS, **ASKED)
    model.model.layers[0].register_forward_hook(steering)
    with pytest.raises(TypeError, match="would be decoded from wrong distributions"):
        generate(model, PROMPTS, **ASKED)


def test_dropout_in_a_part_is_refused() -> None:
    model: Any = llama(8)
    generate(model, PROMPTS, **ASKED)
    model.model.layers[1].mlp.act_fn = nn.Sequential(model.model.layers[1].mlp.act_fn, nn.Dropout(0.5)).train()
    with pytest.raises(TypeError, match="is in training mode, or a part of it"):
        generate(model, PROMPTS, **ASKED)


def test_calls_in_several_threads_wait_for_each_other() -> None:
    """Each changes a setting of its model for a while."""
    model = llama(8)

    def made(seed: int) -> list[list[int]]:
        return generate(model, PROMPTS, seed=seed, **ASKED).tokens

    alone = [made(seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(made, range(12))) == alone


def test_a_changed_model_is_compiled_again() -> None:
    model: PreTrainedModel = llama(8, dtype=torch.float64)
    for change in (None, by_data, hook):
        if change is not None:
            change(model)
        plain = generate(model, PROMPTS, None, **ASKED).tokens
        assert generate(model, PROMPTS, None, compile=True, **ASKED).tokens == plain
