"""The loop, apart from its distribution: greedy identity, lengths and ends, independence of rows, bad input."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import examples
from drafter_kinds import TableDrafter
from hypothesis import example, given, settings
from hypothesis import strategies as st
from implementation_distribution import PROMPTS, SHARP, VOCAB, PatchyDrafter, check_record
from study_calls import generate_with
from tiny import ARCHITECTURES, LIMIT, gpt2, llama, near_copy, neox, qwen2
from transformers import PreTrainedModel
from unsupported_models import encoder_decoder, sliding, without_positions

from specnb.decoding import generate as loop
from specnb.decoding.generate import Study, forget_compiled, generate, slots_for
from specnb.decoding.record import PARTS
from specnb.decoding.step import Batch, TreeBatch
from specnb.distributions import Sampling
from specnb.drafting.base import Drafter
from specnb.drafting.model import ModelDrafter
from specnb.drafting.ngram import NgramDrafter, NgramModel
from specnb.models.compilation import Captured
from specnb.models.memory import Memory, predicted
from specnb.rules import Rule, exact_match, greedy_verification, recursive_rejection, rejection_sampling

GREEDY = Sampling(temperature=0)
LONGEST = LIMIT - max(map(len, PROMPTS))
MORE = (*PROMPTS, (1,), (2, 2), (3,), (0, 1, 0, 1), (3, 3, 3))


def pair(architecture: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft that often agrees with it, in float64."""
    target = ARCHITECTURES[architecture](dtype=torch.float64)
    return target, near_copy(target, noise=0.1)


PAIRS = {architecture: pair(architecture) for architecture in ARCHITECTURES}
COUNTED = NgramDrafter(NgramModel(np.random.default_rng(0).integers(0, VOCAB, 200), 3, VOCAB))


