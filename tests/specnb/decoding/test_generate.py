"""`generate`, apart from its distribution: lengths and ends, rows and seeds, compiled steps, times
and progress."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributions_for_tests import examples
from drafter_kinds import DEEP, DEPTH_2, TREES, TableDrafter, TableTreeDrafter, chain, gamma_of, table
from hypothesis import given, settings
from hypothesis import strategies as st
from implementation_distribution import PROMPTS, SHARP, VOCAB, PatchyDrafter, check_record
from specnb.decoding import generate as loop
from tiny import ARCHITECTURES, LIMIT, gpt2, llama, near_copy, neox, qwen2
from torch import Tensor
from transformers import PreTrainedModel

from specnb.distributions import Sampling
from specnb.drafters import Context, TreeDrafter
from specnb.fast import Captured, Compiled
from specnb.ngram import PromptLookupDrafter
from specnb.record import PARTS
from specnb.rules import recursive_rejection
from specnb.sampler import COMPILED_SETTINGS, Hooks, forget_compiled, generate
from specnb.step import Batch
from specnb.trees import top_children

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
            "seed": st.integers(0, 2**65),
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
    alone = generate(target, prompts[-1:], draft, **asked, eos=list(eos), hooks=Hooks(rows=[last]))
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
    by_seed = [generate(TARGET, [(0,)] * 8, None, seed=seed, **asked).tokens for seed in (0, 1, 2**64, 2**64 + 1)]
    numbered = generate(TARGET, [(0,)] * 8, None, hooks=Hooks(rows=range(8, 16)), **asked).tokens
    assert len({str(tokens) for made in (*by_seed, numbered) for tokens in made}) > 36
    moved = generate(TARGET, [(0,)] * 3, None, hooks=Hooks(rows=[7, 2, 9]), batch_size=1, **asked).tokens
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


def test_a_perfect_draft_needs_the_fewest_forward_passes() -> None:
    """The target as its own draft: everything is accepted, so each step emits gamma + 1 tokens."""
    record = generate(TARGET, PROMPTS, TARGET, gamma=4, max_new_tokens=10, progress=False).record
    assert record.target_passes.tolist() == [2, 2, 2]
    assert record.tokens_per_step == 5
    assert np.allclose(record.beta[record.tested], 1)


def test_a_tree_that_is_a_chain_is_algorithm_1() -> None:
    class AsTree(TableDrafter):
        parents = (-1, 0, 1)

    asked: dict[str, Any] = {"gamma": 3, "max_new_tokens": 10, "seed": 5, "eos": 1, "progress": False}
    own, tree = (generate(TARGET, PROMPTS * 10, drafter, **asked) for drafter in (chain(), AsTree(table())))
    assert tree.tokens == own.tokens
    for field in ("accepted", "token", "emitted", "draft_tokens", "tested"):
        assert np.array_equal(getattr(tree.record, field), getattr(own.record, field)), field
    assert np.allclose(tree.record.beta, own.record.beta)


class Silent(TableDrafter):
    """Never has anything to propose."""

    def distribution(self, context: Context, position: int) -> torch.Tensor:
        return torch.zeros(len(context.lengths), VOCAB)


def test_without_a_proposal_a_step_is_a_step_of_the_target() -> None:
    asked: dict[str, Any] = {"max_new_tokens": 6, "seed": 4, "progress": False}
    alone = generate(TARGET, PROMPTS, gamma=0, **asked)
    silent = generate(TARGET, PROMPTS, Silent(table()), gamma=3, **asked)
    assert silent.tokens == alone.tokens
    assert (silent.record.draft_tokens == -1).all()
    assert not silent.record.tested.any()
    for rule in (None, recursive_rejection):
        assert generate(TARGET, PROMPTS, TableTreeDrafter(DEEP), gamma=0, rule=rule, **asked).tokens == alone.tokens


def test_rows_are_never_empty_while_prompts_wait() -> None:
    """Six sequences of very different lengths in two rows: each next one begins as soon as one has
    ended."""
    steps = []

    class Counted(Batch):
        def step(self) -> None:
            steps.append(len(self.state.rows))
            super().step()

    asked: dict[str, Any] = {"max_new_tokens": LIMIT - 1, "eos": [1], "batch_size": 2, "progress": False}
    made = generate(TARGET, [(0,)] * 6, None, **asked, hooks=Hooks(batch_class=Counted))
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
    made = generate(TARGET, MORE, DRAFT, **asked, hooks=Hooks(timed=True))
    assert list(made.record.seconds) == list(PARTS)
    steps = len(made.record.seconds["draft"])
    assert next(readings) == 4 * steps, "the clock is read as a step begins and as each of its parts ends"
    assert all(seconds.tolist() == [1] * steps for seconds in made.record.seconds.values())
    untimed = generate(TARGET, MORE, DRAFT, **asked)
    assert (untimed.record.seconds, untimed.tokens) == ({}, made.tokens)


class Bar:
    """Stands for tqdm: what it was made with, and where it was after each move."""

    made: list[Bar]

    def __init__(self, **settings: Any) -> None:
        self.settings, self.n, self.places = settings, 0, [0]
        self.made.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def update(self, by: int) -> None:
        self.n += by
        self.places.append(self.n)


@pytest.mark.parametrize("progress", [False, True])
def test_the_bar_counts_tokens_and_those_that_will_not_come(progress: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five prompts of 9 tokens in two rows, some of which end early: after each step, all but what
    can still come."""
    Bar.made = []
    monkeypatch.setattr(loop, "tqdm", Bar)
    made = generate(TARGET, MORE[:5], None, max_new_tokens=9, eos=1, batch_size=2, seed=3, progress=progress)
    (bar,) = Bar.made
    assert bar.settings == {"total": 45, "desc": "tokens", "delay": 3, "leave": False, "disable": not progress}
    assert bar.places == sorted(bar.places)
    # The first step gives each of the two rows a token; one that ends takes what it could still
    # have had with it.
    assert bar.places[1] == sum(9 if len(tokens) == 1 else 1 for tokens in made.tokens[:2])
    assert bar.n == 45
    assert len({len(tokens) for tokens in made.tokens}) > 1


