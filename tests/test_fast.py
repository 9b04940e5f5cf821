"""Packed weights and compiled functions give the numbers that they replace."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import llama, qwen2
from torch import nn

from specnb import fast
from specnb.fast import Compiled, PackedLinear, pack

NEEDS_ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not in this torch")


def layer(inputs=1024, outputs=1024, bias=True, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


@NEEDS_ONEDNN
@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=0, max_size=2), st.integers(1, 40), st.booleans())
def test_a_packed_layer_is_the_layer(batch, rows, bias):
    plain = layer(bias=bias)
    packed = PackedLinear.of(plain)
    states = torch.randn(*batch, rows, 1024)
    with torch.inference_mode():
        assert packed.packed is not None
        assert packed(states).shape == plain(states).shape
        torch.testing.assert_close(packed(states), plain(states), rtol=1e-4, atol=1e-4)


@NEEDS_ONEDNN
def test_small_products_take_the_usual_way_to_the_last_bit():
    plain = layer(64, 64)
    states = torch.randn(3, 64)
    with torch.inference_mode():
        assert torch.equal(PackedLinear.of(plain)(states), plain(states))


@NEEDS_ONEDNN
def test_parameters_stay_the_very_same_and_tied_ones_tied():
    model = llama(vocab=8)
    model.lm_head.weight = model.model.embed_tokens.weight
    names, values = zip(*model.named_parameters(), strict=True)
    assert pack(model) is model
    assert isinstance(model.lm_head, PackedLinear)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert [name for name, _ in model.named_parameters()] == list(names)
    assert all(now is then for now, then in zip(model.parameters(), values, strict=True))
    assert set(model.state_dict()) >= set(names)
    assert not any("packed" in name for name in model.state_dict())


@NEEDS_ONEDNN
def test_packing_again_sees_changed_weights():
    packed = PackedLinear.of(layer())
    states = torch.randn(1, 1024)
    with torch.inference_mode():
        packed.weight.data *= 2
        stale = packed(states)
        fresh = PackedLinear.of(packed)(states)
        torch.testing.assert_close(
            fresh, nn.functional.linear(states, packed.weight, packed.bias), rtol=1e-4, atol=1e-4
        )
    assert not torch.allclose(stale, fresh)


@NEEDS_ONEDNN
def test_a_copy_or_another_dtype_is_packed_anew():
    packed = PackedLinear.of(layer())
    states = torch.randn(2, 1024)
    with torch.inference_mode():
        for twin in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
            assert torch.equal(twin(states), packed(states))
            assert twin.weight is not packed.weight
        exact = copy.deepcopy(packed).double()
        assert exact.packed is None
        torch.testing.assert_close(exact(states.double()).float(), packed(states), rtol=1e-4, atol=1e-4)
        assert exact.to(torch.bfloat16).packed.dtype == torch.bfloat16


@NEEDS_ONEDNN
def test_gradients_are_those_of_the_layer():
    plain = layer(8, 8)
    packed = PackedLinear.of(copy.deepcopy(plain))
    for each in (plain, packed):
        each(torch.ones(1, 8)).sum().backward()
    assert torch.equal(plain.weight.grad, packed.weight.grad)


def test_without_onednn_nothing_changes(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = pack(qwen2())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


def test_a_compiled_function_is_compiled_once_for_each_shape(monkeypatch):
    made = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: made.append(function) or function)
    double = Compiled(lambda numbers: numbers * 2)
    for length in (3, 3, 5, 3, 5):
        assert double(torch.ones(length)).tolist() == [2.0] * length
    assert len(made) == 2


def test_no_compiler_says_what_to_do(monkeypatch):
    def missing():
        raise OSError("none")

    monkeypatch.setattr(fast, "get_cpp_compiler", missing)
    with pytest.raises(RuntimeError, match=r"install g\+\+, or leave compile=False"):
        Compiled(lambda numbers: numbers)(torch.ones(1))
