"""Packed layers give the numbers of the layers that they replace, by the product that took the
least time.

Nothing here depends on how long a product takes: times are given.
"""

import copy
import pickle
import time
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from specnb.models import packing
from tiny import qwen2
from torch import Tensor, nn

from specnb.fast import PACKED, ROWS, PackedLinear, fastest, least_seconds, pack

NEEDS_ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not in this torch")
PRODUCTS = range(PACKED + 1)


def layer(inputs: int = 128, outputs: int = 192, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """Seconds of each product for each of `ROWS`, which the test may change; at first the packed
    one is faster."""
    seconds = np.ones((len(PRODUCTS), len(ROWS)))
    seconds[PACKED] = 0.5
    monkeypatch.setattr(packing, "least_seconds", lambda weights, products: np.stack([seconds] * len(weights)))
    return seconds


def packed(plain: nn.Module) -> Any:
    return pack(nn.Sequential(plain))


@NEEDS_ONEDNN
@pytest.mark.parametrize("product", PRODUCTS)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(st.integers(1, 4), max_size=2), rows=st.integers(0, 20), bias=st.booleans())
def test_every_product_is_that_of_the_layer(
    times: np.ndarray, product: int, batch: list[int], rows: int, bias: bool
) -> None:
    times[:] = 1.0
    times[product] = 0.5
    plain = layer(bias=bias)
    model, states = packed(plain), torch.randn(*batch, rows, 128)
    assert isinstance(model[0], PackedLinear)
    with torch.inference_mode():
        assert model(states).shape == plain(states).shape
        torch.testing.assert_close(model(states), plain(states), rtol=1e-4, atol=1e-4)
    # Gradients are those of the layer: a copy has none.
    model(states).sum().backward()
    found: Any = plain.weight.grad
    plain.weight.grad = None
    plain(states).sum().backward()
    assert torch.equal(found, plain.weight.grad)  # type: ignore[arg-type]


@NEEDS_ONEDNN
def test_each_number_of_rows_takes_the_product_that_is_fastest_for_it(times: np.ndarray) -> None:
    for column, product in enumerate((1, 2, PACKED, 0)):
        times[:, column] = 1.0
        times[product, column] = 0.5
    taken: list[tuple[int, int]] = []

    def noted(product: int) -> packing.Product:
        def product_of(states: Tensor) -> Tensor:
            taken.append((product, len(states)))
            return states

        return product_of

    made = packed(layer())[0]
    assert isinstance(made, PackedLinear)
    products = fastest(times)
    made.products = [noted(product) for product in products]
    with torch.no_grad():
        for rows in (1, 2, 4, 5, 15, 16, 500):
            made(torch.randn(rows, 128))
    assert taken == [(1, 1), (2, 2), (2, 4), (PACKED, 5), (PACKED, 15), (0, 16), (0, 500)]


@NEEDS_ONEDNN
def test_a_few_layers_of_each_shape_are_timed_for_all(times: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[torch.Size] = []

    def noted(weights: list[Tensor], products: object) -> np.ndarray:
        timed.extend(weight.shape for weight in weights)
        return np.stack([times] * len(weights))

    monkeypatch.setattr(packing, "least_seconds", noted)
    model = pack(nn.Sequential(*[layer() for _ in range(20)], layer(256)))
    assert timed == [torch.Size([192, 128])] * 7 + [torch.Size([192, 256])]
    assert all(isinstance(one, PackedLinear) and len(one.products) == ROWS[-1] for one in model)


def test_a_tie_keeps_the_usual_product() -> None:
    seconds = np.ones((len(PRODUCTS), len(ROWS)))
    seconds[1:] = 0.96
    assert set(fastest(seconds)) == {0}
    seconds[2] = 0.94
    assert set(fastest(seconds)) == {2}


def test_the_least_time_of_each_product_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that runs while a product works, and stands still otherwise: packed products take 7
    ticks, others 9."""
    ticks = [0.0]

    def product(duration: float) -> packing.Product:
        def run(states: Tensor) -> Tensor:
            ticks[0] += duration * states.shape[1]
            return states

        return run

    monkeypatch.setattr(time, "thread_time", lambda: ticks[0])
    monkeypatch.setattr(time, "perf_counter", lambda: ticks[0])
    monkeypatch.setattr(packing, "SECONDS", 2000.0)
    monkeypatch.setattr(packing, "BUSY", 2000.0)
    own = [product(9), product(9), product(9), product(7)]
    seconds = least_seconds([torch.zeros(2, 3)] * 2, [own, own])
    assert seconds.shape == (2, len(PRODUCTS), len(ROWS))
    assert (seconds[:, 0] == 9 * np.array(ROWS)).all()
    assert (seconds[:, PACKED] == 7 * np.array(ROWS)).all()


@NEEDS_ONEDNN
def test_parameters_stay_the_very_same_and_tied_ones_tied(times: np.ndarray) -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(192, 128), "head": layer(bias=False)})
    model["head"].weight = model["embedding"].weight
    assert pack(model) is model
    assert isinstance(model["head"], PackedLinear)
    assert model["head"].weight is model["embedding"].weight
    assert set(model.state_dict()) == {"embedding.weight", "head.weight"}


@NEEDS_ONEDNN
def test_a_copy_or_another_dtype_uses_the_usual_product_until_it_is_packed_again(times: np.ndarray) -> None:
    plain = layer()
    model, states = packed(plain), torch.randn(2, 128)
    with torch.inference_mode():
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert twin[0].products == []
            assert twin[0].weight is not plain.weight
            assert torch.equal(twin(states), plain(states))
            assert len(pack(twin)[0].products) == ROWS[-1]
        exact = model.double()
        assert torch.equal(exact(states.double()), nn.functional.linear(states.double(), plain.weight, plain.bias))
        assert exact[0].products == []


@NEEDS_ONEDNN
def test_compiled_code_uses_the_weight_as_saved(times: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled with packed weights, the synthetic pair failed and the trained one was slower."""
    plain = layer()
    model, states = packed(plain), torch.randn(1, 128)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    model[0].products = [lambda states: states] * ROWS[-1]
    with torch.inference_mode():
        assert torch.equal(model(states), plain(states))


@NEEDS_ONEDNN
def test_packing_again_sees_changed_weights(times: np.ndarray) -> None:
    model, states = packed(layer()), torch.randn(1, 128)
    with torch.inference_mode():
        model[0].weight.data *= 2
        stale, fresh = model(states), pack(model)(states)
        torch.testing.assert_close(
            fresh, nn.functional.linear(states, model[0].weight, model[0].bias), atol=1e-4, rtol=0
        )
    assert not torch.allclose(stale, fresh, atol=1e-3)


def test_what_cannot_be_packed_stays_as_it_is(times: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    small, exact = layer(8, 8), layer().double()
    assert packed(small)[0] is small
    assert packed(exact)[0] is exact
    assert not any(isinstance(module, PackedLinear) for module in pack(qwen2()).modules())
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("", (), {"available": 1000}))
    large = layer()
    assert packed(large)[0] is large
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert packed(large)[0] is large


def test_a_processor_that_cannot_pack_is_a_warning(times: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)

    def unable(*_: object) -> None:
        raise RuntimeError("bf16 needs the cpu support avx_ne_convert\nmore")

    monkeypatch.setattr(packing, "PackedLinear", unable)
    plain = layer().bfloat16()
    with pytest.warns(RuntimeWarning, match=r"cannot pack bfloat16 weights .* packed=False .*avx_ne_convert$"):
        assert packed(plain)[0] is plain