# Compiled and captured steps.


def test_compiled_steps_give_the_same_completions() -> None:
    """Also beyond the first 64 slots, which a pass over short prompts reads."""
    target = llama(dtype=torch.float64, layers=1)
    target.config.max_position_embeddings = 128
    draft = near_copy(target, 0.3)
    common: dict[str, Any] = {"gamma": 1, "max_new_tokens": 6, "progress": False, "eos": 3}
    long = [(prompt * 61)[: 61 + row] for row, prompt in enumerate(PROMPTS)]
    for seed, prompts in ((1, PROMPTS), (2, long)):  # the second time in the tensors of the first
        plain = generate(target, prompts, draft, seed=seed, **common)
        compiled = generate(target, prompts, draft, seed=seed, compile=True, **common)
        assert compiled.tokens == plain.tokens
        assert np.array_equal(compiled.record.draft_tokens, plain.record.draft_tokens)
        assert np.allclose(compiled.record.beta, plain.record.beta)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the functions that were compiled. They run as they are."""
    names: list[str] = []

    class Named(Compiled):
        def __init__(self, function: Callable[..., Any], *settings: Any, **more: Any) -> None:
            names.append(getattr(function, "func", function).__name__)
            self.function = function

        def __call__(self, *tensors: Tensor) -> Any:
            return self.function(*tensors)

    for module in ("specnb.sampler", "specnb.drafters"):
        monkeypatch.setattr(f"{module}.Compiled", Named)
    forget_compiled()
    yield names
    forget_compiled()


def test_each_part_is_compiled_once_for_each_length(compiled: list[str]) -> None:
    """Other tokens, ends and seeds reuse it, up to the next multiple of 128 slots; the pass, any
    settings."""
    parts = ["_sample_tokens", "target_pass", "verify_and_emit"]
    common: dict[str, Any] = {"gamma": 2, "progress": False}
    for new, prompts, eos, timed in ((6, PROMPTS, 3, False), (4, PROMPTS[::-1], 1, False), (6, MORE[3:6], 3, True)):
        plain = generate(TARGET, prompts, DRAFT, max_new_tokens=new, eos=eos, **common)
        hooks = Hooks(timed=timed)
        made = generate(TARGET, prompts, DRAFT, max_new_tokens=new, eos=eos, compile=True, hooks=hooks, **common)
        assert made.tokens == plain.tokens
        assert sorted(compiled) == parts
    changes: list[dict[str, Any]] = [{"prompts": PROMPTS[:2]}, {"sampling": GREEDY}, {"gamma": 1}, {"eos": []}]
    for call in changes:
        asked: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 6, "eos": 3, **common, **call}
        before = len(compiled)
        generate(TARGET, draft=DRAFT, compile=True, **asked)
        assert sorted(compiled[before:]) == (parts if "prompts" in call else ["_sample_tokens", "verify_and_emit"])


@pytest.mark.parametrize(("gamma", "fewest"), [(3, 0), ("auto", 0), (5, 1)])
def test_a_compiled_step_has_all_draft_tokens_or_the_fewest(
    gamma: Any, fewest: int, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a drafter that does not always propose so many; both widths are compiled before the
    first step."""
    widths, run, warm_up = [], Batch.run_target, Batch.warm_up

    def counted(self: Batch, draft_tokens: Tensor) -> Tensor:
        widths.append(draft_tokens.shape[1])
        return run(self, draft_tokens)

    def warmed(self: Batch, progress: bool) -> None:
        warm_up(self, progress)
        widths.append(-1)

    monkeypatch.setattr(Batch, "run_target", counted)
    monkeypatch.setattr(Batch, "warm_up", warmed)
    monkeypatch.setattr(PromptLookupDrafter, "fewest", lambda self, gamma: min(fewest, gamma))
    drafter, common = PromptLookupDrafter(VOCAB), {"max_new_tokens": 12, "sampling": GREEDY, "progress": False}
    made = generate(TARGET, PROMPTS, drafter, gamma=gamma, compile=True, **common)  # type: ignore[arg-type]
    most = made.record.gamma
    assert most == (4 if gamma == "auto" else gamma)
    begun = widths.index(-1)
    assert {fewest, most} <= set(widths[:begun])
    assert set(widths[begun + 1 :]) == {fewest, most}
    assert made.tokens == generate(TARGET, PROMPTS, None, **common).tokens  # type: ignore[arg-type]


