"""Bad input to `generate`: either it works, or it is refused before any model runs, with a message that says why."""

import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from implementation_distribution import VOCAB
from study_calls import generate_with
from tiny import llama, near_copy
from torch import Tensor, nn
from transformers import LlamaModel, PreTrainedModel

from specnb import distributions
from specnb.decoding import request, step
from specnb.decoding.generate import Study, generate
from specnb.decoding.record import CompletedRow
from specnb.decoding.request import LARGEST_SPARE_GAMMA, rule_for, useful_gamma
from specnb.decoding.scheduler import ProgressReader, Scheduler, require_no_nan
from specnb.distributions import Sampling
from specnb.drafting.base import MEMBERS, Context, Drafter, Proposal
from specnb.rules import Outcome, TreeRule, exact_match, recursive_rejection, token_verification

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
    later = [
        generate(TARGET, [PROMPT] * 4, study=Study(rows=range(at, at + 4)), **asked).tokens for at in (large, large + 4)
    ]
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
        ({"sampling": None}, r"sampling is None; it must be a specnb.distributions.Sampling"),
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
        generate_with(**asked)


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
    together = generate(TARGET, [PROMPT] * 5, DRAFT, study=Study(rows=rows), batch_size=2, **asked)
    alone = [generate(TARGET, [PROMPT], DRAFT, study=Study(rows=[row]), **asked).tokens[0] for row in rows]
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
        made = generate_with(**{"progress": False, **call, "sampling": sampling})
    except (ValueError, TypeError, FloatingPointError, MemoryError) as error:
        return str(error)
    assert all(0 <= token < VOCAB for tokens in made.tokens for token in tokens)
    return None


# Every requirement by itself: what it accepts, and its complete message for what it refuses.


class Tree(Proposing):
    parents = (-1, 0, -1)


class Misnumbered(Proposing):
    parents = (-1, 1)


class NoRefill(Proposing):
    can_refill = False


def three(p: Tensor, q: Tensor, draft_tokens: Tensor) -> Any:
    """Takes too few arguments for a rule."""


def five_or_six(p: Tensor, q: Tensor, draft_tokens: Tensor, *others: Any) -> Any:
    """Takes enough."""


