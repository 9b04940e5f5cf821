"""Copies of weights give the numbers of the layers that they replace."""

import copy
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import llama, qwen2
from torch import Tensor, nn

from specnb.models import packing as layout
from specnb.models.packing import PACKED, PRODUCTS, TRANSPOSED, USUAL, Choice, PackedLinear, pack

NEEDS_ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not in this torch")


def layer(inputs: int = 1024, outputs: int = 1024, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype)


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed weights are used for every number of rows: nothing is timed."""
    choose(monkeypatch, (PACKED,) * len(layout.CLASSES))


def choose(monkeypatch: pytest.MonkeyPatch, choice: Choice) -> None:
    """`choice` for every weight that can be packed, of whatever size."""

    def chosen(weights: Sequence[Tensor]) -> list[Choice]:
        return [choice if layout.supported(weight.dtype) else layout.AS_SAVED for weight in weights]

    monkeypatch.setattr(layout, "choices", chosen)


@NEEDS_ONEDNN
@pytest.mark.parametrize("product", PRODUCTS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 5), min_size=0, max_size=2), st.integers(1, 40), st.booleans())
def test_a_layer_with_copies_is_the_layer(
    monkeypatch: pytest.MonkeyPatch, product: str, batch: list[int], rows: int, bias: bool
) -> None:
    choose(monkeypatch, (product,) * len(layout.CLASSES))
    plain = layer(bias=bias)
    packed = PackedLinear.of(plain)
    states = torch.randn(*batch, rows, 1024)
    with torch.inference_mode():
        assert (packed.packed is not None, packed.transposed is not None) == (product == PACKED, product == TRANSPOSED)
        assert packed(states).shape == plain(states).shape
        torch.testing.assert_close(packed(states), plain(states), rtol=1e-4, atol=1e-4)


@NEEDS_ONEDNN
def test_each_number_of_rows_takes_the_product_that_was_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, (USUAL, PACKED, USUAL, PACKED, TRANSPOSED, USUAL, PACKED, USUAL))
    taken: list[tuple[str, int]] = []

    def noted(product: str, *_: object) -> Callable[[Tensor], Tensor]:
        def product_of(states: Tensor) -> Tensor:
            taken.append((product, len(states)))
            return states

        return product_of

    monkeypatch.setattr(layout, "multiplication", noted)
    packed = PackedLinear.of(layer(64, 64))
    for rows in (0, *range(1, 41), 500):
        with torch.no_grad():
            packed(torch.randn(rows, 64))
    others = [(product, rows) for product, rows in taken if product != USUAL]
    assert others == [(PACKED, 2), (PACKED, 4), (TRANSPOSED, 5), *[(PACKED, rows) for rows in range(9, 17)]]
    assert len(taken) == 42


@NEEDS_ONEDNN
def test_parameters_stay_the_very_same_and_tied_ones_tied(always: None) -> None:
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


def test_layers_that_gain_nothing_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, layout.AS_SAVED)
    assert not any(isinstance(module, PackedLinear) for module in pack(llama()).modules())


@NEEDS_ONEDNN
def test_packing_again_sees_changed_weights(always: None) -> None:
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
@pytest.mark.filterwarnings("ignore:oneDNN cannot pack bfloat16")  # true of many processors
def test_a_copy_or_another_dtype_is_packed_anew(always: None) -> None:
    packed = PackedLinear.of(layer())
    states = torch.randn(2, 1024)
    with torch.inference_mode():
        for twin in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
            assert torch.equal(twin(states), packed(states))
            assert twin.weight is not packed.weight
        exact = copy.deepcopy(packed).double()
        assert exact.packed is None
        torch.testing.assert_close(exact(states.double()).float(), packed(states), rtol=1e-4, atol=1e-4)
        rounded = exact.to(torch.bfloat16)
        assert (rounded.packed is not None) == layout.supported(torch.bfloat16)
        torch.testing.assert_close(rounded(states.bfloat16()).float(), packed(states), rtol=0.1, atol=0.1)


@NEEDS_ONEDNN
@pytest.mark.parametrize("product", PRODUCTS)
def test_gradients_are_those_of_the_layer(monkeypatch: pytest.MonkeyPatch, product: str) -> None:
    choose(monkeypatch, (product,) * len(layout.CLASSES))
    plain = layer(8, 8)
    packed = PackedLinear.of(copy.deepcopy(plain))
    for each in (plain, packed):
        each(torch.ones(1, 8)).sum().backward()
    assert plain.weight.grad is not None
    assert packed.weight.grad is not None
    assert torch.equal(plain.weight.grad, packed.weight.grad)


def test_without_onednn_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = pack(qwen2())
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
