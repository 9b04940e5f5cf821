"""A sampler's private copy of a model: it shares the weights, changes nothing outside, and computes
the same; packed copies are never stale. Nothing here depends on how long a product takes."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import llama, neox, qwen2, roomy
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    GraniteSWAConfig,
    GraniteSWAForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from specnb import ModelDrafter, Sampler, Sampling, fast, generate
from specnb.cache import CachedModel
from specnb.copies import PromptLookupDrafter
from specnb.fast import (
    GROUPED,
    ROWS,
    FourBitLinear,
    PackedLinear,
    PrivateModel,
    four_bits,
    grouped_attention,
    least_seconds,
    pack,
)

NEEDS_ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not in this torch")
NEEDS_COMPILER = pytest.mark.skipif(
    not any(map(shutil.which, (os.environ.get("CXX", "g++"), "clang++"))), reason="there is no C++ compiler"
)
PROMPTS: list[list[int]] = [[1, 2], [3]]
ASKED: dict[str, Any] = {"max_new_tokens": 6, "seed": 1}
Change = Callable[[Any], object]


def layer(inputs: int = 128, outputs: int = 192, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias)


def packed(plain: nn.Module) -> Any:
    model = nn.Sequential(plain)
    pack(model)
    return model[0]


@pytest.fixture
def packing_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "least_seconds", lambda *ways: [1.0, 0.5])


# Packed linear layers.


@NEEDS_ONEDNN
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("packing_wins")
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=st.lists(st.integers(1, 4), max_size=2), rows=st.integers(0, 20), bias=st.booleans())
def test_a_packed_layer_computes_what_the_layer_does(
    dtype: torch.dtype, batch: list[int], rows: int, bias: bool
) -> None:
    plain = layer(bias=bias).to(dtype)
    made, states = packed(plain), torch.randn(*batch, rows, 128, dtype=dtype)
    assert isinstance(made, PackedLinear) or dtype == torch.bfloat16  # which not every processor can pack
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    with torch.inference_mode():
        assert made(states).shape == plain(states).shape
        torch.testing.assert_close(made(states), plain(states), rtol=tolerance, atol=tolerance)


@st.composite
def weights_of_four_bits(draw: st.DrawFn, rows: int = 32, groups: int = 2) -> Tensor:
    """As a file keeps them: a step and an offset for each group of 32, some of whose 16 values may be missing."""
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    highest = draw(st.integers(0, 15))
    integers = torch.randint(0, highest + 1, (rows, groups, 32), generator=random)
    step, offset = torch.randn(2, rows, groups, 1, generator=random) * draw(st.sampled_from([1e-6, 0.01, 100.0]))
    weights: Tensor = (step * integers + offset).reshape(rows, 32 * groups)
    return weights


@settings(max_examples=30, deadline=None)
@given(weights=weights_of_four_bits())
def test_weights_of_four_bits_are_found_again_after_they_were_rounded(weights: Tensor) -> None:
    integers, steps = four_bits(weights.bfloat16())
    assert 0 <= integers.min() <= integers.max() <= 15
    step, middle = steps.double().transpose(0, 1).unsqueeze(-1).unbind(dim=2)
    again = ((integers.double().unflatten(1, (-1, 32)) - 8) * step + middle).flatten(1)
    largest = weights.unflatten(1, (-1, 32)).abs().amax(dim=-1).repeat_interleave(32, dim=1)
    assert ((again - weights).abs() <= 2**-5 * largest).all()


def of_four_bits(inputs: int = 576, outputs: int = 560, bias: bool = True) -> tuple[nn.Linear, Tensor]:
    """A layer in bfloat16, and the weights that it had in its file."""
    plain = layer(inputs, outputs, bias).bfloat16()
    groups = plain.weight.detach().double().unflatten(1, (-1, 32))
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    in_file = (low + (15 * (groups - low) / (high - low)).round() * (high - low) / 15).flatten(1)
    plain.weight.data = in_file.bfloat16()
    return plain, in_file


@pytest.mark.parametrize("shape", [(1,), (), (4,), (3, 1), (1, 3), (2, 2), (1, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_four_bits_is_as_far_from_that_of_the_file_as_bfloat16_is(shape: Any, bias: bool) -> None:
    """Also of states that are part of a larger tensor."""
    plain, in_file = of_four_bits(bias=bias)
    states = torch.randn(*shape, 2, 576, dtype=torch.bfloat16)[..., 1, :]
    found, usual = FourBitLinear(plain)(states), plain(states)
    exact = states.double() @ in_file.T + (plain.bias if bias else 0)
    assert (found.shape, found.dtype) == (usual.shape, usual.dtype)
    assert (found - exact).norm() <= 1.5 * (usual - exact).norm()


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: torch.cat([weights[:-1], weights[-1:] + 0.02 * torch.randn(1, 64).bfloat16()]),
        lambda weights: weights.index_fill(1, torch.tensor(40), float("nan")),
        lambda weights: weights.index_fill(1, torch.tensor(40), float("inf")),
        lambda weights: weights * 16 + torch.randint(2, weights.shape),  # of 5 bits
        lambda weights: weights[:, :48],
        lambda weights: weights.float(),
    ],
)
def test_other_weights_are_not_taken_for_such(change: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    weights = (torch.randint(16, (300, 64)) / 8 - 1).bfloat16()
    four_bits(weights)
    with pytest.raises(RuntimeError):
        four_bits(change(weights))


def test_a_product_that_is_not_the_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = of_four_bits()
    integers, steps = four_bits(plain.weight.detach())
    monkeypatch.setattr(fast, "four_bits", lambda weight: (integers.roll(1, dims=0), steps))
    with pytest.raises(RuntimeError, match="differs"):
        FourBitLinear(plain)


@NEEDS_ONEDNN
@pytest.mark.usefixtures("packing_wins")
def test_few_rows_are_read_in_four_bits_and_more_as_they_would_be_without(monkeypatch: pytest.MonkeyPatch) -> None:
    made = packed(of_four_bits()[0])
    assert isinstance(made, FourBitLinear)
    monkeypatch.setattr(made.of_many_rows, "forward", lambda states: "many")
    ones = torch.ones(6, 1, 576, dtype=torch.bfloat16)
    assert all(isinstance(made(some), Tensor) for some in (ones[:4], ones[:4].transpose(0, 1)))
    assert made(ones[:5]) == made(ones[:5].transpose(0, 1)) == "many"


@NEEDS_ONEDNN
def test_each_layer_has_the_form_that_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bits are tried for those that have them, over what was faster without."""
    times = {nn.Linear: 1.0, PackedLinear: 0.6, FourBitLinear: 0.5}
    monkeypatch.setattr(fast, "least_seconds", lambda *ways: [times[type(way[0])] for way in ways])
    model = nn.Sequential(of_four_bits(bias=False)[0], layer(576, 560, bias=False).bfloat16())
    usual = type(packed(layer(576, 560).bfloat16()))  # not every processor can pack bfloat16
    assert [type(one) for one in pack(model)] == [FourBitLinear, usual][: 1 + (usual is PackedLinear)]
    assert type(model[0].of_many_rows) is usual
    times[FourBitLinear] = 0.59
    assert type(packed(of_four_bits()[0])) is (PackedLinear if usual is PackedLinear else FourBitLinear)