of_five = TreeRule(token_verification)  # type: ignore[arg-type]
LISTS = "it must be a list of prompts, each a list of tokens"
FLAGS, SIZES = "it must be True or False", "each prompt is a list of tokens, which are whole numbers"
ENDS, ROWS = (
    "it must be a token, which is a whole number, a list of tokens, or None",
    "they must be a list of whole numbers from 0",
)
KNOWN = "the vocabulary has the tokens 0 to 3"
A_RULE = "it must be an acceptance rule of specnb.rules, or such a function"
CPU = torch.device("cpu")
ELSEWHERE: Any = llama().to("meta")  # type: ignore[arg-type]
NO_OBJECT: Any = Proposing


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: request.require_flags(a=True, b=1), TypeError, f"b is 1; {FLAGS}"),
        (lambda: request.require_flags(a=None), TypeError, f"a is None; {FLAGS}"),
        (
            lambda: distributions.require_sampling((1.0, None, 1.0)), TypeError,
            "sampling is (1.0, None, 1.0); it must be a specnb.distributions.Sampling, such as Sampling()",
        ),
        (lambda: rule_for("x", None, 4), TypeError, f"rule is 'x'; {A_RULE}"),
        (lambda: rule_for(three, Proposing(), 4), TypeError, f"rule is {three!r}; {A_RULE}"),
        (lambda: rule_for(recursive_rejection.function, Tree(), 3), TypeError,
         f"rule is {recursive_rejection.function!r}; {A_RULE}"),
        (
            lambda: rule_for(exact_match, Tree(), 3), TypeError,
            f"Tree proposes a tree, and rule is {exact_match!r}; it must be a TreeRule, such as recursive_rejection, "
            "or None",
        ),
        (
            lambda: rule_for(recursive_rejection, Proposing(), 1), TypeError,
            f"Proposing proposes a chain, and rule is {recursive_rejection!r}; it must be a rule for chains, or None",
        ),
        (
            lambda: useful_gamma(4, 9, Tree()), ValueError,
            "gamma is 4, and the tree of Tree has 3 nodes; give gamma=3, or 0 to decode without draft tokens",
        ),
        (
            lambda: useful_gamma(2, 9, Misnumbered()), ValueError,
            "parents are (-1, 1), and node 1 has the parent 1; it must be an earlier node, or -1 for the root",
        ),
        (
            lambda: request.require_models(ELSEWHERE, None), ValueError,
            "the target is on the device meta, where it has no weights; load it on another",
        ),
        (
            lambda: request.require_models(TARGET, drafter_with("draft_model", ELSEWHERE)), ValueError,
            "the target is on cpu and the draft on meta; move one of them",
        ),
        (
            lambda: request.require_models(TARGET, drafter_with("vocab", 5)), ValueError,
            "the target has 4 tokens and the draft 5; both need the same vocabulary, so choose a draft of the "
            "target's own family",
        ),
        (lambda: request.require_models(llama().train(), None), TypeError,
         "LlamaForCausalLM is in training mode, where dropout makes its distributions random; call its eval() first"),
        *((call, TypeError, "draft is the class Proposing; it must be a model, a Drafter, or None: give Proposing(...)")
          for call in (lambda: request.require_models(TARGET, NO_OBJECT), lambda: request.require_drafter(NO_OBJECT))),
        (
            lambda: request.require_drafter(SimpleNamespace(vocab=4, can_refill=True)), TypeError,
            "draft is a SimpleNamespace; it must be a model, a Drafter, or None. It lacks parents, hidden_layers, "
            "draft_model, capturable, start, propose, update: inherit from specnb.drafting.base.Drafter, which has "
            "defaults",
        ),
        *(
            (lambda member=member, value=value: request.require_drafter(drafter_with(member, value)), TypeError,
             f"Proposing.{member} is {value!r}; it must be {allowed}")
            for member, value, allowed in (
                ("vocab", 4.0, "a whole number"),
                ("parents", (-1, 0.5), "None or a tuple of whole numbers"),
                ("parents", {0}, "None or a tuple of whole numbers"),
                ("hidden_layers", None, "a tuple of whole numbers"),
                ("hidden_layers", (True,), "a tuple of whole numbers"),
                ("draft_model", 3, "None or a model of transformers"),
                ("start", 1, "a method that takes two arguments"),
                ("propose", three, "a method that takes two arguments"),
                ("update", None, "a method that takes two arguments"),
            )
        ),
        (
            lambda: request.require_refill(NoRefill(), 3, 2), TypeError,
            "3 prompts take turns in 2 rows, and NoRefill cannot restart single rows (can_refill is False); leave "
            "batch_size out",
        ),
        *(
            (lambda value=value: request.require_compile(value, CPU), ValueError,
             f'compile is {value!r}; it must be False, True or "graph"')
            for value in ("fast", 1, 0, None, "", ["graph"])
        ),
        (
            lambda: request.require_compile("graph", CPU), ValueError,
            "a graph needs a CUDA device, and the target is on cpu; try compile=True",
        ),
        (
            lambda: request.require_probs(True, "graph"), ValueError,
            "keep_probs is True and compile is 'graph'; leave one of them out",
        ),
        (lambda: request.require_tokens([], [], None, 4), ValueError,
         "there are no prompts; give at least one list of tokens"),
        (lambda: request.require_tokens([[1], [2]], [0], None, 4), ValueError,
         "there are 2 prompts and 1 rows; each prompt has one number"),
        (lambda: request.require_tokens([[1], []], [0, 1], None, 4), ValueError,
         "prompt 1 is empty; give at least one token, such as the begin-of-text token"),
        (lambda: request.require_tokens([[0], [3, 4]], [0, 1], None, 4), ValueError,
         f"prompt 1 has the token 4; {KNOWN}"),
        (lambda: request.require_tokens([[0, -1]], [0], None, 4), ValueError, f"prompt 0 has the token -1; {KNOWN}"),
        (lambda: request.require_tokens([[0]], [0], [3, 4], 4), ValueError, f"eos has the token 4; {KNOWN}"),
        (lambda: request.require_tokens([[0]], [0], -1, 4), ValueError, f"eos has the token -1; {KNOWN}"),
        (
            lambda: request.require_context(TARGET, None, 7, 10), ValueError,
            "a prompt of 7 and 10 new tokens need 17 positions, and LlamaForCausalLM has 16; shorten the prompt or "
            "ask for fewer tokens",
        ),
        (
            lambda: request.require_context(unlimited(), drafter_with("draft_model", TARGET), 16, 1), ValueError,
            "a prompt of 16 and 1 new tokens need 17 positions, and LlamaForCausalLM has 16; shorten the prompt or "
            "ask for fewer tokens",
        ),
        (lambda: request.listed_prompts("ab"), TypeError, f"prompts is 'ab'; {LISTS}"),
        (lambda: request.listed_prompts({0: [1]}), TypeError, f"prompts is {{0: [1]}}; {LISTS}"),
        (lambda: request.listed_prompts({1}), TypeError, f"prompts is {{1}}; {LISTS}"),
        (lambda: request.listed_prompts(np.array(3)), TypeError, f"prompts is array(3); {LISTS}"),
        (lambda: request.listed_prompts(bytearray(b"a")), TypeError, f"prompts is bytearray(b'a'); {LISTS}"),
        (lambda: request.listed_prompts([[1], [2, 0.5]]), TypeError, f"prompt 1 is [2, 0.5]; {SIZES}"),
        (lambda: request.listed_prompts([[1], 2]), TypeError, f"prompt 1 is 2; {SIZES}"),
        (lambda: request.listed_prompts(np.array([0.5])), TypeError, f"prompt 0 is 0.5; {SIZES}"),
        (lambda: request.listed_rows(3), ValueError, f"rows are 3; {ROWS}"),
        (lambda: request.listed_rows([0, -1]), ValueError, f"rows are [0, -1]; {ROWS}"),
        (lambda: request.listed_rows(np.array([0.5])), ValueError, f"rows are [0.5]; {ROWS}"),
        (lambda: request.as_list("a"), TypeError, f"eos is 'a'; {ENDS}"),
        (lambda: request.as_list(np.array([0.5])), TypeError, f"eos is [0.5]; {ENDS}"),
        (lambda: request.as_list({0.5}), TypeError, f"eos is [0.5]; {ENDS}"),
        (lambda: request.as_list(True), TypeError, f"eos is True; {ENDS}"),
        (
            lambda: require_no_nan([3, step.NAN]), FloatingPointError,
            "a model produced NaN, or a row without a finite logit: try another dtype, or look at its weights",
        ),
        (
            lambda: require_no_nan([step.NAN, 0, step.IMPROPER]), ValueError,
            "a drafter proposed a token outside the vocabulary, or a q that is no distribution: q must be 0 or more "
            "everywhere and sum to 1 for each draft token, and to 0 where the token is -1; see Drafter.propose",
        ),
    ],
    ids=itertools.count(),
)  # fmt: skip
def test_what_is_refused_is_refused_with_this_message(call: Callable[[], Any], error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message


def unlimited() -> Any:
    """Stands for a model whose configuration states no limit of positions."""
    return SimpleNamespace(config=SimpleNamespace())


def test_what_is_in_range_is_accepted() -> None:
    request.require_flags(a=True, b=False, c=np.True_)
    request.require_models(TARGET, None)
    request.require_models(TARGET, Proposing())
    request.require_models(TARGET, drafter_with("draft_model", DRAFT))
    for member, value in (
        ("parents", [-1, 0]),
        ("hidden_layers", [-1]),
        ("vocab", np.int64(4)),
        ("start", print),
    ):
        request.require_drafter(drafter_with(member, value))
    request.require_refill(None, 3, 2)
    request.require_refill(NoRefill(), 3, 3)
    request.require_refill(Proposing(), 3, 2)
    for compile in (False, True):
        request.require_compile(compile, CPU)
    request.require_compile("graph", torch.device("cuda"))
    request.require_probs(True, False)
    request.require_probs(False, True)
    request.require_tokens([[0, 3]], [7], [0, 3], 4)
    request.require_context(TARGET, None, 7, 9)
    request.require_context(unlimited(), None, 7, 10**9)
    request.require_context(TARGET, Proposing(), 1, 15)
    require_no_nan([0, 5])


def test_what_is_given_becomes_lists_of_numbers_of_python() -> None:
    given = [(np.uint8(1), torch.tensor(2)), np.array([3]), torch.tensor([0, 1]), range(2)]
    listed = request.listed_prompts(given)
    assert listed == [[1, 2], [3], [0, 1], [0, 1]]
    assert {type(token) for prompt in listed for token in prompt} == {int}
    assert request.listed_prompts([]) == []
    rows = request.listed_rows((np.int64(3), 0))
    assert rows == [3, 0]
    assert {type(row) for row in rows} == {int}
    ends: tuple[Any, ...] = (None, 2, np.int8(2), [], (3, 1), {2}, torch.tensor([1, 3]))
    assert [request.as_list(eos) for eos in ends] == [[], [2], [2], [], [3, 1], [2], [1, 3]]


def test_the_default_rule_is_the_exact_one_for_the_kind_of_draft_tokens() -> None:
    for drafter, gamma, expected in (
        (None, 4, token_verification),
        (Proposing(), 4, token_verification),
        (Tree(), 0, token_verification),
        (Tree(), 3, recursive_rejection),
    ):
        assert rule_for(None, drafter, gamma) is expected


def test_a_rule_is_any_function_of_enough_arguments_for_the_kind_of_draft_tokens() -> None:
    any_rules: tuple[Any, ...] = (exact_match, five_or_six, TreeRule(five_or_six), torch.add)
    for rule in any_rules:
        assert rule_for(rule, None, 4) is rule, "without a drafter any kind decodes plainly"
        assert rule_for(rule, Tree(), 0) is rule
    assert rule_for(exact_match, Proposing(), 4) is exact_match
    assert rule_for(recursive_rejection, Tree(), 3) is recursive_rejection
    assert rule_for(of_five, None, 0) is of_five, "a TreeRule takes six arguments, whatever its function does"
    with pytest.raises(ValueError, match="signature"):
        inspect.signature(torch.add)  # so it counts as a rule, "as far as its signature says"


@pytest.mark.parametrize(
    ("gamma", "new", "useful"),
    [
        (0, 9, 0),
        (1, 1, 1),
        (32, 1, 32),
        (33, 1, 32),
        (33, 33, 32),
        (33, 34, 33),
        (40, 40, 39),
        (40, 41, 40),
        (5, 99, 5),
    ],
)
def test_a_gamma_above_32_is_at_most_one_less_than_the_tokens_asked_for(gamma: int, new: int, useful: int) -> None:
    assert useful_gamma(gamma, new, Proposing()) == useful
    assert useful_gamma(gamma, new, None) == 0
    assert useful_gamma(3, new, Tree()) == 3
    assert useful_gamma(0, new, Tree()) == 0
    assert LARGEST_SPARE_GAMMA == 32


# The scheduler, with a batch that decodes nothing.


class Rows:
    """Stands for `Batch`: remembers what enters which row; the result of a row is the prompt that it had."""

    def __init__(self, rows: int) -> None:
        self.state = self
        self.rows = list(range(rows))
        self.prompt_in: dict[int, list[int]] = {}
        self.entered: list[tuple[Any, ...]] = []

    def uniforms(self, seed: int, numbers: list[int], new: int) -> tuple[int, list[int], int]:
        return seed, numbers, new

    def enter(self, rows: list[int], prompts: list[list[int]], own: Any, new: int) -> None:
        self.entered.append((rows, prompts, own, new))
        self.prompt_in.update(zip(rows, prompts, strict=True))

    def completed_rows(self, rows: list[int]) -> list[CompletedRow]:
        return [CompletedRow(self.prompt_in[row], np.zeros((0, 3), dtype=np.int64), np.zeros((0, 0))) for row in rows]


def test_prompts_enter_the_rows_that_have_ended_in_their_order() -> None:
    """Six prompts in three rows; each status is what remains in the rows."""
    rows: Any = Rows(3)
    prompts = [[number] for number in range(6)]
    scheduler = Scheduler(rows, prompts, [10, 11, 12, 13, 14, 15], seed=7, new=5)
    assert rows.entered == [([0, 1, 2], [[0], [1], [2]], (7, [10, 11, 12], 5), 5)]
    assert scheduler.expected == 30
    assert scheduler.tokens_to_come([5, 5, 5]) == 30
    assert scheduler.tokens_to_come([1, 4, 0]) == 5 + 15
    assert not scheduler.replace([1, 4, 2])
    assert scheduler.replace([0, 4, 0])
    assert rows.entered[1:] == [([0, 2], [[3], [4]], (7, [13, 14], 5), 5)]
    assert scheduler.tokens_to_come([5, 4, 5]) == 14 + 5
    assert scheduler.replace([0, 0, 3]), "one prompt waits for two rows"
    assert rows.entered[2:] == [([0], [[5]], (7, [15], 5), 5)]
    assert scheduler.tokens_to_come([5, 0, 3]) == 8
    assert not scheduler.replace([0, 0, 0])
    assert len(rows.entered) == 3
    assert [row.tokens for row in scheduler.completed_rows()] == prompts


def test_the_status_is_read_at_once_on_a_cpu() -> None:
    state = SimpleNamespace(tokens=torch.zeros(1), status=torch.tensor([3, 0]))
    reader = ProgressReader(SimpleNamespace(state=state))  # type: ignore[arg-type]
    assert reader.read() == [3, 0]
    reader.discard()
    state.status[0] = 1
    assert reader.read() == [1, 0]


def test_on_a_device_the_status_is_that_of_the_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied to memory from which the host can read it without waiting for the step in progress."""
    seen: list[Any] = []

    class Event:
        def __init__(self) -> None:
            self.number = seen.count("event")
            seen.append("event")

        def record(self) -> None:
            seen.append(("record", self.number))

        def synchronize(self) -> None:
            seen.append(("synchronize", self.number))

    class Pinned:
        def copy_(self, status: Tensor, non_blocking: bool = False) -> None:
            assert non_blocking
            self.values = status.clone()

        def tolist(self) -> Any:
            return self.values.tolist()

    def empty(shape: Any, dtype: torch.dtype, pin_memory: bool = False) -> Pinned:
        assert (shape, dtype, pin_memory) == ((2,), torch.int64, True)
        return Pinned()

    state = SimpleNamespace(tokens=SimpleNamespace(is_cuda=True), status=torch.tensor([5, 5]))
    reader = ProgressReader(SimpleNamespace(state=state))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", empty)
    assert reader.read() is None
    state.status.copy_(torch.tensor([4, 3]))
    assert reader.read() == [5, 5]
    state.status.copy_(torch.tensor([2, 1]))
    assert reader.read() == [4, 3]
    assert seen == [
        "event", ("record", 0), "event", ("record", 1), ("synchronize", 0), "event", ("record", 2), ("synchronize", 1),
    ]  # fmt: skip
    reader.discard()
    assert reader.read() is None