@pytest.mark.parametrize("gamma", ["auto", 3, 0])
def test_without_a_draft_it_copies_from_the_text(gamma: Any) -> None:
    asked: dict[str, Any] = {"gamma": gamma, "max_new_tokens": 11, "progress": False}
    made = generate(TARGET, PROMPTS, **asked)
    copies = generate(TARGET, PROMPTS, PromptLookupDrafter(VOCAB), **asked)
    assert (made.tokens, made.record.gamma) == (copies.tokens, copies.record.gamma)
    assert np.array_equal(made.record.draft_tokens, copies.record.draft_tokens)
    assert bool((made.record.draft_tokens >= 0).any()) == (gamma != 0)
    assert generate(TARGET, PROMPTS, None, **asked).record.gamma == 0


def test_the_compiled_batches_used_last_are_kept(compiled: list[str]) -> None:
    """The two used longest ago are forgotten with their tensors."""
    batches: list[weakref.ref[Batch]] = []

    class Watched(Batch):
        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            batches.append(weakref.ref(self))

    asked: dict[str, Any] = {"max_new_tokens": 3, "compile": True, "progress": False}
    for rows in range(1, COMPILED_SETTINGS + 3):
        for again in (rows, max(1, rows - 1)):  # the one before is still kept
            generate(TARGET, [[1]] * again, None, hooks=Hooks(batch_class=Watched), **asked)
    gc.collect()
    assert [batch() is not None for batch in batches] == [False] * 2 + [True] * COMPILED_SETTINGS
    forget_compiled()
    gc.collect()
    assert all(batch() is None for batch in batches)


def test_a_compiled_batch_is_warmed_up_before_its_first_sequence(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interruption of that leaves nothing behind that was not."""
    warmed: list[bool] = []
    warm_up = Batch.warm_up

    def interrupted(batch: Batch, progress: bool) -> None:
        warmed.append(progress)
        if len(warmed) == 1:
            raise KeyboardInterrupt
        warm_up(batch, progress=False)

    monkeypatch.setattr(Batch, "warm_up", interrupted)
    asked: dict[str, Any] = {"max_new_tokens": 3, "compile": True, "progress": False}
    with pytest.raises(KeyboardInterrupt):
        generate(TARGET, PROMPTS, None, **asked)
    for _ in range(2):
        generate(TARGET, PROMPTS, None, **asked)
    assert warmed == [False, False]


@pytest.mark.parametrize(
    ("drafter", "in_parts", "captured"),
    [
        (None, False, ("step",)),
        (None, True, ("target", "rest")),
        (SimpleNamespace(capturable=True), False, ("step",)),
        (SimpleNamespace(capturable=True), True, ("draft", "target", "rest")),
        (SimpleNamespace(capturable=False), False, ("target", "rest")),
    ],
)
def test_a_whole_step_is_captured_unless_it_is_timed_or_drafts_cannot_be(
    drafter: Any, in_parts: bool, captured: tuple[str, ...]
) -> None:
    wrapped: list[Any] = []
    batch: Any = SimpleNamespace(drafter=drafter, wrap=lambda wrapper, *parts: wrapped.append((wrapper, parts)))
    loop._capture(batch, in_parts)
    assert wrapped == [(Captured, captured)]