@NEEDS_ONEDNN
@pytest.mark.parametrize("compile", ["auto", pytest.param(True, marks=NEEDS_COMPILER)])
@pytest.mark.usefixtures("packing_wins")
def test_a_sampler_reads_four_bits_and_sees_that_weights_have_changed(
    compile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "SMALLEST", 1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=13, **sizes)).bfloat16().eval()
    for part in model.modules():
        if isinstance(part, nn.Linear) and part is not model.lm_head:
            part.weight.data = (part.weight.data * 256).round().clamp(-7, 8) / 256
    sampler = Sampler(model, PromptLookupDrafter(13), gamma=5, compile=compile, sampling=Sampling(0.01))
    made = sampler.generate(PROMPTS, **ASKED)
    assert made.record.emitted.sum() == 12
    assert {type(one) for one in sampler.private.packed} >= {FourBitLinear}
    by_data(model)
    with pytest.raises(RuntimeError, match="make another sampler"):
        sampler.generate(PROMPTS, **ASKED)


@NEEDS_ONEDNN
def test_only_what_is_clearly_faster_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "least_seconds", lambda *ways: [1.0, 0.96])
    assert type(packed(layer())) is nn.Linear


def test_the_least_time_of_each_layer_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that runs while a layer works, and stands still otherwise."""
    ticks = [0.0]

    class Slow(nn.Linear):
        duration = 9.0

        def forward(self, input: Tensor) -> Tensor:
            ticks[0] += self.duration * input.shape[1]
            self.duration = 4.0  # at later calls
            return input

    for clock in ("thread_time", "perf_counter"):
        monkeypatch.setattr(time, clock, lambda: ticks[0])
    monkeypatch.setattr(fast, "SECONDS", 1e9)
    assert least_seconds([Slow(3, 2), Slow(3, 2)], [Slow(3, 2)] * 2) == [8 * sum(ROWS)] * 2


def test_what_cannot_be_packed_stays_as_it_is(packing_wins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for small_or_exact in (layer(8, 8), layer().double()):
        assert packed(small_or_exact) is small_or_exact
    large = layer().bfloat16()

    def unable(*_: object) -> None:
        raise RuntimeError("bf16 needs the cpu support avx_ne_convert")

    for owner, name, other in (
        (psutil, "virtual_memory", lambda: type("", (), {"available": 1000})),
        (torch.backends.mkldnn, "is_available", lambda: False),
        (fast, "PackedLinear", unable),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, other)
            assert packed(large) is large


# The private copy.


@pytest.fixture
def packed_ones(packing_wins: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers, however small, are packed."""
    monkeypatch.setattr(fast, "SMALLEST", 1)


