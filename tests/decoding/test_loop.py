"""The loop, apart from its distribution: greedy identity, lengths and ends, independence of rows, bad input."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st
from implementation_distribution import PROMPTS, SHARP, VOCAB, PatchyDrafter, check_record
from tiny import ARCHITECTURES, LIMIT, gpt2, llama, near_copy, neox, qwen2
from transformers import PreTrainedModel
from unsupported_models import encoder_decoder, sliding, without_positions

from specnb.decoding.loop import generate
from specnb.decoding.step import Batch
from specnb.decoding.timing import PARTS
from specnb.decoding.tree_step import TreeBatch
from specnb.drafting.base import Drafter
from specnb.drafting.model import ModelDrafter
from specnb.drafting.ngram import NgramDrafter, NgramModel
from specnb.sampling.distributions import Sampling
from specnb.sampling.verification import Rule, exact_match, greedy_verification, rejection_sampling

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
    alone = [generate(target, [prompt], draft, rows=[row], **common) for row, prompt in enumerate(MORE)]
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
    made = generate(target, [(0,)] * 6, **asked, batch_class=Counted)
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
        rows=np.array([0]),
        progress=False,
    )
    assert same.tokens == plain.tokens


def test_time_is_recorded_when_asked_for() -> None:
    target, draft = PAIRS["llama"]
    made = generate(target, PROMPTS, draft, max_new_tokens=5, timed=True, progress=False)
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
        generate(TARGET, draft=DRAFT, **{"prompts": [[0, 1, 2]], "max_new_tokens": 4, **chosen})
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
