"""`Sampler` and `generate`, apart from their distribution: what is given, lengths and ends, rows and
seeds, calls after the first, times and progress."""

from __future__ import annotations

import copy
import gc
import pickle
import shutil
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from architectures import tiny_model
from distributions_for_tests import examples
from drafter_kinds import (
    CHAINS,
    DEEP,
    DEPTH_2,
    TREES,
    TWO_DRAFTS,
    TableDrafter,
    TableTreeDrafter,
    chain,
    gamma_of,
    table,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from implementation_distribution import PROMPTS, SHARP, VOCAB, PatchyDrafter, check_record
from tiny import ARCHITECTURES, LIMIT, gpt2, llama, near_copy, neox, qwen2, roomy, tokenizer
from torch import Tensor
from tqdm import tqdm
from transformers import BatchEncoding, PreTrainedModel

from specnb.cache import slots_for
from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling
from specnb.drafters import Drafter, ModelDrafter, TreeDrafter
from specnb.record import PARTS
from specnb.rules import PlannedRule, exact_match, recursive_rejection, token_verification
from specnb.sampler import Instruments, Sampler, generate
from specnb.step import Batch, Setup, require_memory
from specnb.trees import distinct_children, independent_children, top_children

GREEDY = Sampling(temperature=0)
LONGEST = LIMIT - max(map(len, PROMPTS))
MORE = (*PROMPTS, (1,), (2, 2), (3,), (0, 1, 0, 1), (3, 3, 3))


def pair(make: Callable[..., PreTrainedModel]) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A target, and a draft that often agrees with it, in float64."""
    target = make(dtype=torch.float64)
    return target, near_copy(target, noise=0.1)


PAIRS = {architecture: pair(make) for architecture, make in ARCHITECTURES.items()}
TARGET, DRAFT = PAIRS["llama"]


def cut(tokens: list[int], eos: Sequence[int]) -> list[int]:
    """`tokens` up to and with the first of `eos`."""
    ends = [at for at, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


# Any call.


@settings(examples, max_examples=50)
@given(
    architecture=st.sampled_from(list(ARCHITECTURES)),
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=6),
    drafter=st.sampled_from(["a model", "patchy", "nothing", *TREES]),
    gamma=st.integers(0, 5),
    asked=st.fixed_dictionaries(
        {
            "max_new_tokens": st.integers(1, LONGEST),
            "sampling": st.sampled_from([Sampling(), SHARP, Sampling(0.7, top_p=0.8), GREEDY]),
            "seed": st.integers(0, 2**64 - 1),
        }
    ),
    eos=st.sets(st.integers(0, VOCAB - 1), max_size=2),
    batch_size=st.integers(1, 7),
)
def test_the_tokens_of_a_prompt_depend_on_the_seed_its_number_and_the_settings(
    architecture: str, prompts: list[list[int]], drafter: str, gamma: int, asked: dict[str, Any], eos: set[int],
    batch_size: int,
) -> None:  # fmt: skip
    """The batch, other prompts and eos change none of them; eos only cuts. The record tells the
    same story."""
    target, model = PAIRS[architecture]
    draft: Any = {"a model": model, "patchy": PatchyDrafter(model)}.get(drafter)
    if drafter in TREES:
        draft = TREES[drafter]()
        gamma = gamma_of(draft)
    asked |= {"gamma": gamma, "progress": False}
    together = generate(target, prompts, draft, **asked)
    assert [len(tokens) for tokens in together.tokens] == [asked["max_new_tokens"]] * len(prompts)
    refilled = generate(target, prompts, draft, **asked, eos=eos, batch_size=batch_size)
    assert refilled.tokens == [cut(tokens, list(eos)) for tokens in together.tokens]
    last = len(prompts) - 1
    alone = generate(target, prompts[-1:], draft, **asked, eos=list(eos), numbers=[last])
    assert alone.tokens == refilled.tokens[-1:]
    steps = alone.record.target_passes[0]
    for field in ("draft_tokens", "accepted", "token", "emitted"):
        assert np.array_equal(getattr(alone.record, field)[0], getattr(refilled.record, field)[last, :steps]), field
    assert np.allclose(alone.record.beta[0], refilled.record.beta[last, :steps])
    for made in (together, refilled, alone):
        check_record(made)
        assert made.probs is None


def test_seeds_numbers_and_rows_have_random_streams_of_their_own() -> None:
    asked: dict[str, Any] = {"max_new_tokens": 13, "progress": False}
    by_seed = [generate(TARGET, [(0,)] * 8, None, seed=seed, **asked).tokens for seed in (0, 1, 2**63, 2**64 - 1)]
    numbered = generate(TARGET, [(0,)] * 8, None, numbers=range(8, 16), **asked).tokens
    assert len({str(tokens) for made in (*by_seed, numbered) for tokens in made}) > 36
    moved = generate(TARGET, [(0,)] * 3, None, numbers=[7, 2, 9], batch_size=1, **asked).tokens
    assert moved == [by_seed[0][7], by_seed[0][2], numbered[1]]


def greedy_tokens(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """Greedy decoding by transformers."""
    given = torch.tensor([prompt])
    asked: dict[str, Any] = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0}
    made: list[int] = model.generate(given, attention_mask=torch.ones_like(given), **asked)[0].tolist()
    return made[len(prompt) :]


@pytest.mark.parametrize("make", [llama, gpt2, neox, qwen2])
def test_greedy_completions_are_those_of_transformers_up_to_the_last_position(
    make: Callable[..., PreTrainedModel],
) -> None:
    """Draft tokens then exceed the model's last position; that must neither fail nor change a
    token."""
    target, draft = pair(make)
    expected = [greedy_tokens(target, prompt, LONGEST) for prompt in MORE]
    drafters: list[tuple[Any, int]] = [(draft, gamma) for gamma in (0, 1, 5)]
    drafters += [(TreeDrafter(draft, parents, scheme=top_children), len(parents)) for parents in (DEPTH_2, DEEP)]
    for drafter, gamma in drafters:
        for eos in ((), (1, 3)):
            asked: dict[str, Any] = {"gamma": gamma, "eos": eos, "sampling": GREEDY, "progress": False}
            made = generate(target, MORE, drafter, max_new_tokens=LONGEST, **asked)
            assert made.tokens == [cut(tokens, eos) for tokens in expected]


def test_without_a_draft_it_copies_from_the_text() -> None:
    asked: dict[str, Any] = {"max_new_tokens": 11, "progress": False}
    made = generate(TARGET, PROMPTS, **asked)
    copies = generate(TARGET, PROMPTS, PromptLookupDrafter(VOCAB), gamma=10, **asked)
    assert made.tokens == copies.tokens
    assert np.array_equal(made.record.draft_tokens, copies.record.draft_tokens)
    assert (made.record.draft_tokens >= 0).any()
    nothing: list[dict[str, Any]] = [{"draft": None}, {"gamma": 0}]
    for none in nothing:
        assert generate(TARGET, PROMPTS, **none, **asked).record.gamma == 0


def test_rows_are_never_empty_while_prompts_wait() -> None:
    """Six sequences of very different lengths in two rows: each next one begins as soon as one has
    ended."""
    steps = []

    class Counted(Batch):
        def step(self, mark: Any = None) -> None:
            steps.append(len(self.state.rows))
            super().step(mark)

    asked: dict[str, Any] = {"max_new_tokens": LIMIT - 1, "eos": [1], "batch_size": 2, "progress": False}
    made = generate(TARGET, [(0,)] * 6, None, **asked, instruments=Instruments(batch_class=Counted))
    free = [0, 0]  # when each row is free
    for passes in made.record.target_passes:
        free[free.index(min(free))] += int(passes)
    assert steps == [2] * max(free)
    assert len(set(made.record.target_passes)) > 2


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(one), torch.Tensor) for one in gc.get_objects())


def test_many_calls_leave_no_tensor_behind() -> None:
    for _ in range(2):  # the first calls make what stays
        before = live_tensors()
        for seed in range(8):
            generate(TARGET, [[1], [2, 3]], DRAFT, gamma=seed % 4, max_new_tokens=3, seed=seed, progress=False)
    assert live_tensors() <= before


# What is timed and shown.


def test_each_part_of_each_step_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by a second whenever it is read."""
    readings = iter(range(1000))
    monkeypatch.setattr("specnb.record.now", lambda _: float(next(readings)))
    asked: dict[str, Any] = {"gamma": 2, "max_new_tokens": 6, "batch_size": 3, "progress": False}
    made = generate(TARGET, MORE, DRAFT, **asked, instruments=Instruments(timed=True))
    assert list(made.record.seconds) == list(PARTS)
    steps = len(made.record.seconds["draft"])
    assert next(readings) == 4 * steps, "the clock is read as a step begins and as each of its parts ends"
    assert all(seconds.tolist() == [1] * steps for seconds in made.record.seconds.values())
    untimed = generate(TARGET, MORE, DRAFT, **asked)
    assert (untimed.record.seconds, untimed.tokens) == ({}, made.tokens)


@pytest.mark.parametrize(
    "draft", [DRAFT, PatchyDrafter(DRAFT), TableTreeDrafter(DEPTH_2)], ids=["a model", "patchy", "tree"]
)
def test_the_p_q_and_r_of_a_trace_decided_and_nothing_else_changes(draft: Any) -> None:
    """Rows are refilled, and the last steps cut. p is also that of the tokens emitted. Later siblings in
    a tree are tested by the residual."""
    asked: dict[str, Any] = {"max_new_tokens": 7, "batch_size": 3, "progress": False}
    made = generate(TARGET, MORE, draft, **asked, instruments=Instruments(trace=True, keep_probs=True))
    assert made.tokens == generate(TARGET, MORE, draft, **asked).tokens
    record = made.record
    assert record.trace is not None
    assert (np.isnan(record.trace).all(axis=-1) == (record.draft_tokens < 0)).all()
    parents = record.parents or tuple(range(-1, record.gamma - 1))
    first = np.array([parents.index(parent) == node for node, parent in enumerate(parents)])
    p, q, r = (record.trace[..., part][record.tested & first] for part in range(3))
    accepted = record.accepted_nodes[record.tested & first]
    assert ((r < np.minimum(1, p / q)) == accepted).all()
    assert 0 < accepted.sum() < len(accepted)
    assert made.probs is not None
    for row, step in zip(*np.nonzero(record.active), strict=True):
        begin, emitted = record.emitted[row, :step].sum(), record.emitted[row, step]
        for place, node in enumerate(np.flatnonzero(record.accepted_nodes[row, step])[:emitted], begin):
            probs, token = made.probs[row][place], made.tokens[row][place]
            assert record.trace[row, step, node, 0] == float(probs[token])
        shown = made.show(row, step)
        assert shown.count("  accepted\n") == record.accepted[row, step]
        final = record.token[row, step]
        assert (f"{final}: bonus" in shown) == (f"{final}: recovered" not in shown)


def test_the_bar_counts_tokens_and_those_that_will_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five prompts of 9 tokens in two rows, some of which end early: after each step, all but what
    can still come."""
    places: list[float] = []

    class Bar(tqdm):  # type: ignore[misc]  # tqdm has no types
        def update(self, n: float | None = 1) -> bool | None:
            super().update(n)
            places.append(self.n)
            return None

    monkeypatch.setattr("specnb.sampler.tqdm", Bar)
    made = generate(TARGET, MORE[:5], None, max_new_tokens=9, eos=1, batch_size=2, seed=3)
    assert len({len(tokens) for tokens in made.tokens}) > 1
    # The first step gives each of the two rows a token; one that ends takes what it could still
    # have had with it.
    assert places[0] == sum(9 if len(tokens) == 1 else 1 for tokens in made.tokens[:2])
    assert places == sorted(places)
    assert places[-1] == 45


# One sampler, several calls.


@pytest.mark.parametrize("room", [{"rows": 6, "slots": 32}, {}], ids=["room", "no room"])
@pytest.mark.parametrize("kind", ["a model", "patchy", "nothing", "deep tree of a model", "EAGLE-3 head"])
def test_earlier_calls_and_idle_rows_change_no_token(kind: str, room: dict[str, Any]) -> None:
    """Calls of all sizes in the batch of the first, which has more rows and slots than any needs; or each
    makes room for itself."""
    kinds: dict[str, Any] = {"a model": DRAFT, "patchy": PatchyDrafter(DRAFT), "nothing": None}
    drafter = kinds[kind] if kind in kinds else (CHAINS | TREES)[kind]()
    sampler = Sampler(TARGET, drafter, compile=False, **room, progress=False)
    batches = set()
    for prompts, new, eos, batch_size in (
        (MORE[:4], 9, 1, None), (MORE[3:4], 12, None, None), (MORE, 4, [2, 3], 2), (MORE[:2], LONGEST, 1, None),
    ):  # fmt: skip
        asked: dict[str, Any] = {"max_new_tokens": new, "eos": eos, "batch_size": batch_size, "seed": new}
        expected = generate(TARGET, prompts, drafter, progress=False, **asked)
        made = sampler.generate(prompts, **asked)
        assert made.tokens == expected.tokens
        assert np.array_equal(made.record.draft_tokens, expected.record.draft_tokens)
        assert made.prompts == [list(prompt) for prompt in prompts]
        batches.add(sampler.batch)
    assert (len(batches) == 1) == bool(room)


def test_instruments_may_be_changed_between_calls() -> None:
    sampler = Sampler(TARGET, DRAFT, compile=False, progress=False)
    assert sampler.generate(PROMPTS, max_new_tokens=2).record.trace is None
    sampler.instruments = Instruments(trace=True)
    assert sampler.generate(PROMPTS, max_new_tokens=2).record.trace is not None
    compared = sampler.check.longest  # type: ignore[union-attr]
    for wrong, instruments in ((Batch, Instruments(batch_class=Batch)), (None, Instruments())):
        sampler.instruments = instruments
        sampler.generate([[1] * 9], max_new_tokens=2)
        assert (sampler.check.longest == compared) is (wrong is not None)  # type: ignore[union-attr]


def test_a_call_may_leave_rows_of_the_call_before_empty() -> None:
    sampler = Sampler(TARGET, DRAFT, rows=2, compile=False, progress=False)
    sampler.generate([[1] * (LIMIT - 5)] * 2, max_new_tokens=3)
    expected = generate(TARGET, [[1]], DRAFT, max_new_tokens=3, progress=False)
    assert sampler.generate([[1]], max_new_tokens=3).tokens == expected.tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sampling", GREEDY), ("target", DRAFT), ("gamma", 0), ("rule", exact_match), ("drafter", None),
        ("compile", True),
    ],
)  # fmt: skip
def test_a_setting_is_not_changed_after_a_sampler_was_made(name: str, value: Any) -> None:
    """Its batch would go on with the old one."""
    sampler = Sampler(TARGET, DRAFT, compile=False, progress=False)
    with pytest.raises(AttributeError, match="make another"):
        setattr(sampler, name, value)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_sampler_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="make another"):
        copied(Sampler(TARGET, DRAFT, compile=False, progress=False))


@pytest.mark.minutes
@pytest.mark.skipif(not shutil.which("c++"), reason="no compiler")
def test_a_compiled_sampler_gives_the_same_tokens_and_compiles_once() -> None:
    """Other tokens, numbers of them, of prompts, and ends; also beyond the first 64 slots, which a
    pass over short prompts reads."""
    target = roomy(VOCAB)
    draft = near_copy(target, 0.3)
    sampler = Sampler(target, draft, gamma=1, compile=True, rows=3, progress=False)
    layers: list[Any] = [sampler.private.compiled, sampler.drafter.private.compiled]  # type: ignore[union-attr]
    ready = []
    for prompts, new, eos in (
        (PROMPTS, 6, 3), ([(prompt * 61)[: 61 + row] for row, prompt in enumerate(PROMPTS)], 6, [3]),
        (PROMPTS[:2], 40, []), (PROMPTS[1:2], 4, [1, 2]),
    ):  # fmt: skip
        asked: dict[str, Any] = {"max_new_tokens": new, "eos": eos, "seed": new}
        plain = generate(target, prompts, draft, gamma=1, progress=False, **asked)
        made = sampler.generate(prompts, **asked)
        assert made.tokens == plain.tokens
        assert np.array_equal(made.record.draft_tokens, plain.record.draft_tokens)
        assert np.allclose(made.record.beta, plain.record.beta)
        ready.append([len(one.ready) for one in layers])
    assert ready == ready[:1] * 4


def test_passes_over_the_usual_numbers_of_draft_tokens_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """And others, which a drafter sometimes makes, run as they are."""
    monkeypatch.setattr("specnb.fast.compiled_once", lambda function, on_host: function)
    widths, run = [], Batch.run_target

    def counted(self: Batch, draft_tokens: Tensor) -> Tensor:
        widths.append(draft_tokens.shape[1])
        return run(self, draft_tokens)

    monkeypatch.setattr(Batch, "run_target", counted)
    sampler = Sampler(TARGET, PromptLookupDrafter(VOCAB), gamma=8, sampling=GREEDY, compile=True, progress=False)
    made = sampler.generate(PROMPTS, max_new_tokens=12)
    assert sampler.private.compiled is not None
    assert {shape[1] for _, shape, *_ in sampler.private.compiled.ready} == {1, 4, 9}
    assert {6} < set(widths)
    assert made.tokens == generate(TARGET, PROMPTS, None, max_new_tokens=12, sampling=GREEDY, progress=False).tokens


def test_samplers_of_one_model_in_threads_give_their_own_tokens() -> None:
    samplings = [Sampling(), SHARP, GREEDY, Sampling(0.7, top_p=0.8)]

    def made(number: int) -> list[list[list[int]]]:
        sampler = Sampler(TARGET, DRAFT, sampling=samplings[number], compile=False, progress=False)
        return [sampler.generate(MORE, max_new_tokens=LONGEST, seed=seed).tokens for seed in range(3)]

    expected = [made(number) for number in range(len(samplings))]
    with ThreadPoolExecutor(len(samplings)) as threads:
        assert list(threads.map(made, range(len(samplings)))) == expected


@pytest.mark.parametrize("failing", [False, True])
def test_a_call_within_a_call_is_refused_and_changes_nothing(failing: bool) -> None:
    refused = []

    class Calling(PromptLookupDrafter):
        sampler: Any = None

        def update(self, context: Any, outcome: Any) -> None:
            with pytest.raises(RuntimeError, match="another") as found:
                self.sampler.generate(MORE, max_new_tokens=2)
            refused.append(found)
            with ThreadPoolExecutor(1) as threads, pytest.raises(RuntimeError, match="another"):
                threads.submit(self.sampler.generate, MORE, max_new_tokens=2).result()
            if failing:
                raise found.value

    drafter = Calling(VOCAB)
    drafter.sampler = sampler = Sampler(TARGET, drafter, compile=False, progress=False)
    if failing:
        with pytest.raises(RuntimeError, match="another"):
            sampler.generate(PROMPTS, max_new_tokens=9)
        drafter.update = lambda context, outcome: None  # type: ignore[method-assign]
    made = sampler.generate(PROMPTS, max_new_tokens=9)
    assert refused
    assert made.tokens == generate(TARGET, PROMPTS, PromptLookupDrafter(VOCAB), max_new_tokens=9, progress=False).tokens


def test_what_failed_is_compared_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = Sampler(TARGET, DRAFT, compile=False, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr("specnb.step.overlap", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sampler.generate(PROMPTS, max_new_tokens=9)
    compared = []
    monkeypatch.setattr(type(sampler.check), "completion", lambda self, prompt, *_: compared.append(prompt))
    for _ in range(2):
        sampler.generate(PROMPTS, max_new_tokens=9)
    assert sorted(compared) == [[0], [2, 0, 1, 3]]


# Prompts and end tokens as users give them.


def test_text_goes_in_and_comes_out() -> None:
    asked: dict[str, Any] = {"max_new_tokens": 6, "seed": 2, "progress": False}
    made = generate(TARGET, ["one two", "three"], DRAFT, tokenizer=tokenizer(begins=False), **asked)
    expected = generate(TARGET, [[1, 2], [3]], DRAFT, **asked)
    assert (made.prompts, made.tokens) == ([[1, 2], [3]], expected.tokens)
    texts = tokenizer().batch_decode(expected.tokens, skip_special_tokens=True)
    assert made.texts == texts != tokenizer().batch_decode(expected.tokens)
    assert expected.texts is None
    for text in ("one two", "begin one two"):  # there is one begin token, whether the text has it or not
        for prompts in (text, [text]):
            assert generate(TARGET, prompts, None, tokenizer=tokenizer(), **asked).prompts == [[0, 1, 2]]
    with pytest.raises(TypeError):
        generate(TARGET, ["one two"], DRAFT, **asked)


PADDED, MASK = [[0, 0, 2], [3, 1, 2]], [[0, 1, 1], [1, 1, 1]]
LEFT, RIGHT = torch.tensor([[0, 1], [2, 3]]), np.array([[2, 3], [1, 0]])


def padding(token: int = 0, name: str = "pad_token_id") -> Any:
    model = llama()
    setattr(model.config, name, token)
    return model


def given_to(target: Any, prompts: Any) -> list[list[int]]:
    """The prompts that a sampler reads."""
    return generate(target, prompts, None, max_new_tokens=1, progress=False).prompts


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_the_mask_of_a_tokenizer_leaves_the_padding_out(kind: Any) -> None:
    given = BatchEncoding({"input_ids": kind(PADDED), "attention_mask": kind(MASK)})
    boolean = kind(MASK) if kind is list else kind(MASK) == 1
    for target, one in (
        (padding(), given),
        (llama(), dict(given)),
        (llama(), dict(given) | {"attention_mask": boolean}),
    ):
        assert given_to(target, one) == [[0, 2], [3, 1, 2]]
    assert given_to(llama(), {"input_ids": kind(PADDED)}) == PADDED


def test_padding_that_nobody_masked_is_refused() -> None:
    """A token that only pads is never text. Of one that also ends or begins texts, one in a list may be
    text; where all rows begin with it, it is the begin-of-text token."""
    in_all_rows, in_one_row, twice = [[0, 1], [0, 3]], [0, 2], [[0, 0, 2], [3, 1]]
    ends, pads = padding(0, "eos_token_id"), tokenizer(begins=False, pad_token="two")
    refused: list[tuple[Any, Any, Any]] = [
        *((padding(), None, prompts) for prompts in (LEFT, RIGHT, LEFT.tolist(), in_all_rows, in_one_row, twice)),
        (padding(), None, {"input_ids": PADDED}),
        *((llama(), pads, prompts) for prompts in (LEFT, [[2, 1], [2, 3]], in_one_row)),
        *((ends, None, prompts) for prompts in (LEFT, RIGHT, twice, [0, 0, 2])),
    ]
    for target, known, prompts in refused:
        with pytest.raises(ValueError, match=r"padding token [02]"):
            generate(target, prompts, None, max_new_tokens=1, tokenizer=known, progress=False)
    for prompts in (LEFT.tolist(), in_all_rows, [in_one_row]):
        assert given_to(ends, prompts) == prompts
    assert given_to(padding(7), LEFT) == LEFT.tolist()
    assert generate(llama(), ["two one"], None, max_new_tokens=1, tokenizer=pads).prompts == [[2, 1]]


# What is refused before any model runs.


class Bare:
    vocab = VOCAB


@dataclass(frozen=True)
class Richer(Sampling):
    typical_p: float = 0.5


class Restarting(ModelDrafter):
    can_refill = False


FOR_INDEPENDENT = PlannedRule(recursive_rejection.plan, schemes=(independent_children,))


def refusing(model: Any) -> Any:
    """A model that fails when it is run."""

    def fail(*_: Any) -> None:
        raise AssertionError("a model ran before its input was checked")

    model.register_forward_pre_hook(fail)
    return model.eval()


def short_draft() -> Any:
    model = refusing(gpt2())
    model.config.n_positions = 8
    return model


RUNNING, DRAFTING = refusing(llama()), refusing(llama(seed=2))
DISTINCT = TreeDrafter(DRAFTING, TWO_DRAFTS, scheme=distinct_children)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"prompts": []}, "prompts"),
    ({"prompts": [[1], []]}, "prompt 1"),
    ({"prompts": [[0], [1, VOCAB]]}, "prompt 1"),
    ({"prompts": torch.tensor(3)}, "prompts"),
    ({"prompts": {"text": "hello"}}, "prompts"),
    ({"prompts": [[0], [0.5]]}, "prompt 1"),
    ({"prompts": ["hello"]}, "prompt 0"),
    ({"prompts": {"input_ids": [[1, 2]], "attention_mask": [[1]]}}, "attention_mask"),
    ({"prompts": {"input_ids": [[1, 2]], "attention_mask": [[2, 1]]}}, "attention_mask"),
    ({"prompts": {"input_ids": [[1, 2]], "pixel_values": torch.ones(1)}}, "pixel_values"),
    ({"prompts": {"input_ids": [[1, 2]], "position_ids": [[0, 2]]}}, "position_ids"),
    (
        {"prompts": {"input_ids": [[1]], "token_type_ids": [[1]]}, "target": refusing(gpt2()), "draft": None},
        "token_type",
    ),
    ({"prompts": [{"role": "user", "content": "hello"}]}, "apply_chat_template"),
    ({"sampling": Richer()}, "Richer"),
    ({"sampling": RUNNING.generation_config}, "GenerationConfig"),
    ({"eos": VOCAB}, "eos"),
    ({"gamma": -1}, "gamma"),
    ({"gamma": "x"}, 'gamma is .x.; it must be a whole number from 0, or "auto"'),
    ({"sampling": {"temperature": 0}}, "sampling is {'temperature': 0}: give a Sampling"),
    ({"max_new_tokens": 0}, "max_new_tokens"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed and numbers have 18446744073709551616"),
    ({"numbers": [*range(1, len(PROMPTS)), -1]}, "seed and numbers have -1"),
    ({"batch_size": 0}, "batch_size"),
    ({"numbers": [0, 1]}, "2 numbers"),
    ({"numbers": {0, 1, 2, 3}}, "0 numbers"),
    ({"compile": "fast"}, "compile"),
    ({"max_new_tokens": LIMIT - 3}, "positions"),
    ({"draft": short_draft(), "max_new_tokens": 5}, "the draft, GPT2LMHeadModel, has 8"),
    ({"target": "gpt2"}, "no model"),
    ({"target": refusing(tiny_model("recurrent_gemma"))}, "LinearAttentionLayer"),
    ({"draft": ModelDrafter(llama(VOCAB + 3))}, "4 tokens"),
    ({"draft": TableDrafter(table()[:, :3])}, "4 tokens"),
    ({"draft": refusing(tiny_model("bloom"))}, "position_ids"),
    ({"draft": "gpt2"}, "draft"),
    ({"draft": Bare()}, "draft"),
    ({"draft": Drafter()}, "the Drafter None: its vocab must be 4"),
    ({"draft": TableDrafter}, "draft"),
    ({"draft": Restarting(DRAFTING), "batch_size": 2}, "restart"),
    ({"draft": TableTreeDrafter((1, -1))}, "parent"),
    ({"draft": DISTINCT, "rule": FOR_INDEPENDENT}, "exact"),
    ({"draft": TableTreeDrafter(TWO_DRAFTS), "rule": FOR_INDEPENDENT}, "not exact .* does not name as its scheme"),
    ({"draft": DISTINCT, "gamma": 3}, "gamma is 3, and the drafter's tree has 2 nodes"),
]


@pytest.mark.parametrize(("wrong", "word"), WRONG, ids=[f"{n}-{'-'.join(one)}" for n, (one, _) in enumerate(WRONG)])
def test_bad_arguments_are_refused_before_any_model_runs(wrong: dict[str, Any], word: str) -> None:
    asked: dict[str, Any] = {"target": RUNNING, "prompts": PROMPTS, "draft": DRAFTING, "max_new_tokens": 4}
    with pytest.raises((TypeError, ValueError), match=word):
        generate(**(asked | wrong))


@pytest.mark.parametrize(
    "given",
    [
        {"prompts": (np.array([1, 2, 0], dtype=np.uint8), [torch.tensor(3), np.int64(0)]), "eos": torch.tensor([2])},
        # Four times gamma would not fit in eight bits.
        {"gamma": np.int8(32), "seed": np.uint8(200), "max_new_tokens": np.int32(5), "batch_size": torch.tensor(1)},
    ],
)
def test_whole_numbers_of_any_type_are_numbers(given: dict[str, Any]) -> None:
    asked: dict[str, Any] = {"prompts": [[1, 2, 0], [3, 0]], "gamma": 32, "max_new_tokens": 5, "eos": 2, "seed": 200}
    plain = generate(llama(), draft=llama(seed=2), progress=False, **asked)
    assert generate(llama(), draft=llama(seed=2), progress=False, **(asked | given)).tokens == plain.tokens


# What follows from the arguments.


def test_the_default_rule_and_rows() -> None:
    independent = TreeDrafter(DRAFTING, TWO_DRAFTS, scheme=independent_children)
    one_path = TreeDrafter(DRAFTING, (-1, 0), scheme=distinct_children)  # a rule for any scheme will do
    for drafter in (None, chain(), DISTINCT):
        assert Sampler(RUNNING, drafter, compile=False).rule == token_verification
    for tree in (independent, one_path):
        assert Sampler(RUNNING, tree, rule=FOR_INDEPENDENT, compile=False).rule is FOR_INDEPENDENT
    for rule in (exact_match, recursive_rejection):  # nothing is drafted, so that any rule will do
        assert Sampler(RUNNING, DISTINCT, gamma=0, rule=rule, compile=False).drafter is None
    for size, rows in ((None, 3), (1, 1), (2, 2), (9, 3)):
        sampler = Sampler(TARGET, chain(), compile=False, progress=False)
        sampler.generate(PROMPTS, max_new_tokens=2, batch_size=size)
        assert sampler.batch is not None
        assert len(sampler.batch.state.rows) == rows
    # No row is refilled.
    assert len(generate(TARGET, PROMPTS, Restarting(DRAFT), max_new_tokens=2, batch_size=3, progress=False).tokens) == 3


class Looking(ModelDrafter):
    hidden_layers = (-1, 0)


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["a model", "kept distributions", "hidden states"])
def test_caches_and_state_must_fit_into_what_is_free(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many bytes as the tensors have that a batch makes for them."""
    small = llama(layers=1)
    drafters = {"a model": ModelDrafter(small), "hidden states": Looking(small)}
    drafter, gamma = drafters.get(kind), 4 if kind in drafters else 0
    keep = kind == "kept distributions"
    setup = Setup(llama(), drafter, gamma, max_rows=8, slots=slots_for(2, 5, gamma), max_steps=5, keep_probs=keep)
    batch = Batch(setup)
    batch.enter(list(range(8)), [[1, 2]] * 8, batch.uniforms_of(0, range(8), 5), 5)
    runners: list[Any] = [batch.runner, *([drafter.runner] if drafter else [])]
    kept = [batch.state.tokens, batch.state.uniforms, batch.state.record, batch.state.probs, batch.runner.hidden_states]
    kept += [tensor for runner in runners for layer in runner.cache.ragged for tensor in (layer.keys, layer.values)]
    needed = sum(tensor.nbytes for tensor in kept if tensor is not None)
    monkeypatch.setattr("specnb.step.free_memory", lambda device: needed)
    require_memory(setup)
    monkeypatch.setattr("specnb.step.free_memory", lambda device: needed - 1)
    with pytest.raises(MemoryError, match="batch_size=7 would"):
        require_memory(setup)


def test_what_does_not_fit_is_refused_before_any_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specnb.step.free_memory", lambda device: 100)
    with pytest.raises(MemoryError, match="not even one row fits"):
        generate(RUNNING, [[1]], None, max_new_tokens=9, progress=False)


@pytest.mark.parametrize("draft", [None, "auto", DRAFT])
def test_caches_and_copies_of_a_sampler_are_free_as_soon_as_it_is_gone(draft: Any) -> None:
    """Without a garbage collection, which may come after memory has run out."""
    sampler = Sampler(TARGET, draft, progress=False)
    sampler.generate(PROMPTS, max_new_tokens=3)
    assert sampler.batch is not None
    kept = [weakref.ref(one) for one in (sampler.batch, sampler.batch.runner.cache, sampler.private.modules)]
    gc.disable()
    try:
        sampler.batch = None
        assert [one() is None for one in kept] == [True, True, False]
        del sampler
        assert kept[2]() is None
    finally:
        gc.enable()