def looked_at(model: Any) -> Any:
    """What each module of `model` is and has, and its configuration."""
    parts = {name: (type(part), part.__dict__.copy()) for name, part in model.named_modules()}
    return parts, model.config.to_dict(), model.config._attn_implementation


@pytest.mark.parametrize("compile", [False, "auto", True])
@pytest.mark.usefixtures("packed_ones")
def test_a_copy_shares_the_weights_and_leaves_the_models_as_they_were(
    compile: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is made, and after a call."""
    monkeypatch.setattr(fast, "compiled_once", lambda function, on_host: function)
    model, draft = llama(8), llama(8, seed=5)
    model.lm_head.weight = model.model.embed_tokens.weight  # tied
    before = [(looked_at(one), [weight.clone() for weight in one.parameters()]) for one in (model, draft)]
    sampler = Sampler(model, draft, compile=compile)
    sampler.generate(PROMPTS, **ASKED)
    for one, (looks, values) in zip((model, draft), before, strict=True):
        assert looked_at(one) == looks
        assert all(map(torch.equal, one.parameters(), values))
    private = sampler.private
    own = dict(private.modules.named_parameters(remove_duplicate=False))
    assert all(own[name] is weight for name, weight in model.named_parameters(remove_duplicate=False))
    assert bool(private.packed) == (compile is not False and torch.backends.mkldnn.is_available())
    assert (private.compiled is not None) == (compile is True)


def _q(model: Any) -> Any:
    return model.model.layers[0].self_attn.q_proj


def hook(model: Any) -> None:
    _q(model).register_forward_hook(lambda part, given, made: made * -1)


def attribute(model: Any) -> None:
    """As adapters are switched off."""
    model.model.layers[0].self_attn.scaling *= 3


def method(model: Any) -> None:
    model.model.layers[0].mlp.forward = lambda states: states


def setting(model: Any) -> None:
    model.set_attn_implementation("eager")
    model.config.rms_norm_eps = 1.0


@pytest.mark.parametrize("change", [hook, attribute, method, setting])
def test_what_is_no_weight_is_as_it_was_when_the_sampler_was_made(change: Change) -> None:
    """A new sampler sees it."""
    model: Any = llama(8, dtype=torch.float64)
    asked = {**ASKED, "max_new_tokens": 12}
    unchanged = generate(model, PROMPTS, None, **asked).tokens
    sampler = Sampler(model, None, compile=False, check=False)
    change(model)
    assert sampler.generate(PROMPTS, **asked).tokens == unchanged
    seen = generate(model, PROMPTS, None, **asked).tokens
    assert (seen == unchanged) == (change is setting)  # parts read this setting when they are made


def test_a_tensor_that_is_no_weight_is_shared_as_well() -> None:
    """As a direction in which states are steered."""
    model: Any = llama(8, dtype=torch.float64)
    part = model.model.layers[0].mlp
    part.direction = torch.zeros(8, dtype=torch.float64)
    part.register_forward_hook(lambda part, given, made: made + part.direction)
    sampler = Sampler(model, None, compile=False)
    unchanged = sampler.generate(PROMPTS, **ASKED).tokens
    part.direction += 2
    seen = sampler.generate(PROMPTS, **ASKED).tokens
    assert seen == generate(model, PROMPTS, None, **ASKED).tokens != unchanged


def merged(model: Any) -> None:
    """As adapters are merged: the model computes what it did, from other weights."""
    attribute(model)
    _q(model).weight.data /= 3


@pytest.mark.parametrize("change", [hook, attribute, method, setting, merged])
def test_after_such_a_change_a_call_is_compared_again(change: Change) -> None:
    model: Any = llama(8, dtype=torch.float64)
    sampler = Sampler(model, None, compile=False)
    unchanged = sampler.generate(PROMPTS, **ASKED).tokens
    change(model)
    if change is setting:
        assert sampler.generate(PROMPTS, **ASKED).tokens == unchanged
    else:
        for _ in range(2):
            with pytest.raises(TypeError, match=r"wrong distributions .* It may have been changed after this sampler"):
                sampler.generate(PROMPTS, **ASKED)


def test_an_array_in_the_configuration_is_no_obstacle() -> None:
    model: Any = llama(8)
    model.config.weights = np.array([1.0, 2.0])
    sampler = Sampler(model, None, compile=False)
    for _ in range(2):
        sampler.generate(PROMPTS, **ASKED)


def replaced_forward(model: Any) -> None:
    _q(model).forward = lambda states: -nn.Linear.forward(_q(model), states)


@pytest.mark.parametrize("change", [hook, replaced_forward])
@pytest.mark.usefixtures("packed_ones")
def test_a_layer_with_a_hook_or_a_forward_of_its_own_is_not_packed(change: Change) -> None:
    model = llama(8)
    change(model)
    sampler = Sampler(model, None)
    assert all(layer.weight is not _q(model).weight for layer in sampler.private.packed)
    assert sampler.generate(PROMPTS, **ASKED).tokens == generate(model, PROMPTS, None, **ASKED).tokens


def by_data(model: Any) -> None:
    """As adapters are merged: the weight's version stays."""
    _q(model).weight.data += 1.5


def one_value(model: Any) -> None:
    _q(model).weight.data[5, 3] += 1e-3


def one_value_of_a_bias(model: Any) -> None:
    _q(model).bias.data[1] += 1.0


def other_data(model: Any) -> None:
    _q(model).weight.data = -_q(model).weight.data


def other_weight(model: Any) -> None:
    _q(model).weight = nn.Parameter(-_q(model).weight)


def other_layer(model: Any) -> None:
    model.model.layers[0].self_attn.q_proj = nn.Linear(8, 8).eval()


def no_bias(model: Any) -> None:
    _q(model).bias = None


def a_new_bias(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.linspace(-3, 3, model.lm_head.out_features))


IN_PLACE: tuple[Change, ...] = (by_data, one_value, one_value_of_a_bias)
REPLACED: tuple[Change, ...] = (other_data, other_weight, other_layer, no_bias, a_new_bias)


def dtype(model: Any) -> None:
    model.double()


def biased() -> Any:
    """A model with biases that matter."""
    model: Any = qwen2(8)
    for part in model.modules():
        if isinstance(part, nn.Linear) and part.bias is not None:
            part.bias.data = torch.linspace(-2, 2, len(part.bias))
    return model


@pytest.mark.parametrize("change", [*IN_PLACE, *REPLACED, dtype])
@pytest.mark.parametrize("compile", [pytest.param("auto", marks=NEEDS_ONEDNN), False])
@pytest.mark.usefixtures("packed_ones")
def test_a_weight_or_bias_that_changed_is_refused_or_seen(change: Change, compile: Any) -> None:
    """Refused where it was replaced, or a packed copy has another byte; else seen at once."""
    model = biased()
    used, unused = (Sampler(model, None, compile=compile) for _ in range(2))
    used.generate(PROMPTS, **ASKED)
    change(model)
    expected = generate(model, PROMPTS, None, **ASKED).tokens
    for sampler in (used, unused):
        if sampler.private.packed or change not in IN_PLACE:
            with pytest.raises(RuntimeError, match="make another sampler"):
                sampler.generate(PROMPTS, **ASKED)
        else:
            assert sampler.generate(PROMPTS, **ASKED).tokens == expected
    assert Sampler(model, None, compile=compile).generate(PROMPTS, **ASKED).tokens == expected


@pytest.mark.parametrize(
    ("compile", "change"), [pytest.param("auto", by_data, marks=NEEDS_ONEDNN), (False, other_weight)]
)
@pytest.mark.usefixtures("packed_ones")
def test_a_draft_that_changed_is_refused(compile: Any, change: Change) -> None:
    """It would be exact, and measured as what it no longer is."""
    draft = biased()
    sampler = Sampler(llama(8), ModelDrafter(draft, compile=compile), gamma=2, compile=False)
    sampler.generate(PROMPTS, **ASKED)
    change(draft)
    with pytest.raises(RuntimeError, match="make another sampler"):
        sampler.generate(PROMPTS, **ASKED)


def test_a_target_that_trains_again_is_refused_in_the_next_call() -> None:
    """Its dropout would look to the check like rounding that nothing resolves."""
    target = llama(8)
    sampler = Sampler(target, None, compile=False)
    sampler.generate(PROMPTS, **ASKED)
    target.train()
    with pytest.raises(TypeError, match="training mode"):
        sampler.generate(PROMPTS, **ASKED)


# Attention of grouped queries.


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("rows", [1, 3])
def test_heads_side_by_side_give_the_numbers_of_repeated_keys(n: int, rows: int) -> None:
    module = llama(dtype=torch.float64).model.layers[0].self_attn
    module.num_key_value_groups = 3
    query, key, value = (torch.randn(rows, heads, m, 8).double() for heads, m in ((6, n), (2, 9), (2, 9)))
    mask = torch.randn(rows, 1, n, 9).double()
    for scaling in (None, 0.3):
        expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=scaling)
        found, _ = grouped_attention(module, query, key, value, mask, scaling=scaling)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@torch.inference_mode()
