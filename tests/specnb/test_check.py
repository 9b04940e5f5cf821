"""A model that the loop runs wrongly is refused, before the first step, after it, or at the end of a
completion; one that it runs exactly is not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from architectures import VOCAB, tiny_config, tiny_model
from tiny import gpt2, llama, mistral, neox, qwen2, roomy
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertLMHeadModel,
    FalconForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specnb import Sampler, beam_search, generate
from specnb.cache import prefill
from specnb.check import ROUNDING, ROUNDINGS, Check, Comparison, Rounding
from specnb.distributions import Sampling
from specnb.drafters import TreeDrafter


def _changed(change: Callable[[dict[str, Any]], None]) -> PreTrainedModel:
    """A Llama of which `change` alters the arguments of each forward pass."""
    model = roomy(VOCAB)

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
    model = tiny_model("gpt_neo")
    assert model is not None
    return model.double()


def sees_the_future() -> PreTrainedModel:
    config = tiny_config("bert")
    config.is_decoder, config.initializer_range = False, 0.5
    torch.manual_seed(0)
    model: PreTrainedModel = BertLMHeadModel(config).double().eval()
    return model


def _changed_logits(change: Callable[[Tensor, dict[str, Any]], Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """A Llama whose logits are changed, by the arguments of a forward pass."""
    model = roomy(VOCAB, dtype=dtype)

    def after(module: Any, args: Any, given: dict[str, Any], made: Any) -> Any:
        made.logits = change(made.logits, given)
        return made

    model.register_forward_hook(after, with_kwargs=True)
    return model


def hot_from(length: int, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """Distributions are flatter from token number `length` on, which no configuration names; the
    model counts as its cache does."""

    def change(logits: Tensor, given: dict[str, Any]) -> Tensor:
        end, cache = given["input_ids"].shape[1], given.get("cache", given.get("past_key_values"))
        end = end if cache is None else max(cache.get_seq_length(), end)
        places = torch.arange(end - logits.shape[1], end)[:, None]
        return logits.where(places < length, 0.3 * logits)

    return _changed_logits(change, dtype)


def sharper_by(size: Callable[[dict[str, Any]], float]) -> PreTrainedModel:
    """Distributions depend on the `size` of a pass."""
    return _changed_logits(lambda logits, given: logits * (1 + size(given)), torch.float64)


# Before the first step.

WRONG = (shifted_positions, no_mask, mask_by_length, gpt_neo, sees_the_future)
REFUSED = "over a few tokens in the loop's cache|depends on the tokens after it"


@pytest.mark.parametrize("make", WRONG)
def test_a_model_that_differs_is_refused_before_a_step(make: Callable[[], PreTrainedModel]) -> None:
    for run in (
        lambda model: generate(model, [[3, 4]], None, max_new_tokens=40),
        lambda model: beam_search(model, [3, 4], width=2, max_new_tokens=30),
    ):
        with pytest.raises(TypeError, match=REFUSED):
            run(make())


@pytest.mark.parametrize("make", [gpt_neo, mask_by_length])
def test_rounding_in_16_bits_hides_nothing(
    make: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy in float32 decides, where there is memory for it."""
    model = make().bfloat16()
    with pytest.raises(TypeError, match=REFUSED):
        Check(model, gamma=3).new_batch(model, slots=64)


def test_a_model_that_fails_in_the_loop_is_refused() -> None:
    config = tiny_config("falcon")
    config.alibi = True
    model = FalconForCausalLM(config).eval()
    with pytest.raises(TypeError, match="fails where it gets positions, a mask and a cache"):
        generate(model, [[3, 4]], None, max_new_tokens=4)


@pytest.mark.parametrize("make", [llama, gpt2, neox, qwen2, mistral])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_that_agrees_is_not_refused(make: Callable[..., PreTrainedModel], dtype: torch.dtype) -> None:
    model = make(vocab=VOCAB, dtype=dtype)
    for slots in (1, 16, 100):
        Check(model, gamma=3).new_batch(model, slots=slots, tree=True)
    draft = make(vocab=VOCAB, seed=5, dtype=dtype)
    generate(model, [[3], [3, 4, 5]] * 2, draft, batch_size=2, max_new_tokens=12)  # without a warning, too


