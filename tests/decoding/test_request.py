"""Bad input to `generate`: either it works, or it is refused before any model runs, with a message that says why."""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from implementation_distribution import VOCAB
from tiny import llama, near_copy
from torch import Tensor, nn
from transformers import LlamaModel, PreTrainedModel

from specnb.decoding.loop import generate
from specnb.decoding.request import LARGEST_SPARE_GAMMA, useful_gamma
from specnb.drafting.base import MEMBERS, Context, Drafter, Proposal
from specnb.sampling.distributions import Sampling
from specnb.sampling.tree_verification import TreeRule
from specnb.sampling.verification import Outcome, token_verification

TARGET = llama()
DRAFT = near_copy(TARGET, 0.1)
PROMPT = [1, 2, 0]
ASKED: dict[str, Any] = {"max_new_tokens": 4, "progress": False}


# Values with an obvious meaning work.


def plain(**settings: Any) -> list[list[int]]:
    return generate(TARGET, [PROMPT], DRAFT, **{**ASKED, **settings}).tokens


@pytest.mark.parametrize(
    "prompts",
    [
        (tuple(PROMPT),),
        np.array([PROMPT], dtype=np.uint8),
        [torch.tensor(PROMPT, dtype=torch.int32)],
        [[torch.tensor(1), np.int64(2), 0]],
    ],
    ids=["tuple", "array", "tensor", "scalars"],
)
def test_any_ordered_whole_numbers_are_prompts(prompts: Any) -> None:
    assert generate(TARGET, prompts, DRAFT, **ASKED).tokens == plain()


@pytest.mark.parametrize("eos", [2, np.int64(2), torch.tensor(2), [2], {2}, (2, 2)])
def test_any_whole_numbers_end_a_sequence(eos: Any) -> None:
    assert plain(eos=eos) == plain(eos=[2])


@pytest.mark.parametrize("large", [2**63, 2**64 - 1, 2**64, 10**5000], ids=["2^63", "2^64-1", "2^64", "10^5000"])
def test_large_seeds_and_rows_give_sequences_of_their_own(large: int) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 13, "progress": False}
    near = [generate(TARGET, [PROMPT] * 4, seed=seed, **asked).tokens for seed in (0, large, large + 1)]
    later = [generate(TARGET, [PROMPT] * 4, rows=range(at, at + 4), **asked).tokens for at in (large, large + 4)]
    assert len({str(tokens) for tokens in near + later}) == 5


@pytest.mark.parametrize(
    ("numbers", "same"),
    [
        ((Fraction(1, 2), np.int64(3), Fraction(3, 4)), Sampling(0.5, 3, 0.75)),
        ((np.float16(0.5), None, np.float32(0.5)), Sampling(0.5, None, 0.5)),
        ((-0.0,), Sampling(0)),
        ((1, 10**30), Sampling()),
        ((1, None, 5e-324), Sampling(0)),
    ],
    ids=str,
)
def test_numbers_of_any_type_are_settings(numbers: tuple[Any, ...], same: Sampling) -> None:
    """The least top_p keeps the most probable token, although it is 0 in float32."""
    assert plain(sampling=Sampling(*numbers)) == plain(sampling=same)


# Invalid values are refused.


def deep() -> list[Any]:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


def of_another_vocabulary() -> PreTrainedModel:
    model = llama()
    model.config.vocab_size = 9
    return model