def test_the_copy_uses_it_in_place_of_the_attention_of_transformers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    used, kept = [], grouped_attention

    def counted(*given: Any, **more: Any) -> Any:
        used.append(1)
        return kept(*given, **more)

    monkeypatch.setitem(AttentionInterface._global_mapping, GROUPED, counted)
    for own in ("sdpa", "eager"):
        model = llama()
        model.set_attn_implementation(own)
        CachedModel(PrivateModel(model).modules, 8).run(torch.tensor([[1, 2]]), torch.tensor([[0, 1]]), keep=1)
        assert len(used) == 2  # layers of the first
    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", lambda *given, **more: None)
    assert PrivateModel(llama()).modules.config._attn_implementation == "sdpa", "somebody has registered another one"


# Compiled layers.


@pytest.fixture
def not_compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Functions that would be compiled run as they are, and are listed."""
    functions: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **_: functions.append(function) or function)
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", lambda *_: None)
    return functions


@pytest.mark.parametrize("make", [llama, neox, qwen2])
def test_layers_as_functions_of_their_weights_give_the_same_tokens(
    make: Callable[..., PreTrainedModel], not_compiled: list[Any]
) -> None:
    """One function for both layers and each width of a pass."""
    target, draft = make(8, dtype=torch.float64), make(8, seed=5, dtype=torch.float64)
    plain = generate(target, PROMPTS, draft, gamma=2, **ASKED)
    sampler = Sampler(target, draft, gamma=2, compile=True)
    for _ in range(2):
        made = sampler.generate(PROMPTS, **ASKED)
        assert made.tokens == plain.tokens
    assert len(not_compiled) == 1 + 2  # the target over 3 tokens; the draft over 2, and over 1


def test_a_hook_of_a_layer_is_called_once(not_compiled: list[Any]) -> None:
    model: Any = llama(8, dtype=torch.float64)
    model.model.layers[0].register_forward_pre_hook(lambda part, given: (given[0] * 2, *given[1:]))
    model.model.layers[1].register_forward_hook(lambda part, given, made: made * torch.linspace(-1, 2, 8))
    sampler = Sampler(model, None, compile=True)
    assert sampler.generate(PROMPTS, **ASKED).tokens == generate(model, PROMPTS, None, **ASKED).tokens
    assert not_compiled


@pytest.mark.parametrize("change", [hook, method])
def test_a_layer_whose_parts_have_hooks_is_not_compiled(change: Change, not_compiled: list[Any]) -> None:
    """Compiled code would keep the numbers that they read. Hooks of transformers, which record states, read none."""
    model: Any = llama(8, dtype=torch.float64)
    model(input_ids=torch.tensor(PROMPTS[:1]), output_hidden_states=True)
    change(model)
    sampler = Sampler(model, None, compile=True)
    with_hook, other = sampler.private.modules.model.layers
    assert "forward" not in vars(with_hook)
    assert "forward" in vars(other)
    assert sampler.generate(PROMPTS, **ASKED).tokens == generate(model, PROMPTS, None, **ASKED).tokens


def test_layers_that_compute_otherwise_are_compiled_by_themselves(not_compiled: list[Any]) -> None:
    """A part that differs makes another kind; so does what a layer does with its number."""
    model: Any = llama(8, dtype=torch.float64, layers=3)
    model.model.layers[1].mlp.act_fn = nn.Tanh()
    private = PrivateModel(model, compile=True)
    assert private.compiled is not None
    assert private.compiled.kinds == [0, 1, 0]

    base: Any = type(model.model.layers[2])

    class Scaled(base):  # type: ignore[misc]
        def forward(self, hidden: Tensor, *args: Any, **named: Any) -> Any:
            return super().forward(hidden * (1 + self.self_attn.layer_idx), *args, **named)

    class WithoutPositions(base):  # type: ignore[misc]
        def forward(self, hidden: Tensor, *args: Any, **named: Any) -> Any:
            cos, sin = named["position_embeddings"]
            named["position_embeddings"] = (cos, sin) if self.self_attn.layer_idx != 1 else (cos * 0 + 1, sin * 0)
            return super().forward(hidden, *args, **named)

    for by_number, kinds in ((Scaled, [0, 1, 2]), (WithoutPositions, [0, 1, 0])):
        scaled = llama(8, dtype=torch.float64, layers=3)
        for part in scaled.model.layers:
            part.__class__ = by_number
        sampler = Sampler(scaled, None, compile=True)
        assert sampler.generate(PROMPTS, **ASKED).tokens == generate(scaled, PROMPTS, None, **ASKED).tokens
        assert sampler.private.compiled is not None
        assert sampler.private.compiled.kinds == kinds


def test_code_is_of_the_arguments_that_a_layer_gets(not_compiled: list[Any]) -> None:
    """GraniteSWA gives no position embeddings to layers without positions."""
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2}
    config = GraniteSWAConfig(
        vocab_size=8, num_key_value_heads=1, max_position_embeddings=128, layer_types=["full_attention"] * 3,
        layer_rope_theta=[0, 10000.0, 0], bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes,
    )  # fmt: skip
    model = GraniteSWAForCausalLM(config).eval()
    sampler = Sampler(model, None, compile=True)
    assert sampler.generate(PROMPTS, **ASKED).tokens == generate(model, PROMPTS, None, **ASKED).tokens
    assert sampler.private.compiled is not None
    assert sampler.private.compiled.kinds == [0, 0, 0]
    assert len(not_compiled) == 2


@pytest.mark.usefixtures("not_compiled")
def test_code_for_any_number_of_slots_does_not_come_from_a_pass_over_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would refuse it, because the number is also the size of the cache."""
    marked: list[int] = []
    monkeypatch.setattr(torch._dynamo, "mark_dynamic", lambda mask, axis: marked.append(mask.shape[axis]))
    target, draft = roomy(8), roomy(8, 5)
    for prompt, new_tokens, expected in (([1] * 70, 12, set()), ([1] * 10, 72, {64})):
        drafter = ModelDrafter(draft, compile=True)
        made = generate(target, [prompt], drafter, gamma=2, max_new_tokens=new_tokens)
        assert made.tokens == generate(target, [prompt], draft, gamma=2, max_new_tokens=new_tokens).tokens
        assert drafter.private.compiled is not None
        assert drafter.private.compiled.ready
        assert set(marked) == expected


@NEEDS_COMPILER
def test_a_compiled_draft_model_serves_short_texts() -> None:
    """Whose cache is always read whole."""
    target, draft = llama(8, dtype=torch.float64), llama(8, seed=5, dtype=torch.float64)
    made = generate(target, PROMPTS, ModelDrafter(draft, compile=True), gamma=2, **ASKED)
    assert made.tokens == generate(target, PROMPTS, draft, gamma=2, **ASKED).tokens


@NEEDS_COMPILER
def test_compiled_layers_give_the_tokens_of_plain_ones_and_are_never_stale() -> None:
    """Weights are arguments: what changes in place is seen at once, without a second compilation."""
    model, draft = llama(8, dtype=torch.float64), llama(8, seed=5, dtype=torch.float64)
    sampler = Sampler(model, draft, gamma=2, compile=True)
    for number in range(3):
        if number:
            by_data(model)
        assert sampler.generate(PROMPTS, **ASKED).tokens == generate(model, PROMPTS, draft, gamma=2, **ASKED).tokens