def greedy_text(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy decoding by transformers."""
    made = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=tokens,
        pad_token_id=0,
    )
    tokens_after: list[int] = made[0, len(prompt) :].tolist()
    return tokens_after


@cache
def reference(architecture: str) -> list[list[int]]:
    """The greedy completion of each prompt, up to the last position of the longest."""
    return [greedy_text(PAIRS[architecture][0], prompt, LONGEST) for prompt in MORE]


def cut(text: list[int], eos: Sequence[int]) -> list[int]:
    """`text` up to and with its first token of `eos`."""
    ends = [at for at, token in enumerate(text) if token in eos]
    return text[: ends[0] + 1] if ends else text


# Lengths and ends.


@pytest.mark.parametrize("max_new_tokens", range(1, 8))
@pytest.mark.parametrize("gamma", range(6))
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_completions_are_those_of_transformers_and_as_long_as_asked(
    architecture: str, gamma: int, max_new_tokens: int
) -> None:
    target, draft = PAIRS[architecture]
    made = generate(target, MORE, draft, gamma=gamma, max_new_tokens=max_new_tokens, sampling=GREEDY, progress=False)
    assert made.tokens == [text[:max_new_tokens] for text in reference(architecture)]
    check_record(made)


@pytest.mark.parametrize("make", [neox, qwen2])
def test_greedy_completions_of_other_architectures(make: Callable[..., PreTrainedModel]) -> None:
    target, draft = make(dtype=torch.float64), make(dtype=torch.float64, layers=1)
    made = generate(target, PROMPTS, draft, gamma=3, max_new_tokens=LONGEST, sampling=GREEDY, progress=False)
    assert made.tokens == [greedy_text(target, prompt, LONGEST) for prompt in PROMPTS]


@pytest.mark.parametrize("rule", [greedy_verification, exact_match, rejection_sampling])
def test_every_exact_rule_gives_the_greedy_completion(rule: Rule) -> None:
    target, draft = PAIRS["llama"]
    made = generate(target, MORE, draft, gamma=3, max_new_tokens=8, sampling=GREEDY, rule=rule, progress=False)
    assert made.tokens == [text[:8] for text in reference("llama")]


@pytest.mark.parametrize("eos", [0, 1, 2, 3, [0, 2], [1, 3], (), [0, 1, 2, 3]])
@pytest.mark.parametrize("gamma", [0, 1, 4])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_completions_end_with_their_eos(
    architecture: str, gamma: int, eos: int | list[int] | tuple[int, ...]
) -> None:
    target, draft = PAIRS[architecture]
    made = generate(target, MORE, draft, gamma=gamma, max_new_tokens=LONGEST, sampling=GREEDY, eos=eos, progress=False)
    ends = [eos] if isinstance(eos, int) else eos
    assert made.tokens == [cut(text, ends) for text in reference(architecture)]
    check_record(made)


settings_of_a_run = st.fixed_dictionaries(
    {
        "prompts": st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=4),
        "gamma": st.integers(0, 5),
        "max_new_tokens": st.integers(1, LONGEST),
        "sampling": st.sampled_from([Sampling(), SHARP, Sampling(0.7, top_p=0.8), GREEDY]),
        "seed": st.integers(0, 2**32),
    }
)


@settings(examples, max_examples=60)
@given(
    architecture=st.sampled_from(list(ARCHITECTURES)),
    chosen=settings_of_a_run,
    eos=st.sets(st.integers(0, VOCAB - 1), max_size=2).map(sorted),
)
def test_any_sampled_completion_is_as_long_as_asked_or_ends_with_its_eos(
    architecture: str, chosen: dict[str, Any], eos: list[int]
) -> None:
    """eos only cuts: the same seed without it gives the same tokens, and more of them."""
    target, draft = PAIRS[architecture]
    prompts = chosen.pop("prompts")
    whole = generate(target, prompts, draft, **chosen, progress=False)
    assert [len(text) for text in whole.tokens] == [chosen["max_new_tokens"]] * len(prompts)
    ended = generate(target, prompts, draft, **chosen, eos=eos, progress=False)
    assert ended.tokens == [cut(text, eos) for text in whole.tokens]
    check_record(whole)
    check_record(ended)


# The limit of positions.


@pytest.mark.parametrize("prompt", [(1,), (2, 0, 1, 3, 0, 2), (1,) * (LIMIT - 1)])
@pytest.mark.parametrize("gamma", [0, 1, 5])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_sequence_may_fill_every_position(architecture: str, gamma: int, prompt: tuple[int, ...]) -> None:
    """Draft tokens then exceed the model's last position; that must neither fail nor change a token."""
    target, draft = PAIRS[architecture]
    remaining = LIMIT - len(prompt)
    made = generate(target, [prompt], draft, gamma=gamma, max_new_tokens=remaining, sampling=GREEDY, progress=False)
    assert made.tokens == [greedy_text(target, prompt, remaining)]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_one_token_more_than_there_are_positions_is_refused(architecture: str) -> None:
    target, draft = PAIRS[architecture]
    with pytest.raises(ValueError, match=f"need {LIMIT + 1} positions, and .* has {LIMIT}; shorten"):
        generate(target, [(1, 2), (0,)], draft, max_new_tokens=LIMIT - 1)


def test_the_draft_s_positions_count_too() -> None:
    short = gpt2()
    short.config.n_positions = 8
    with pytest.raises(ValueError, match="a prompt of 2 and 7 new tokens need 9 positions, and GPT2LMHeadModel has 8"):
        generate(llama(), [(1, 2)], short, max_new_tokens=7)


# Rows and seeds.


@pytest.mark.parametrize("eos", [None, 1])
@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_row_does_not_depend_on_the_others(architecture: str, gamma: int, eos: int | None) -> None:
    """The same tokens alone and among seven others, shorter, longer, and some that end earlier."""
    target, draft = PAIRS[architecture]
    common: dict[str, Any] = {"gamma": gamma, "max_new_tokens": 9, "eos": eos, "seed": 11, "progress": False}
    together = generate(target, MORE, draft, **common)
    alone = [generate(target, [prompt], draft, study=Study(rows=[row]), **common) for row, prompt in enumerate(MORE)]
    assert together.tokens == [made.tokens[0] for made in alone]
    if eos is not None:
        assert len({len(text) for text in together.tokens}) > 2
    for row, made in enumerate(alone):
        steps = made.record.emitted.shape[1]
        assert made.record.accepted[0].tolist() == together.record.accepted[row, :steps].tolist()


# Refilled rows.


@settings(examples, max_examples=60)
@given(
    architecture=st.sampled_from(list(ARCHITECTURES)),
    chosen=settings_of_a_run,
    eos=st.sets(st.integers(0, VOCAB - 1), max_size=2).map(sorted),
    batch_size=st.integers(1, 5),
    drafter=st.sampled_from(["model", "ngram", "patchy", "alone"]),
)
def test_refilled_rows_get_the_completions_they_would_get_together(
    architecture: str, chosen: dict[str, Any], eos: list[int], batch_size: int, drafter: str
) -> None:
    target, draft = PAIRS[architecture]
    drafters: dict[str, PreTrainedModel | Drafter | None] = {
        "model": draft, "ngram": COUNTED, "patchy": PatchyDrafter(draft), "alone": None,
    }  # fmt: skip
    prompts = chosen.pop("prompts") * 2
    together = generate(target, prompts, drafters[drafter], **chosen, eos=eos, progress=False)
    few_rows = generate(target, prompts, drafters[drafter], **chosen, eos=eos, batch_size=batch_size, progress=False)
    assert few_rows.tokens == together.tokens
    for field in ("draft_tokens", "accepted", "token", "emitted"):
        assert np.array_equal(getattr(few_rows.record, field), getattr(together.record, field)), field
    assert np.allclose(few_rows.record.beta, together.record.beta)
    check_record(few_rows)


def test_rows_are_never_empty_while_prompts_wait() -> None:
    """Six sequences of very different lengths in two rows: each next one begins as soon as one has ended."""
    steps = []

    class Counted(Batch):
        def step(self) -> None:
            steps.append(self)
            super().step()

    target, _ = PAIRS["llama"]
    asked: dict[str, Any] = {"max_new_tokens": LIMIT - 1, "eos": [1], "batch_size": 2, "progress": False}
    made = generate(target, [(0,)] * 6, **asked, study=Study(batch_class=Counted))
    free = [0, 0]  # when each row is free
    for runs in made.record.target_passes:
        free[free.index(min(free))] += int(runs)
    assert len(steps) == max(free)
    assert len(set(made.record.target_passes)) > 2


def test_a_drafter_that_cannot_restart_single_rows_is_refused() -> None:
    class Forgetful(ModelDrafter):
        can_refill = False

    target, draft = PAIRS["llama"]
    made = generate(target, PROMPTS, Forgetful(draft), max_new_tokens=3, progress=False)
    assert made.tokens == generate(target, PROMPTS, draft, max_new_tokens=3, progress=False).tokens
    with pytest.raises(TypeError, match="3 prompts take turns in 2 rows, and Forgetful cannot restart single rows"):
        generate(target, PROMPTS, Forgetful(draft), max_new_tokens=3, batch_size=2, progress=False)


def test_a_graph_needs_a_device() -> None:
    with pytest.raises(ValueError, match="a graph needs a CUDA device, and the target is on cpu"):
        generate(PAIRS["llama"][0], PROMPTS, max_new_tokens=3, compile="graph", progress=False)
    with pytest.raises(ValueError, match=r"compile is 'fast'; it must be False, True or \"graph\""):
        generate(PAIRS["llama"][0], PROMPTS, max_new_tokens=3, compile="fast", progress=False)


def test_the_seed_decides() -> None:
    target, draft = PAIRS["llama"]
    first, again, other = (
        generate(target, PROMPTS * 4, draft, max_new_tokens=9, seed=seed, progress=False).tokens for seed in (5, 5, 6)
    )
    assert first == again
    assert first != other


def test_rows_of_equal_prompts_have_their_own_uniforms() -> None:
    sequences = generate(*PAIRS["llama"][:1], [(0,)] * 8, max_new_tokens=9, progress=False).tokens
    assert len(set(map(tuple, sequences))) > 4


def test_numbers_of_numpy_and_tensors_are_as_good_as_any() -> None:
    target, draft = PAIRS["llama"]
    plain = generate(target, PROMPTS[1:2], draft, gamma=2, max_new_tokens=5, eos=3, seed=1, progress=False)
    same = generate(
        target,
        torch.tensor(PROMPTS[1:2]),
        draft,
        gamma=np.int64(2),  # type: ignore[arg-type]
        max_new_tokens=np.int32(5),  # type: ignore[arg-type]
        eos=torch.tensor([3]),
        seed=np.uint8(1),  # type: ignore[arg-type]
        study=Study(rows=np.array([0])),
        progress=False,
    )
    assert same.tokens == plain.tokens


def test_numbers_of_eight_bits_are_computed_with_as_any_other() -> None:
    """None of them can hold four times gamma."""
    target, draft = PAIRS["llama"]
    asked: dict[str, Any] = {"gamma": 32, "max_new_tokens": 5, "seed": 200, "batch_size": 2}
    small: dict[str, Any] = {name: np.uint8(number) for name, number in asked.items()} | {"gamma": np.int8(32)}
    plain = generate(target, PROMPTS, draft, progress=False, **asked)
    assert generate(target, PROMPTS, draft, progress=False, **small).tokens == plain.tokens


def test_time_is_recorded_when_asked_for() -> None:
    target, draft = PAIRS["llama"]
    made = generate(target, PROMPTS, draft, max_new_tokens=5, study=Study(timed=True), progress=False)
    assert list(made.record.seconds) == list(PARTS)
    assert all(len(timer) == made.record.emitted.shape[1] for timer in made.record.seconds.values())


def test_a_perfect_draft_needs_the_fewest_forward_passes() -> None:
    """The target as its own draft: everything is accepted, so each step emits gamma + 1 tokens."""
    target, _ = PAIRS["gpt2"]
    made = generate(target, PROMPTS, target, gamma=4, max_new_tokens=10, progress=False)
    assert made.record.target_passes.tolist() == [2, 2, 2]
    assert made.record.tokens_per_step == 5
    assert np.allclose(made.record.beta[made.record.tested], 1)


# NaN.


@pytest.mark.parametrize("sampling", [Sampling(), SHARP, Sampling(top_p=0.9), GREEDY])
@pytest.mark.parametrize("broken", ["target", "draft"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_model_that_produces_nan_is_reported(broken: str, sampling: Sampling, value: float) -> None:
    target, draft = llama(), llama(seed=2)
    weights = (target if broken == "target" else draft).lm_head.weight
    weights.data[1] = value
    with pytest.raises(FloatingPointError, match="produced NaN"):
        generate(target, PROMPTS, draft, max_new_tokens=3, sampling=sampling, progress=False)


# Bad input: refused with a message that says what was given and what is allowed, before any model runs.


def refusing(model: PreTrainedModel) -> PreTrainedModel:
    """A model that fails when it is run."""

    def fail(*_: Any) -> None:
        raise AssertionError("a model ran before its input was checked")

    model.register_forward_pre_hook(fail)
    return model


TARGET, DRAFT = refusing(llama()), refusing(llama(seed=2))
not_whole = st.floats() | st.text(max_size=3) | st.none()
outside = st.integers(max_value=-1) | st.integers(min_value=VOCAB)
vocabulary = f"0 to {VOCAB - 1}"

bad_settings = st.one_of(
    (st.integers(max_value=-1) | not_whole).map(lambda x: ({"gamma": x}, x, "whole number from 0")),
    (st.integers(max_value=0) | not_whole).map(lambda x: ({"max_new_tokens": x}, x, "whole number from 1")),
    (st.integers(max_value=-1) | not_whole).map(lambda x: ({"seed": x}, x, "whole number from 0")),
    (st.integers(max_value=0) | st.floats()).map(lambda x: ({"batch_size": x}, x, "whole number from 1")),
    st.integers(LIMIT - 2, 10**6).map(lambda x: ({"max_new_tokens": x}, 3 + x, f"has {LIMIT}")),
    outside.map(lambda x: ({"eos": x}, x, vocabulary)),
    outside.map(lambda x: ({"eos": [1, x]}, x, vocabulary)),
    outside.map(lambda x: ({"prompts": [[0], [1, x, 2]]}, f"prompt 1 has the token {x}", vocabulary)),
    st.lists(st.lists(st.just(1), min_size=1), max_size=3).map(
        lambda x: ({"prompts": [*x, []]}, f"prompt {len(x)} is empty", "at least one")
    ),
    (st.floats() | st.text(min_size=1, max_size=3)).map(
        lambda x: ({"prompts": [[0], [x]]}, f"prompt 1 is {[x]!r}", "list of tokens")
    ),
    st.just(({"prompts": []}, "no prompts", "at least one")),
    st.just(({"prompts": [0, 1, 2]}, "prompt 0 is 0", "list of tokens")),
    st.just(({"prompts": ["text"]}, "prompt 0 is 'text'", "list of tokens")),
    st.lists(st.integers(0, 9), min_size=2, max_size=5).map(
        lambda x: ({"rows": x}, f"{len(x)} rows", "each prompt has one number")
    ),
    (st.integers(max_value=-1) | not_whole).map(lambda x: ({"rows": [x]}, [x], "whole numbers from 0")),
    st.sampled_from([3, "Batch", int, TreeBatch]).map(lambda x: ({"batch_class": x}, x, "a subclass of Batch")),
)


@examples
@example(({"max_new_tokens": LIMIT - 2}, LIMIT + 1, f"has {LIMIT}"))
@given(bad_settings)
def test_bad_input_is_refused_before_any_model_runs(bad: tuple[dict[str, Any], object, str]) -> None:
    chosen, given_value, allowed = bad
    with pytest.raises((ValueError, TypeError)) as caught:
        generate_with(target=TARGET, draft=DRAFT, **{"prompts": [[0, 1, 2]], "max_new_tokens": 4, **chosen})
    assert str(given_value) in str(caught.value) or repr(given_value) in str(caught.value)
    assert allowed in str(caught.value)


def other_vocabulary() -> NgramDrafter:
    return NgramDrafter(NgramModel(np.zeros(5, dtype=np.int64), 1, VOCAB + 1))


BAD_MODELS = {
    "different vocabularies": (TARGET, refusing(llama(VOCAB + 3)), ValueError, "target has 4 tokens and the draft 7"),
    "a drafter's vocabulary": (TARGET, other_vocabulary(), ValueError, "target has 4 tokens and the draft 5"),
    "different devices": (
        TARGET,
        llama().to("meta"),  # type: ignore[arg-type]
        ValueError,
        "target is on cpu and the draft on meta",
    ),
    "no drafter": (TARGET, "gpt2", TypeError, "draft is a str; it must be a model, a Drafter, or None"),
    "no model": ("gpt2", None, TypeError, "str is no model of transformers"),
    "a sliding window": (refusing(sliding().eval()), None, TypeError, "DynamicSlidingWindowLayer"),
    "an encoder": (refusing(encoder_decoder().eval()), None, TypeError, "is an encoder-decoder"),
    "a draft without positions": (TARGET, refusing(without_positions().eval()), TypeError, "takes no position_ids"),
    "a target that is being trained": (refusing(llama()).train(), None, TypeError, "training mode"),
    "a draft that is being trained": (TARGET, refusing(llama()).train(), TypeError, "training mode"),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_models_that_do_not_fit_are_refused_before_any_of_them_runs(name: str) -> None:
    target, draft, error, message = BAD_MODELS[name]
    with pytest.raises(error, match=re.escape(message)):
        generate(target, [[0, 1]], draft, max_new_tokens=2)


class Restarting(ModelDrafter):
    can_refill = False


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sampling": 0.7}, "sampling is 0.7; it must be a specnb.distributions.Sampling"),
        ({"study": True}, "study is True; it must be a specnb.Study, such as Study(timed=True)"),
        ({"study": Study}, "it must be a specnb.Study, such as Study(timed=True)"),
        ({"timed": 1}, "timed is 1; it must be True or False"),
        ({"progress": 0}, "progress is 0; it must be True or False"),
        ({"keep_probs": "yes"}, "keep_probs is 'yes'; it must be True or False"),
        ({"prompts": 3}, "prompts is 3; it must be a list of prompts"),
        ({"eos": 0.5}, "eos is 0.5; it must be a token"),
        ({"rows": 1}, "rows are 1; they must be a list of whole numbers"),
        ({"gamma": -1}, "gamma is -1; it must be a whole number from 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number from 1"),
        ({"seed": -1}, "seed is -1; it must be a whole number from 0"),
        ({"batch_size": 0}, "batch_size is 0; it must be a whole number from 1"),
        ({"target": llama().to("meta"), "draft": None}, "the target is on the device meta"),  # type: ignore[arg-type]
        ({"draft": 3}, "draft is a int; it must be a model, a Drafter, or None"),
        ({"rule": "none"}, "rule is 'none'; it must be an acceptance rule"),
        ({"rule": recursive_rejection}, "ModelDrafter proposes a chain"),
        ({"prompts": []}, "there are no prompts"),
        ({"rows": [1]}, "there are 3 prompts and 1 rows"),
        ({"eos": VOCAB}, f"eos has the token {VOCAB}"),
        ({"max_new_tokens": LIMIT}, f"and LlamaForCausalLM has {LIMIT}; shorten the prompt"),
        ({"draft": Restarting(llama()), "batch_size": 2}, "3 prompts take turns in 2 rows, and Restarting cannot"),
        ({"compile": "fast"}, "compile is 'fast'; it must be False"),
        ({"compile": "graph"}, "a graph needs a CUDA device"),
        ({"compile": True, "keep_probs": True}, "keep_probs is True and compile is True"),
        ({"batch_class": Drafter}, "it must be a subclass of Batch"),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else "",
)
def test_every_setting_is_checked_before_any_model_runs(wrong: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"target": TARGET, "prompts": PROMPTS, "draft": DRAFT, "max_new_tokens": 4}
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        generate_with(**(asked | wrong))


def test_a_draft_of_its_own_sampling_is_checked_like_any_other() -> None:
    short = refusing(gpt2())
    short.config.n_positions = 4
    with pytest.raises(ValueError, match="GPT2LMHeadModel has 4"):
        generate(TARGET, [[0, 1]], ModelDrafter(short, SHARP), max_new_tokens=3)


# The GPU.


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_gpu_gives_the_tokens_of_the_cpu(architecture: str) -> None:
    """In float64, where rounding does not reach a uniform."""
    target, draft = pair(architecture)
    common: dict[str, Any] = {"gamma": 3, "max_new_tokens": 9, "eos": 1, "seed": 8, "progress": False}
    cpu = generate(target, PROMPTS * 4, draft, **common)
    gpu = generate(target.to("cuda"), PROMPTS * 4, draft.to("cuda"), **common)  # type: ignore[arg-type]
    assert gpu.tokens == cpu.tokens
    assert np.allclose(gpu.record.beta, cpu.record.beta, rtol=0, atol=1e-9)


def test_compiled_steps_give_the_same_completions() -> None:
    target = llama(dtype=torch.float64, layers=1)
    draft = near_copy(target, 0.3)
    common: dict[str, Any] = {"gamma": 1, "max_new_tokens": 6, "progress": False, "eos": 3}
    for seed, prompts in ((1, PROMPTS), (2, PROMPTS[::-1])):  # the second time in the tensors of the first
        plain = generate(target, prompts, draft, seed=seed, **common)
        compiled = generate(target, prompts, draft, seed=seed, compile=True, **common)
        assert compiled.tokens == plain.tokens
        assert np.array_equal(compiled.record.draft_tokens, plain.record.draft_tokens)
        assert np.allclose(compiled.record.beta, plain.record.beta)


# Settings, sizes and memory.


def test_settings_that_are_left_out_have_these_values() -> None:
    defaults = {name: one.default for name, one in inspect.signature(generate).parameters.items() if name != "target"}
    assert defaults.pop("prompts") is inspect.Parameter.empty
    nothing = dict.fromkeys(("draft", "rule", "eos", "batch_size"))
    numbers = {"gamma": 4, "max_new_tokens": 64, "seed": 0}
    flags = {"compile": False, "progress": True}
    assert defaults == {**nothing, **numbers, **flags, "sampling": Sampling(), "study": Study()}
    assert all(defaults[name] is flags[name] for name in flags)
    assert Study() == Study(rows=None, timed=False, keep_probs=False, batch_class=None)


def test_a_generation_cannot_be_changed_and_has_no_distributions_unless_asked_for() -> None:
    made = generate(PAIRS["llama"][0], PROMPTS, max_new_tokens=2, progress=False)
    assert made.probs is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.tokens = []  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_kept_distributions_are_float32_or_better(dtype: torch.dtype) -> None:
    made = generate(
        llama(dtype=dtype), PROMPTS, max_new_tokens=3, batch_size=2, eos=1, study=Study(keep_probs=True), progress=False
    )
    assert made.probs is not None
    assert [probs.shape for probs in made.probs] == [(len(tokens), VOCAB) for tokens in made.tokens]
    assert {probs.dtype for probs in made.probs} == {torch.float64 if dtype == torch.float64 else torch.float32}
    assert all(torch.allclose(probs.sum(dim=1), torch.ones(1, dtype=probs.dtype)) for probs in made.probs)


@pytest.mark.parametrize("compiled", [True, "graph"])
def test_a_compiled_step_has_slots_in_multiples_of_128(compiled: bool | str) -> None:
    for prompt, new, gamma, slots in ((1, 1, 0, 3), (100, 22, 5, 128), (100, 23, 5, 129), (200, 52, 3, 256)):
        assert slots_for(prompt, new, gamma) == slots_for(prompt, new, gamma, compile=False) == slots
        assert slots_for(prompt, new, gamma, compile=compiled) == (128 if slots <= 128 else 256)


class StoppedError(Exception):
    """Raised by a test in place of what comes next."""


class Looking(TableDrafter):
    """Asks for the hidden states of two layers."""

    hidden_layers = (-1, 0)


@pytest.mark.parametrize("keep_probs", [False, True])
@pytest.mark.parametrize("drafter", ["none", "model", "hidden states"])
@pytest.mark.parametrize("gamma", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_memory_that_is_required_is_that_of_the_rows_at_a_time(
    dtype: torch.dtype, gamma: int, drafter: str, keep_probs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formula of `specnb.models.memory`, and the buffers for hidden states and distributions.

    The vocabulary is so large that distributions need more than a forward pass.
    """
    vocab = 300
    target, model = llama(vocab, dtype=dtype), llama(vocab, dtype=dtype, layers=1)
    drafters: dict[str, Any] = {"none": None, "model": model, "hidden states": Looking(torch.eye(vocab))}
    asked: list[tuple[Memory, int, torch.device]] = []

    def stop(*required: Any) -> None:
        asked.append(required)
        raise StoppedError

    monkeypatch.setattr(loop, "require_memory", stop)
    sampling = Sampling(0.7, top_p=0.9)
    with pytest.raises(StoppedError):
        generate(
            target, [[1], [2, 3, 1], [0]], drafters[drafter], gamma=gamma, max_new_tokens=7, batch_size=2,
            sampling=sampling, study=Study(keep_probs=keep_probs), progress=False,
        )  # fmt: skip
    ((need, rows, device),) = asked
    assert (rows, device.type) == (2, "cpu")
    used = gamma if drafter != "none" else 0
    expected = predicted(
        target, model if drafter == "model" else None, rows=2, prompt=3, new_tokens=7, gamma=used, sampling=sampling
    )
    slots = 3 + 7 + used + 1
    more = 2 * slots * (2 * 8) * dtype.itemsize if drafter == "hidden states" and gamma else 0
    more += 2 * (7 + used + 1) * vocab * (8 if dtype == torch.float64 else 4) if keep_probs else 0
    assert expected.step > predicted(target, None, rows=2, prompt=3, new_tokens=7, gamma=used).step
    assert need == dataclasses.replace(expected, state=expected.state + more)


def test_no_more_rows_are_made_than_there_are_prompts() -> None:
    rows: list[int] = []

    class Counted(Batch):
        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            rows.append(len(self.state.rows))

    for batch_size in (None, 1, 2, 3, 9):
        generate(
            llama(), PROMPTS, max_new_tokens=1, batch_size=batch_size, progress=False, study=Study(batch_class=Counted)
        )
    assert rows == [3, 1, 2, 3, 3]


class OfTree(TreeBatch):
    pass


class OfChain(Batch):
    pass


@pytest.mark.parametrize(
    ("given", "rule", "needed"),
    [
        (OfTree, None, "Batch"),
        (TreeBatch, exact_match, "Batch"),
        (Batch, recursive_rejection, "TreeBatch"),
        (OfChain, recursive_rejection, "TreeBatch"),
        (int, None, "Batch"),
        (int, recursive_rejection, "TreeBatch"),
        ("Batch", None, "Batch"),
        ("Batch", recursive_rejection, "TreeBatch"),
    ],
)
def test_a_batch_class_for_other_draft_tokens_is_refused(given: Any, rule: Any, needed: str) -> None:
    with pytest.raises(TypeError) as caught:
        generate(TARGET, PROMPTS, rule=rule, max_new_tokens=2, study=Study(batch_class=given))
    assert str(caught.value) == f"batch_class is {given!r}; for this rule it must be a subclass of {needed}"


def test_a_batch_class_for_these_draft_tokens_makes_the_steps() -> None:
    plain = generate(llama(), PROMPTS, max_new_tokens=5, progress=False)
    for kind, rule in ((OfChain, None), (Batch, None), (OfTree, recursive_rejection), (None, recursive_rejection)):
        made = generate(llama(), PROMPTS, max_new_tokens=5, rule=rule, study=Study(batch_class=kind), progress=False)
        assert made.tokens == plain.tokens


# What is shown and timed.


class Bar:
    """Stands for tqdm: what it was made with, and where it was after each move."""

    made: list["Bar"]

    def __init__(self, **settings: Any) -> None:
        self.settings, self.n, self.places = settings, 0, [0]
        self.made.append(self)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def update(self, by: int) -> None:
        self.n += by
        self.places.append(self.n)


@pytest.mark.parametrize("progress", [False, True])
def test_the_bar_counts_tokens_and_those_that_will_not_come(progress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five prompts of 9 tokens in two rows, some of which end early: after each step, all but what can still come."""
    Bar.made = []
    monkeypatch.setattr(loop, "tqdm", Bar)
    made = generate(PAIRS["llama"][0], MORE[:5], max_new_tokens=9, eos=1, batch_size=2, seed=3, progress=progress)
    (bar,) = Bar.made
    assert bar.settings == {"total": 45, "desc": "tokens", "delay": 3, "leave": False, "disable": not progress}
    assert bar.places == sorted(bar.places)
    assert (bar.places[0], bar.n) == (0, 45)
    # The first step gives each of the two rows a token; one that ends takes what it could still have had with it.
    first = sum(9 if len(tokens) == 1 else 1 for tokens in made.tokens[:2])
    assert bar.places[1] == first
    assert len({len(tokens) for tokens in made.tokens}) > 1


def test_each_part_of_each_step_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is read."""
    readings = iter(range(1000))
    monkeypatch.setattr("specnb.decoding.record.now", lambda _: float(next(readings)))
    target, draft = PAIRS["llama"]
    made = generate(
        target, MORE, draft, gamma=2, max_new_tokens=6, batch_size=3, study=Study(timed=True), progress=False
    )
    lengths = {part: len(seconds) for part, seconds in made.record.seconds.items()}
    assert list(lengths) == list(PARTS)
    assert len(set(lengths.values())) == 1
    assert next(readings) == 4 * lengths["draft"], "the clock is read as a step begins and as each of its parts ends"
    assert all((seconds == 1).all() for seconds in made.record.seconds.values())
    untimed = generate(target, MORE, draft, gamma=2, max_new_tokens=6, batch_size=3, progress=False)
    assert untimed.record.seconds == {}
    assert untimed.tokens == made.tokens


# Compiled and captured steps, with what stands for the compiler.


class Compiler:
    """Stands for `Compiled`: runs the function as it is, and remembers which ones it was given."""

    functions: list[str]

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.functions.append(function.__name__)

    def __call__(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the functions that were compiled."""
    Compiler.functions = []
    monkeypatch.setattr(loop, "Compiled", Compiler)
    monkeypatch.setattr("specnb.drafting.model.Compiled", Compiler)
    forget_compiled()
    yield Compiler.functions
    forget_compiled()


IN_PARTS = ["_sample_tokens", "run_target", "verify_and_emit"]


def test_each_part_is_compiled_once_for_each_length(compiler: list[str]) -> None:
    target, draft = PAIRS["llama"]
    common: dict[str, Any] = {"gamma": 2, "eos": 3, "progress": False}
    for new, prompts, timed in ((6, PROMPTS, False), (4, PROMPTS[::-1], False), (6, MORE[3:6], True)):
        plain = generate(target, prompts, draft, max_new_tokens=new, **common)
        made = generate(target, prompts, draft, max_new_tokens=new, compile=True, study=Study(timed=timed), **common)
        assert made.tokens == plain.tokens
        assert sorted(compiler) == IN_PARTS
    generate(target, PROMPTS[:2], draft, max_new_tokens=6, compile=True, **common)
    assert sorted(compiler) == sorted(2 * IN_PARTS), "for another number of rows"
    forget_compiled()
    generate(target, PROMPTS, draft, max_new_tokens=6, compile=True, **common)
    assert sorted(compiler) == sorted(3 * IN_PARTS)


@pytest.mark.parametrize("progress", [False, True])
def test_a_compiled_batch_is_warmed_up_at_first_and_has_memory_then(
    progress: bool, compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots, and so its steps, are counted up to the multiple of 128."""
    warmed: list[Any] = []
    target = llama()
    warm_up = Batch.warm_up
    monkeypatch.setattr(Batch, "warm_up", lambda batch, shown: warmed.append((batch, shown)) or warm_up(batch, False))
    monkeypatch.setattr(loop, "require_memory", lambda *required: warmed.append(required))
    monkeypatch.setattr(Bar, "made", [], raising=False)
    monkeypatch.setattr(loop, "tqdm", Bar)
    for _ in range(2):
        generate(target, PROMPTS, max_new_tokens=3, compile=True, eos=[1, 2], progress=progress)
    (need, rows, device), (batch, shown) = warmed
    assert (rows, device.type, shown) == (3, "cpu", progress)
    assert (batch.state.tokens.shape[1], batch.state.uniforms.shape[1]) == (128, 129)
    assert (batch.state.gamma, len(batch.state.rows), len(batch.state.eos)) == (0, 3, 2)
    assert need == predicted(target, None, rows=3, prompt=max(map(len, PROMPTS)), gamma=0,
                             new_tokens=127 - max(map(len, PROMPTS)))  # fmt: skip


def test_the_last_eight_settings_stay_compiled(compiler: list[str]) -> None:
    target = llama()

    def decode(*eos: int) -> int:
        """With so many tokens of eos, which is a setting of its own; how often something has been compiled since."""
        generate(target, [[1]], max_new_tokens=1, compile=True, eos=[0] * len(eos), progress=False)
        return compiler.count("run_target")

    assert [decode(*range(number)) for number in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [decode(*range(number)) for number in range(8)] == [8] * 8
    assert decode(*range(8)) == 9
    assert decode() == 10, "the one that had not been used for longest was forgotten"


@pytest.mark.parametrize(
    ("drafter", "in_parts", "captured"),
    [
        (None, False, ("step",)),
        (None, True, ("target", "rest")),
        (SimpleNamespace(capturable=True), False, ("step",)),
        (SimpleNamespace(capturable=True), True, ("draft", "target", "rest")),
        (SimpleNamespace(capturable=False), False, ("target", "rest")),
        (SimpleNamespace(capturable=False), True, ("target", "rest")),
    ],
)
def test_a_whole_step_is_captured_unless_it_is_timed_or_drafts_cannot_be(
    drafter: Any, in_parts: bool, captured: tuple[str, ...]
) -> None:
    wrapped: list[Any] = []
    batch: Any = SimpleNamespace(drafter=drafter, wrap=lambda wrapper, *parts: wrapped.append((wrapper, parts)))
    loop._capture(batch, in_parts)
    assert wrapped == [(Captured, captured)]


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize("how", [True, "graph"])
def test_on_a_gpu_a_step_is_captured_and_compiled_only_if_asked(
    how: bool | str, timed: bool, compiler: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a batch that only says what becomes of it."""
    said: list[Any] = []
    device = torch.device("cuda", 0)

    class Silent(Batch):
        def __init__(self, target: Any, drafter: Any, *settings: Any) -> None:
            self.drafter = drafter
            said.append((drafter.compile, drafter.capturable, settings[2:]))

        def wrap(self, wrapper: Any, *parts: str) -> None:
            said.append((wrapper, *parts))

        @property
        def cold(self) -> bool:  # type: ignore[override]
            raise StoppedError

    target, draft = PAIRS["llama"]
    monkeypatch.setattr(loop, "require_models", lambda *models: None)
    monkeypatch.setattr("specnb.models.memory.available", lambda device: 10**12)
    monkeypatch.setattr(type(target), "device", device)
    asked: dict[str, Any] = {"gamma": 2, "max_new_tokens": 6, "eos": 1, "progress": False}
    with pytest.raises(StoppedError):
        generate(target, PROMPTS, draft, compile=how, study=Study(timed=timed, batch_class=Silent), **asked)
    parts = ("draft", "target", "rest") if timed else ("step",)
    compiled = [(Compiler, "target", "rest")] if how is True else []
    # Rows, gamma, slots, steps and tokens of eos.
    assert said == [(how is True, True, (3, 2, 128, 128, 1)), *compiled, (Captured, *parts)]