def test_a_draft_may_differ() -> None:
    """Exactness does not depend on it."""
    made = generate(llama(VOCAB), [[3, 4]], gpt_neo().float(), gamma=2, max_new_tokens=12)
    assert len(made.tokens[0]) == 12


@pytest.mark.parametrize("window", [3, 40])
def test_a_window_is_part_of_the_mask(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    base = mistral(VOCAB, dtype=torch.float64)
    config = copy.deepcopy(base.config)
    config.sliding_window, config.max_position_embeddings = window, 64
    model = MistralForCausalLM(config).double().eval()
    model.load_state_dict(base.state_dict())
    generate(model, [[3, 4, 5]], None, max_new_tokens=50)
    monkeypatch.setattr("specnb.cache.sliding_window", lambda config: 0)
    with pytest.raises(TypeError, match="wrong distributions"):
        generate(model, [[3, 4, 5]], None, max_new_tokens=50)


# After the first step, and at the end of a completion.


def test_what_is_wrong_only_with_as_many_slots_as_a_pass_reads_is_found() -> None:
    """The probe reads all slots, a step those in use."""
    with pytest.raises(TypeError, match="wrong distributions in a completion"):
        generate(mask_by_length(only=64), [[3] * 20], None, max_new_tokens=60)
    with pytest.raises(TypeError, match=REFUSED):
        generate(mask_by_length(only=81), [[3] * 20], None, max_new_tokens=60)


@pytest.mark.parametrize("draft", [None, "auto", "model", "tree"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_change_at_a_length_that_no_configuration_names_is_found(draft: Any, dtype: torch.dtype) -> None:
    """Before it, tokens are returned; a prompt beyond it is refused, one that reaches it
    at its end, and one that takes over a row, too."""
    model, asked = hot_from(20, dtype), {"max_new_tokens": 17, "seed": 2}
    if draft == "model":
        draft = roomy(VOCAB, 5, dtype)
    if draft == "tree":
        draft = TreeDrafter(roomy(VOCAB, 5, dtype), (-1, -1, 0))
    assert len(generate(model, [[3, 4], [5]], draft, **asked).tokens) == 2  # type: ignore[arg-type]
    for prompts, where in (
        ([[3, 4] * 12], "wrong distributions in"),
        ([[3], [3, 4] * 7], "was decoded from wrong distributions"),
        ([[3], [5, 5, 6], [3, 4] * 7], "in a completion"),
    ):
        with pytest.raises(TypeError, match=where):
            generate(model, prompts, draft, batch_size=2, **asked)  # type: ignore[arg-type]
    assert generate(model, [[3, 4] * 12], draft, check=False, **asked).tokens  # type: ignore[arg-type]


def test_the_first_row_that_is_refilled_is_compared_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a prompt that takes over a row does not enter the cache."""
    monkeypatch.setattr("specnb.step.prefill", lambda *given: prefill(*given) if given[-1] is None else None)
    sampler, asked = Sampler(roomy(VOCAB), None, compile=False), {"max_new_tokens": 6, "batch_size": 2}
    sampler.generate([[3], [4, 5, 6, 7]], **asked)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="in a completion"):
        sampler.generate([[3], [4, 5, 6, 7], [5, 6]], **asked)  # type: ignore[arg-type]


def test_more_rows_and_a_longer_sequence_than_any_before_are_compared() -> None:
    """Those that end early are no longer than they are."""
    model = hot_from(20)
    sampler = Sampler(model, None, compile=False, rows=2, slots=100)
    passes = list[int]()
    model.register_forward_hook(lambda *called: passes.append(1))
    sampler.generate([[3]], max_new_tokens=14)
    first = len(passes)
    sampler.generate([[3], [4]], max_new_tokens=14)
    assert len(passes) > first
    first = len(passes)
    sampler.generate([[5], [7]], max_new_tokens=14)
    assert len(passes) == first + 1, "the model itself is run for nothing else than a few tokens"
    sampler.generate([[5], [7]], max_new_tokens=40, eos=range(VOCAB))
    for _ in range(2):  # after an error, too
        with pytest.raises(TypeError, match="in a completion"):
            sampler.generate([[5], [7]], max_new_tokens=24)


# What the comparison says of distributions that are given.

PROMPT, TOKENS = [3, 4, 5], [7, 8, 9, 3, 3, 11, 4, 20, 21, 5, 6, 1, 9, 9, 2, 0]


@torch.inference_mode()
def own_log_probs(model: PreTrainedModel, factor: float = 1.0) -> Tensor:
    """Of logits times `factor`."""
    logits = model(input_ids=torch.tensor([PROMPT + TOKENS]), use_cache=False).logits[0, len(PROMPT) - 1 : -1]
    return torch.log_softmax(factor * logits.double(), dim=-1).gather(-1, torch.tensor(TOKENS)[:, None])[:, 0]


@torch.inference_mode()
def own_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    return logits


@pytest.mark.parametrize(("dtype", "off"), [(torch.float64, 1e-3), (torch.float32, 1e-3), (torch.bfloat16, 0.2)])
def test_a_difference_is_refused_in_every_dtype(dtype: torch.dtype, off: float) -> None:
    """In 16 bits by a copy in float32, which has the model's rounded weights."""
    model = roomy(VOCAB, dtype=dtype)
    with pytest.raises(TypeError, match="wrong distributions"):
        Check(model, gamma=3).completion(PROMPT, TOKENS, own_log_probs(model) + off)


def test_one_token_of_a_completion_that_differs_is_refused_and_named() -> None:
    model, own = roomy(VOCAB), own_log_probs(roomy(VOCAB))
    check = Check(model, gamma=3)
    for wrong in (own - 0.1 * (torch.arange(len(own)) == 9), own.where(torch.arange(len(own)) != 9, own.flip(0))):
        with pytest.raises(TypeError, match="beginning 9 tokens after a prompt of 3"):
            check.completion(PROMPT, TOKENS, wrong)
    check.completion(PROMPT, TOKENS, own + 1e-6)


@pytest.mark.parametrize("parents", [None, (-1, -1, 0, 0, 1)])
def test_every_node_of_the_first_step_is_compared(parents: tuple[int, ...] | None) -> None:
    model, drafted = roomy(VOCAB), [7, 8, 9, 3, 11]
    above = range(-1, 4) if parents is None else parents
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(above):
        paths.append([*paths[parent + 1], drafted[node]])
    logits = torch.stack([own_logits(model, PROMPT + path) for path in paths])
    check = Check(model, gamma=5)
    check.first_step(PROMPT, drafted, logits, parents)
    for node in range(6):
        wrong = logits.clone()
        wrong[node] = logits[node].roll(1)
        with pytest.raises(TypeError, match="in the first step"):
            check.first_step(PROMPT, drafted, wrong, parents)
    short = [*drafted[:-1], -1]  # where nothing was proposed, nothing is compared
    wrong = logits.clone()
    wrong[5] = torch.nan
    check.first_step(PROMPT, short, wrong, parents)
    wrong[0] = logits[0].roll(1)  # nor does NaN at one place hide another
    with pytest.raises(TypeError, match="in the first step"):
        check.first_step(PROMPT, drafted, wrong, parents)


def test_16_bits_without_memory_for_a_copy_are_a_warning_up_to_their_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specnb.check.copy_fits", lambda model: False)
    model = roomy(VOCAB, dtype=torch.bfloat16)
    own, check = own_log_probs(model), Check(model, gamma=3)
    with pytest.warns(RuntimeWarning, match="not resolved below a total variation of"):
        check.completion(PROMPT, TOKENS, own + 0.15)
    check.completion(PROMPT, TOKENS, own + 0.15)  # it warns once
    with pytest.raises(TypeError, match="wrong distributions"):
        check.completion(PROMPT, TOKENS, own + 0.5)


SIZES_OF_A_PASS: dict[str, Callable[[dict[str, Any]], float]] = {
    "tokens": lambda given: 0.01 * given["input_ids"].shape[1],
    "tokens of all rows": lambda given: 0.01 * given["input_ids"].numel(),
    "with a cache": lambda given: float(given["use_cache"]),
    "with a cache, a little": lambda given: 0.02 * given["use_cache"],
}


@pytest.mark.parametrize("name", SIZES_OF_A_PASS)
def test_a_model_whose_own_passes_differ_is_refused_or_a_warning(name: str) -> None:
    """What other rows decide, as with dynamic quantisation, or a little of it, is a warning."""
    size = SIZES_OF_A_PASS[name]
    model, ours = sharper_by(size), {"input_ids": torch.zeros(1, 1), "use_cache": True}
    in_the_loop = own_log_probs(roomy(VOCAB), 1 + size(ours))
    if name in ("tokens", "with a cache"):
        with pytest.raises(TypeError, match=r"depends on the tokens after it|disagrees with itself"):
            Check(model, gamma=3).completion(PROMPT, TOKENS, in_the_loop)
    else:
        with pytest.warns(RuntimeWarning, match="differ among themselves"):
            Check(model, gamma=3).completion(PROMPT, TOKENS, in_the_loop)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_whose_own_passes_differ_is_refused_in_16_bits(dtype: torch.dtype) -> None:
    """A copy in 32 bits says that it is no rounding."""
    model: Any = sharper_by(SIZES_OF_A_PASS["with a cache"])
    with pytest.raises(TypeError, match="wrong distributions"):
        Check(model.to(dtype), gamma=3).completion(PROMPT, TOKENS, own_log_probs(roomy(VOCAB, dtype=dtype), 2))


def test_nan_is_left_to_the_loop_and_hides_nothing_else() -> None:
    check, found = Check(roomy(VOCAB), gamma=3), torch.full((len(TOKENS),), torch.nan)
    check.completion(PROMPT, TOKENS, found)
    found[1] = -9
    with pytest.raises(TypeError, match="in a completion"):
        check.completion(PROMPT, TOKENS, found)


# What is rounding, and what of a call is compared.


@pytest.mark.parametrize("places", [1, 5, 64])
def test_the_bound_is_exceeded_as_rarely_as_it_says(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By means of Gamma variables, `ROUNDINGS` times as large as the rounding that was measured."""
    monkeypatch.setattr("specnb.check.FALSE_ALARM", 0.01)
    chosen, count = np.random.default_rng(0), 100_000
    off = 0.0128 * chosen.gamma(1.9, size=(count, places))
    measured = Rounding.of(torch.from_numpy(off.ravel()))
    rate = float((ROUNDINGS * off.mean(axis=1) + ROUNDING > measured.most(places)).mean())
    assert abs(rate - 0.01) < 0.0015  # more than four standard errors


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_prompt_of_any_length_is_not_refused_in_16_bits(dtype: torch.dtype, temperature: float) -> None:
    """Of a model that rounds at every place, whose pieces round otherwise than the whole."""
    model = _rounding_at_random(roomy(VOCAB, dtype=dtype), 2 * torch.finfo(dtype).eps)
    sampler = Sampler(model, None, sampling=Sampling(temperature), compile=False)
    for length in (1, 2, 5, 30):
        sampler.generate([[3, 4, 5] * length, [5] * length], max_new_tokens=8)
        assert sampler.check is not None
        sampler.check.rows = 0


def _rounding_at_random(model: PreTrainedModel, size: float) -> PreTrainedModel:
    """A model whose logits are off by a normal variable, relative to the largest one, which depends on the pass."""

    def after(module: Any, args: Any, given: dict[str, Any], made: Any) -> Any:
        seed = int(given["input_ids"].sum()) + 7 * given["input_ids"].numel()
        noise = torch.randn(made.logits.shape, generator=torch.Generator().manual_seed(seed))
        made.logits = made.logits + (size * made.logits.abs().amax() * noise).to(made.logits.dtype)
        return made

    model.register_forward_hook(after, with_kwargs=True)
    return model


def test_two_rows_are_compared_if_prompts_are_equally_long() -> None:
    check = Check(roomy(VOCAB), gamma=0)
    for lengths, chosen in (((2, 2, 2), {0, 2}), ((3, 1, 2), {0, 1}), ((4,), {0})):
        assert Comparison(check, [[3] * length for length in lengths], len(lengths), 5).chosen == chosen


def test_a_copy_is_made_once_and_only_if_rounding_explains_nothing() -> None:
    model = roomy(VOCAB, dtype=torch.bfloat16)
    check, right = Check(model, gamma=3), own_log_probs(model)
    check.completion(PROMPT, TOKENS, right)
    assert check.copy is None
    copies = list[Any]()
    for _ in range(2):
        with pytest.raises(TypeError, match="wrong distributions"):
            check.completion(PROMPT, TOKENS, right + 0.4)
        copies.append(check.copy)
    assert copies[0] is copies[1] is not None


def test_a_model_that_cannot_be_copied_is_judged_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose weights a library has quantised."""

    def fail(*given: Any) -> Any:
        raise NotImplementedError

    model = roomy(VOCAB, dtype=torch.bfloat16)
    monkeypatch.setattr(type(model), "__deepcopy__", fail, raising=False)
    with pytest.warns(RuntimeWarning, match="not resolved below"):
        Check(model, gamma=3).completion(PROMPT, TOKENS, own_log_probs(model) + 0.15)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:torch.quantize_per")
def test_dynamic_quantisation_is_a_warning() -> None:
    """Activations are scaled by the largest of a pass, so a row depends on what is beside it."""
    model = torch.ao.quantization.quantize_dynamic(
        roomy(VOCAB, dtype=torch.float32), {torch.nn.Linear}, dtype=torch.qint8
    )
    with pytest.warns(RuntimeWarning, match="differ among themselves"):
        Sampler(model, None, compile=False).generate([[3, 4, 5], [5, 6]], max_new_tokens=8)


def other_attention(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    usual = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "transformers.integrations.sdpa_attention.torch.nn.functional.scaled_dot_product_attention",
        lambda query, *given, **named: usual(4 * query, *given, **named),
    )


def registered_attention(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    AttentionInterface.register(
        "sharper", lambda part, query, *given, **named: sdpa_attention_forward(part, 4 * query, *given, **named)
    )
    AttentionMaskInterface.register("sharper", sdpa_mask)
    model.set_attn_implementation("sharper")


def other_positions(monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel) -> None:
    usual = LlamaRotaryEmbedding.forward
    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", lambda part, x, position_ids: usual(part, x, position_ids % 3))


@pytest.mark.parametrize("change", [other_attention, registered_attention, other_positions])
@pytest.mark.parametrize("draft", [None, "auto"])
def test_code_that_is_replaced_after_a_call_is_noticed(
    change: Callable[[pytest.MonkeyPatch, PreTrainedModel], None], draft: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a few tokens show is compared again, and refused unless the sampler does as the model does now."""
    model, prompts = llama(VOCAB, dtype=torch.float64), [[3, 4, 5, 6], [5, 6]]
    sampler = Sampler(model, draft, compile=False)
    sampler.generate(prompts, max_new_tokens=5)
    change(monkeypatch, model)
    # The sampler has the attention of its time; one that is not decoded is refused by its name.
    refused = {other_attention: "wrong distributions", registered_attention: "runs sharper attention"}
    if change in refused:
        with pytest.raises(TypeError, match=refused[change]):
            sampler.generate(prompts, max_new_tokens=5)
        return
    made, now = (
        one.generate(prompts, max_new_tokens=5).tokens for one in (sampler, Sampler(model, draft, compile=False))
    )
    assert made == now