@contextmanager
def untouched(*models: nn.Module) -> Iterator[None]:
    """Fails if one of `models` runs."""

    def fail(*arguments: Any) -> None:
        raise AssertionError("a model ran")

    hooks = [model.register_forward_pre_hook(fail) for model in models]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": [[True]]}, r"prompt 0 is \[True\]"),
        ({"prompts": torch.tensor([[1.0]])}, r"prompt 0 is \[1.0\]"),
        ({"prompts": torch.tensor([[True]])}, r"prompt 0 is \[True\]"),
        ({"prompts": 3}, "prompts is 3; it must be a list of prompts"),
        ({"prompts": [{1, 2}]}, r"prompt 0 is \{1, 2\}"),
        ({"prompts": [b"\1"]}, "prompt 0 is b"),
        ({"target": LlamaModel(TARGET.config).eval()}, "LlamaModel gives no next-token logits"),
        ({"draft": LlamaModel(TARGET.config).eval()}, "LlamaModel gives no next-token logits"),
        ({"target": llama().to("meta")}, "the target is on the device meta"),  # type: ignore[arg-type]
        ({"sampling": None}, r"sampling is None; it must be a specnb.sampling.distributions.Sampling"),
        ({"rule": "token"}, "rule is 'token'"),
        ({"eos": [2.0]}, r"eos is \[2.0\]"),
        ({"eos": "a"}, "eos is 'a'"),
        ({"eos": True}, "eos is True"),
        ({"rows": 0}, "rows are 0; they must be a list of whole numbers from 0"),
        ({"rows": [True]}, r"rows are \[True\]"),
        ({"max_new_tokens": True}, "max_new_tokens is True"),
        ({"gamma": torch.tensor(2.0)}, "gamma is tensor"),
        ({"seed": np.True_}, "seed is np.True_"),
        ({"compile": 1}, "compile is 1; it must be False, True"),
        ({"compile": None}, "compile is None"),
        ({"timed": "no"}, "timed is 'no'; it must be True or False"),
        ({"progress": np.array([1, 2])}, r"progress is array\(\[1, 2\]\); it must be True or False"),
        ({"keep_probs": None}, "keep_probs is None; it must be True or False"),
        ({"prompts": torch.ones(1, 2, dtype=torch.int64, device="meta")}, "prompts is tensor.*a list of prompts"),
        ({"prompts": [torch.ones(2, dtype=torch.int64).to_sparse()]}, r"prompt 0 is tensor[\s\S]*a list of tokens"),
        ({"prompts": deep()}, "prompt 0 is a list too long to show"),
        ({"eos": [Unprintable()]}, "eos is a list too long to show"),
        ({"rows": itertools.count()}, r"rows are count\(0\); they must be a list"),
        ({"rows": range(2)}, "there are 1 prompts and 2 rows"),
        ({"prompts": itertools.repeat(PROMPT)}, r"prompts is repeat.*; it must be a list of prompts"),
        ({"prompts": (PROMPT for _ in range(1))}, "prompts is <generator .*; it must be a list of prompts"),
        ({"prompts": [itertools.repeat(1)]}, r"prompt 0 is repeat\(1\); each prompt is a list of tokens"),
        ({"eos": itertools.repeat(1)}, r"eos is repeat\(1\); it must be a token"),
        ({"rule": len}, "rule is <built-in function len>; it must be an acceptance rule"),
        ({"rule": Sampling}, "rule is <class .*; it must be an acceptance rule"),
        ({"draft": Drafter}, r"draft is the class Drafter; .*: give Drafter\(...\)"),
        ({"target": of_another_vocabulary()}, "LlamaForCausalLM has 9 tokens, and its embedding 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_value_is_refused_by_name_before_a_model_runs(wrong: dict[str, Any], message: str) -> None:
    asked: dict[str, Any] = {"target": TARGET, "prompts": [PROMPT], "draft": DRAFT, **ASKED, **wrong}
    with untouched(TARGET, DRAFT), pytest.raises((TypeError, ValueError), match=message):
        generate(**asked)


@pytest.mark.parametrize(
    "temperature", [1e-300, 1e-39, 1e300, 10**400, True, "1", None], ids=lambda value: repr(value)[:9]
)
def test_a_temperature_that_float32_cannot_hold_is_refused(temperature: Any) -> None:
    with pytest.raises(ValueError, match=r"temperature is .* must be 0 \(argmax\) or positive and finite"):
        Sampling(temperature)


def test_the_least_temperature_gives_the_argmax() -> None:
    least = Sampling(torch.finfo(torch.float32).tiny)
    assert plain(sampling=least) == plain(sampling=Sampling(0))


# gamma beyond what a step can emit.


def test_a_gamma_beyond_the_tokens_asked_for_is_reduced() -> None:
    capped = generate(TARGET, [PROMPT], DRAFT, gamma=10**30, **ASKED)
    assert capped.record.gamma == LARGEST_SPARE_GAMMA
    assert capped.tokens == plain(gamma=LARGEST_SPARE_GAMMA)


def test_a_gamma_up_to_the_limit_is_not_reduced() -> None:
    assert generate(TARGET, [PROMPT], DRAFT, gamma=LARGEST_SPARE_GAMMA, **ASKED).record.gamma == LARGEST_SPARE_GAMMA
    assert generate(TARGET, [PROMPT], DRAFT, gamma=7, **ASKED).record.gamma == 7
    assert useful_gamma(99, 99, Proposing()) == 98  # and the token after them


# Invalid drafters, rules and proposals.


class Proposing(Drafter):
    """Proposes token 1 with a q of its own."""

    vocab = VOCAB

    def __init__(self, change: Callable[..., Any] = lambda draft_tokens, q: (draft_tokens, q)) -> None:
        self.change = change

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        draft_tokens = torch.ones(uniforms.shape, dtype=torch.int64)
        changed = self.change(draft_tokens, torch.full((*uniforms.shape, VOCAB), 1 / VOCAB))
        return Proposal(*changed) if len(changed) == 2 else changed


@pytest.mark.parametrize(
    ("member", "value"),
    [
        *(("vocab", value) for value in (None, "4", 4.0, True)),
        *(("parents", value) for value in ((-1.0, 0), "ab", 2, [None])),
        *(("hidden_layers", value) for value in (None, -1, ("a",), (0.5,))),
        *(("draft_model", value) for value in ("x", 1)),
        *((name, value) for name in ("start", "propose", "update") for value in (None, 3, lambda: None)),
    ],
    ids=lambda value: repr(value).split(" at ")[0],  # without an address
)
def test_a_drafter_with_an_improper_member_is_refused_before_a_model_runs(member: str, value: Any) -> None:
    drafter = Proposing()
    setattr(drafter, member, value)
    with untouched(TARGET), pytest.raises(TypeError, match=rf"Proposing\.{member} is .*; it must be "):
        generate(TARGET, [PROMPT], drafter, gamma=2, **ASKED)


@pytest.mark.parametrize(
    "returned",
    [
        lambda rows: None,
        lambda rows: (rows, rows),
        lambda rows: Outcome(rows.float(), rows),
        lambda rows: Outcome(rows[:, None], rows),
        lambda rows: Outcome(rows, rows.tolist()),
    ],
)
@pytest.mark.parametrize("parents", [None, (-1,)], ids=["chain", "tree"])
def test_a_rule_that_returns_no_outcome_is_reported(
    returned: Callable[[Tensor], Any], parents: tuple[int, ...] | None
) -> None:
    def rule(p: Tensor, *others: Any) -> Any:
        return returned(torch.zeros(len(p), dtype=torch.int64))

    drafter = Proposing()
    drafter.parents = parents
    with pytest.raises(TypeError, match=r"the rule returned a .*; it must return an Outcome of two int64 tensors"):
        generate(TARGET, [PROMPT], drafter, gamma=1, rule=TreeRule(rule) if parents else rule, **ASKED)


def negative(draft_tokens: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Sums to 1 all the same."""
    return draft_tokens, q + torch.tensor([-0.5, 0.5, 0.0, 0.0])


IMPROPER = {
    "sum 2": lambda draft_tokens, q: (draft_tokens, 2 * q),
    "sum 1.001": lambda draft_tokens, q: (draft_tokens, 1.001 * q),
    "sum 0": lambda draft_tokens, q: (draft_tokens, 0 * q),
    "no draft, yet a q": lambda draft_tokens, q: (draft_tokens - 2, q),
    "negative": negative,
    "outside the vocabulary": lambda draft_tokens, q: (draft_tokens + VOCAB, q),
    "below -1": lambda draft_tokens, q: (draft_tokens - 5, 0 * q),
}


@pytest.mark.parametrize("parents", [None, (-1, 0, -1, -1)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", IMPROPER)
def test_a_q_that_is_no_distribution_is_reported(name: str, parents: tuple[int, ...] | None) -> None:
    drafter = Proposing(IMPROPER[name])
    drafter.parents = parents
    with pytest.raises(ValueError, match="a token outside the vocabulary, or a q that is no distribution"):
        generate(TARGET, [PROMPT, [0]], drafter, gamma=4, **ASKED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda draft_tokens, q: (draft_tokens[:, :1], q), "shapes"),
        (lambda draft_tokens, q: (draft_tokens, q[..., :1]), "shapes"),
        (lambda draft_tokens, q: (draft_tokens.float(), q), "int64"),
        (lambda draft_tokens, q: (draft_tokens, q.bfloat16()), "float32 or float64"),
        (lambda draft_tokens, q: (draft_tokens.tolist(), q), "both must be tensors"),
        (lambda draft_tokens, q: (draft_tokens, q, q), "must return a Proposal"),
    ],
    ids=["draft_tokens", "vocabulary", "float drafts", "bfloat16", "lists", "three"],
)
def test_a_proposal_of_another_shape_or_type_is_reported(change: Callable[..., Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        generate(TARGET, [PROMPT], Proposing(change), **ASKED)


def test_the_q_of_rows_that_have_ended_is_not_checked() -> None:
    class Careless(Proposing):
        """Twice a distribution where a sequence has ended."""

        def propose(self, context: Context, uniforms: Tensor) -> Proposal:
            draft_tokens, q = super().propose(context, uniforms)
            return Proposal(draft_tokens, torch.where((context.newest == 3)[:, None, None], 2 * q, q))

    made = generate(TARGET, [[1]] * 4, Careless(), max_new_tokens=9, progress=False, eos=3)
    assert len(set(map(len, made.tokens))) > 1


# NaN, and refilled rows.


def broken() -> PreTrainedModel:
    model = llama()
    model.lm_head.weight.data[1] = float("nan")
    return model


@pytest.mark.parametrize("gamma", [0, 3])
def test_nan_of_the_target_is_reported_with_and_without_draft_tokens(gamma: int) -> None:
    with pytest.raises(FloatingPointError, match="produced NaN"):
        generate(broken(), [PROMPT], DRAFT, gamma=gamma, **ASKED)


def broken_behind_the_draft() -> PreTrainedModel:
    """NaN at the last position of each forward pass over several: after the last draft token, which nothing tests."""
    model = llama()

    def spoil(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        return logits.masked_fill(torch.arange(logits.shape[1])[:, None] == max(1, logits.shape[1] - 1), float("nan"))

    model.lm_head.register_forward_hook(spoil)
    return model


@pytest.mark.parametrize("parents", [None, (-1,)], ids=["chain", "tree"])
def test_nan_after_the_last_draft_token_is_reported(parents: tuple[int, ...] | None) -> None:
    drafter = Proposing()
    drafter.parents = parents
    with pytest.raises(FloatingPointError, match="produced NaN"):
        generate(broken_behind_the_draft(), [PROMPT], drafter, gamma=1, **ASKED)


def test_prompts_that_take_over_a_row_keep_their_own_numbers() -> None:
    """What a prompt gets depends on its number in `rows`, not on its place among the prompts or in the batch."""
    rows = [7, 3, 11, 5, 2]
    asked: dict[str, Any] = {"max_new_tokens": 9, "progress": False, "eos": 3, "gamma": 2}
    together = generate(TARGET, [PROMPT] * 5, DRAFT, rows=rows, batch_size=2, **asked)
    alone = [generate(TARGET, [PROMPT], DRAFT, rows=[row], **asked).tokens[0] for row in rows]
    assert together.tokens == alone
    assert len(set(map(tuple, alone))) > 2


# Anything at all.

scalars = (
    st.none() | st.booleans() | st.integers(-3, 6) | st.integers() | st.floats() | st.text(max_size=3)
    | st.binary(max_size=3) | st.complex_numbers() | st.fractions() | st.decimals()
    | st.sampled_from([2**63, 2**64, -(2**63), 10**4000, np.int64(2), np.float32(1), np.True_, np.datetime64("nat"),
                       torch.tensor(1), torch.tensor(1.0), torch.tensor(True), torch.tensor([]), object(), int,
                       torch.ones(1, 1, device="meta"), torch.eye(2).to_sparse(), Drafter, len, slice(3), -0.0,
                       np.int8(-1), np.ma.masked, range(2)])
)  # fmt: skip
arrays = st.lists(st.integers(-1, VOCAB) | st.floats(), max_size=3).flatmap(
    lambda values: st.sampled_from(
        [np.array(values), torch.tensor(values), iter(values), np.array(values, dtype=object)]
    )
)
anything = st.recursive(
    scalars | arrays,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.integers(), inner),
    max_leaves=5,
)  # fmt: skip
improper = st.sampled_from(list(IMPROPER.values())).map(Proposing)
good = {
    "target": st.just(TARGET),
    "prompts": st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=3),
    "draft": st.none() | st.just(DRAFT),
    "gamma": st.integers(0, 5) | st.just(10**6),
    "max_new_tokens": st.integers(1, 6),
    "sampling": st.just(Sampling()),
    "rule": st.just(token_verification),
    "eos": st.none() | st.integers(0, VOCAB - 1),
    "seed": st.integers(0),
    "rows": st.none(),
    "batch_size": st.none() | st.integers(1, 3),
    "compile": st.just(False),
    "timed": st.booleans(),
    "progress": st.just(False),
    "keep_probs": st.booleans(),
}
own_sampling = [scalars | st.just(usual) for usual in (0.5, None, 0.5)]


def drafter_with(member: str, value: Any) -> Drafter:
    drafter = Proposing()
    setattr(drafter, member, value)
    return drafter


bad = dict.fromkeys(good, anything) | {
    "prompts": anything | st.builds(itertools.repeat, st.just(PROMPT)) | st.builds(lambda: [itertools.repeat(1)]),
    "eos": anything | st.builds(itertools.repeat, st.just(1)),
    "draft": anything | improper | st.builds(drafter_with, st.sampled_from(MEMBERS), anything),
    "sampling": anything | st.builds(lambda *values: values, *own_sampling),
    "rows": anything | st.builds(itertools.count),
    "compile": anything.filter(lambda value: value is not True),
}


@st.composite
def calls(draw: st.DrawFn) -> dict[str, Any]:
    wrong = draw(st.sets(st.sampled_from(sorted(good)), max_size=2))
    return {name: draw(bad[name] if name in wrong else good[name]) for name in good}


MANY = int(os.environ.get("SPECNB_EXAMPLES", "40"))
"""How many calls are tried: `SPECNB_EXAMPLES=2000` for a long run."""
EXPLAINED = ("must", "need", "no model", "no next-token", "whole numbers", "list", "vocabulary", "prompt", "rows")


@settings(examples, max_examples=MANY)
@given(calls())
def test_any_call_works_or_says_what_is_wrong(call: dict[str, Any]) -> None:
    message = said_of(call)
    assert message is None or any(word in message for word in EXPLAINED)


def said_of(call: dict[str, Any]) -> str | None:
    """The message of the error that a call raises, if that is one of those that `generate` announces."""
    values = call["sampling"]
    try:
        sampling = Sampling(*values) if isinstance(values, tuple) and len(values) == 3 else values
        made = generate(**{"progress": False, **call, "sampling": sampling})
    except (ValueError, TypeError, FloatingPointError, MemoryError) as error:
        return str(error)
    assert all(0 <= token < VOCAB for tokens in made.tokens for token in tokens)
    return None
