"""A step can be captured and runs on any device; what it refuses. Which tokens it emits is in
test_generate.py.

To be captured, it does nothing on the host, and no shape in it depends on what was sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from drafter_kinds import DEPTH_2, TableDrafter, TableTreeDrafter, chain, table
from implementation_distribution import PROMPTS, SHARP, VOCAB
from tape import Tape, taped
from tiny import gpt2, llama, near_copy, neox, qwen2
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

from specnb.distributions import Sampling, one_hot
from specnb.drafters import Context, Drafter, ModelDrafter, Proposal
from specnb.enumeration import step_distribution
from specnb.rules import (
    Outcome,
    Plan,
    PlannedRule,
    Rule,
    exact_match,
    greedy_verification,
    rejection_sampling,
    token_verification,
)
from specnb.sampler import Hooks, Request, generate
from specnb.step import Batch, State

# A device of which torch knows nothing but that it is another one.
_setup_privateuseone_for_python_backend("elsewhere")

MAKERS = [llama, gpt2, neox, qwen2]
RULES = [token_verification, exact_match, rejection_sampling, greedy_verification]
TARGET = llama(dtype=torch.float64)
ASKED: dict[str, Any] = {"max_new_tokens": 10, "seed": 4, "progress": False}


def batch_of(target: PreTrainedModel = TARGET, drafter: Drafter | None = None, **asked: Any) -> Batch:
    """A batch for the usual prompts; a table drafts unless another drafter is given."""
    drafter = chain() if drafter is None else drafter
    settings = {"gamma": 2, "max_new_tokens": 5} | asked
    return Batch(Request(target, PROMPTS, drafter, **settings))


def enter_all(batch: Batch, eos: list[int] | None = None) -> None:
    batch.clear(eos or [])
    batch.enter([0, 1, 2], PROMPTS, batch.uniforms(0, range(3), 5), 5)


# A step is static.


@contextmanager
def batch_without_values(make: Callable[..., PreTrainedModel], rule: Rule = token_verification) -> Iterator[Batch]:
    """A batch on a device that computes nothing, of tensors that have no contents: reading one is
    an error, and so is an operation on tensors of two devices."""
    target, draft = make(), make(seed=5, layers=1)
    with torch.inference_mode(), FakeTensorMode():
        for module in (*target.modules(), *draft.modules()):
            tables: Any = (module._parameters, module._buffers)
            for kept in tables:
                for name, tensor in kept.items():
                    if tensor is not None:
                        kept[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="elsewhere")
        drafter = ModelDrafter(draft)
        batch = batch_of(target, drafter, rule=rule, eos=[1])
        drafter.allocate(batch.state.tokens.shape[1])
        yield batch


@pytest.mark.parametrize(
    ("make", "sampling"),
    [
        *((make, Sampling()) for make in MAKERS),
        *((llama, sampling) for sampling in (Sampling(temperature=0), SHARP, Sampling(0.7, top_p=0.8))),
    ],
)
def test_replaying_the_operations_of_one_step_gives_the_whole_completion(
    make: Callable[..., PreTrainedModel], sampling: Sampling
) -> None:
    """What a CUDA graph would do: operations on memory, without Python."""
    target = make(dtype=torch.float64)
    tree = TableTreeDrafter(DEPTH_2)
    drafters: list[tuple[Any, int]] = [(near_copy(target, noise=0.3), 3), (None, 0), (tree, len(DEPTH_2))]
    for draft, gamma in drafters:
        asked: dict[str, Any] = {**ASKED, "gamma": gamma, "sampling": sampling, "eos": [2]}
        plain = generate(target, PROMPTS, draft, **asked)
        replayed = generate(target, PROMPTS, draft, **asked, hooks=Hooks(batch_class=taped(Batch)))
        assert replayed.tokens == plain.tokens
        assert (replayed.record.draft_tokens == plain.record.draft_tokens).all()
        assert np.allclose(replayed.record.beta, plain.record.beta, rtol=0, atol=1e-12)


def test_a_tape_shows_what_a_step_does_on_the_host() -> None:
    class Counting(State):
        """Counts its steps in Python, and so uses the same uniforms again when replayed."""

        count = 0

        def prepare_next_step(self) -> None:
            super().prepare_next_step()
            self.step_uniforms.copy_(self.uniforms[:, self.count])
            self.count += 1

    class CountingBatch(Batch):
        state_class = Counting

    plain, replayed = (
        generate(TARGET, PROMPTS, near_copy(TARGET, 0.3), gamma=2, **ASKED, hooks=Hooks(batch_class=batch_class))
        for batch_class in (CountingBatch, taped(CountingBatch))
    )
    assert replayed.tokens != plain.tokens


@pytest.mark.parametrize(
    ("make", "rule"), [*((make, RULES[0]) for make in MAKERS), *((llama, rule) for rule in RULES[1:])]
)
def test_a_step_runs_on_a_device_without_reading_anything(make: Callable[..., PreTrainedModel], rule: Rule) -> None:
    with batch_without_values(make, rule) as batch:
        batch.step()
        batch.step()
        assert batch.state.status.device.type == "elsewhere"


def waiting(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, accept * float(p.max()), final)


def elsewhere(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, draft_tokens, accept + torch.zeros(accept.shape), final)


@pytest.mark.parametrize(("rule", "error"), [(waiting, DataDependentOutputException), (elsewhere, RuntimeError)])
def test_tensors_without_values_show_a_step_that_waits_or_mixes_devices(rule: Rule, error: type[Exception]) -> None:
    with batch_without_values(llama, rule) as batch, pytest.raises(error):
        batch.step()


@pytest.mark.parametrize("of_the_user", [False, True])
def test_a_step_captured_while_warming_up_serves_later_sequences(of_the_user: bool) -> None:
    """As on a device: captured on a meaningless sequence, replayed on others, with the same
    caches."""

    class CapturedBatch(Batch):
        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            self.wrap(Tape, "step")
            self.warm_up(progress=False)

    model = near_copy(TARGET, noise=0.3)
    draft = ModelDrafter(model) if of_the_user else model
    plain = generate(TARGET, PROMPTS, draft, gamma=3, eos=2, **ASKED)
    captured = generate(TARGET, PROMPTS, draft, gamma=3, eos=2, **ASKED, hooks=Hooks(batch_class=CapturedBatch))
    assert captured.tokens == plain.tokens
    assert (captured.record.accepted == plain.record.accepted).all()
    assert np.allclose(captured.record.beta, plain.record.beta, rtol=0, atol=1e-12)


# The parts of a step.


@torch.inference_mode()
def test_a_step_marks_its_parts_and_runs_each_through_its_wrapper() -> None:
    batch, seen = batch_of(), []

    def named(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda function: lambda *tensors: seen.append(name) or function(*tensors)

    enter_all(batch)
    for part in ("draft", "target", "rest"):
        batch.wrap(named(part), part)
    batch.step_in_parts(lambda part: seen.append(f"{part} ended"))
    assert seen == ["draft", "draft ended", "target", "target ended", "rest"]
    seen.clear()
    batch.wrap(named("outer"), "draft", "step")
    batch.step()
    assert seen == ["outer", "outer", "draft", "target", "rest"]


@torch.inference_mode()
def test_a_drafter_is_told_which_rows_begin_and_what_became_of_its_tokens() -> None:
    told: list[Any] = []

    class Listening(TableDrafter):
        hidden_layers = (-1,)

        def start(self, context: Context, rows: Tensor | None = None) -> None:
            told.append((None if rows is None else rows.tolist(), context.lengths.tolist()))

        def update(self, context: Context, outcome: Outcome) -> None:
            told.append((outcome.accepted.tolist(), context.lengths.tolist()))

    batch = batch_of(drafter=Listening(table()))
    enter_all(batch)
    lengths = [len(prompt) for prompt in PROMPTS]
    batch.enter([2, 0], [[1], [3, 3]], batch.uniforms(0, [3, 4], 5), 5)
    assert told == [(None, lengths), ([2, 0], [2, lengths[1], 1])]
    states = batch.runner.hidden_states
    assert states is not None
    assert bool(states[1, 0].any())
    batch.step()
    accepted = batch.state.record[:, 0, 2].int().tolist()
    expected = [length + n + 1 for length, n in zip((2, lengths[1], 1), accepted, strict=True)]
    assert told[2:] == [(accepted, expected)]
    batch.clear([])
    assert not states.any(), "hidden states of earlier sequences are forgotten"


# What a model, a drafter and a rule may not return.


class Proposing(Drafter):
    """Proposes token 1 with a uniform q, after a change."""

    vocab = VOCAB

    def __init__(self, change: Callable[..., Any], parents: tuple[int, ...] | None = None) -> None:
        self.change, self.parents = change, parents

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        draft_tokens = torch.ones(uniforms.shape, dtype=torch.int64)
        return Proposal(*self.change(draft_tokens, torch.full((*uniforms.shape, VOCAB), 1 / VOCAB)))


def moved(by: float) -> Tensor:
    """A change of q that leaves its sum as it is."""
    return torch.tensor([-by, by, 0.0, 0.0])


@pytest.mark.parametrize("parents", [None, (-1, 0, -1, -1)], ids=["chain", "tree"])
@pytest.mark.parametrize(
    ("change", "proper"),
    [
        (lambda tokens, q: (tokens, q), True),
        (lambda tokens, q: (0 * tokens - 1, 0 * q), True),
        (lambda tokens, q: (tokens, q * (1 + 9e-5)), True),
        (lambda tokens, q: (tokens, q + moved(0.25)), True),
        (lambda tokens, q: (tokens, q * (1 + 1.2e-4)), False),
        (lambda tokens, q: (tokens, q * (1 - 1.2e-4)), False),
        (lambda tokens, q: (tokens, 0 * q), False),
        (lambda tokens, q: (0 * tokens - 1, q), False),
        (lambda tokens, q: (tokens, q + moved(0.26)), False),
        (lambda tokens, q: (tokens + VOCAB, q), False),
        (lambda tokens, q: (tokens - 5, 0 * q), False),
        (lambda tokens, q: (tokens, one_hot((tokens + 1) % VOCAB, VOCAB, q.dtype)), False),
    ],
    ids=["plain", "nothing", "rounded", "with a zero", "sum above 1", "sum below 1", "sum 0", "no token, yet a q",
         "negative", "outside the vocabulary", "below -1", "another token's"],
)  # fmt: skip
def test_a_proposal_that_is_no_distribution_is_reported(
    change: Callable[..., Any], proper: bool, parents: tuple[int, ...] | None
) -> None:
    asked: dict[str, Any] = {"gamma": 4, "max_new_tokens": 4, "progress": False}
    if proper:
        assert len(generate(TARGET, [[1, 2], [0]], Proposing(change, parents), **asked).tokens) == 2
    else:
        with pytest.raises(ValueError, match="a token outside the vocabulary, or a q that is no distribution"):
            generate(TARGET, [[1, 2], [0]], Proposing(change, parents), **asked)


def test_a_drafter_must_ask_for_hidden_states_and_have_a_propose() -> None:
    class Careless(TableDrafter):
        def propose(self, context: Context, uniforms: Tensor) -> Proposal:
            return Proposal(uniforms, context.last_hidden_state)

    class Unfinished(Drafter):
        vocab = VOCAB

    with pytest.raises(ValueError, match="set the drafter's hidden_layers"):
        generate(TARGET, PROMPTS, Careless(table()), max_new_tokens=2, progress=False)
    with pytest.raises(NotImplementedError, match="Unfinished has no propose"):
        generate(TARGET, PROMPTS, Unfinished(), max_new_tokens=2, progress=False)


def test_a_proposal_of_a_row_that_has_ended_is_not_checked() -> None:
    class Careless(Proposing):
        """Twice a distribution where a sequence has ended."""

        def propose(self, context: Context, uniforms: Tensor) -> Proposal:
            draft_tokens, q = super().propose(context, uniforms)
            return Proposal(draft_tokens, torch.where((context.newest == 3)[:, None, None], 2 * q, q))

    made = generate(TARGET, [[1]] * 4, Careless(lambda *both: both), gamma=4, max_new_tokens=9, progress=False, eos=3)
    assert len(set(map(len, made.tokens))) > 1


@pytest.mark.parametrize(
    "change",
    [
        lambda tokens, q: (tokens[:, :1], q),
        lambda tokens, q: (tokens, q[..., :1]),
        lambda tokens, q: (tokens.float(), q),
        lambda tokens, q: (tokens, q.bfloat16()),
    ],
)
def test_a_proposal_of_another_shape_or_type_is_reported(change: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"they must be int64 \(1, 4\) and float32 or float64 \(1, 4, 4\)"):
        generate(TARGET, [[1]], Proposing(change), gamma=4, max_new_tokens=4, progress=False)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), SHARP, Sampling(top_p=0.9), Sampling(temperature=0)], ids=str)
@pytest.mark.parametrize("broken", ["target", "draft"])
def test_a_model_that_produces_nan_is_reported(broken: str, sampling: Sampling, value: float) -> None:
    target, draft = llama(), llama(seed=2)
    (target if broken == "target" else draft).lm_head.weight.data[1] = value
    for gamma in (0, 3) if broken == "target" else (3,):
        with pytest.raises(FloatingPointError, match="a model produced NaN"):
            generate(target, PROMPTS, draft, gamma=gamma, max_new_tokens=3, sampling=sampling, progress=False)


@pytest.mark.parametrize("parents", [None, (-1, 0, -1)], ids=["chain", "tree"])
@pytest.mark.parametrize("position", range(4))
def test_nan_at_any_position_of_a_step_is_reported(position: int, parents: tuple[int, ...] | None) -> None:
    """Of one row of three, also after the last draft token and where no draft token was
    accepted."""
    target = llama(dtype=torch.float64)

    def spoil(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
        if logits.shape[1] == 4:
            logits[1, position, 2] = torch.nan
        return logits

    target.lm_head.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match="a model produced NaN"):
        generate(target, PROMPTS, Proposing(lambda *both: both, parents), gamma=3, max_new_tokens=3, progress=False)


@pytest.mark.parametrize(
    "returned",
    [
        lambda rows: None,
        lambda rows: (rows, rows),
        lambda rows: Outcome(rows.float(), rows),
        lambda rows: Outcome(rows[:, None], rows),
    ],
)
def test_a_rule_that_returns_no_outcome_is_reported(returned: Callable[[Tensor], Any]) -> None:
    def rule(p: Tensor, *others: Any) -> Any:
        return returned(torch.zeros(len(p), dtype=torch.int64))

    half = torch.tensor([0.5, 0.5]).double()
    for carry_out in (
        lambda: generate(TARGET, [[1]], chain(), gamma=1, rule=rule, max_new_tokens=3, progress=False),
        lambda: step_distribution(rule, lambda _: half, lambda _: half, gamma=1),
    ):
        with pytest.raises(TypeError, match=r"the rule returned a .*; it must return an Outcome of two int64 tensors"):
            carry_out()


def returning_none(*given: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (lambda p, q, draft_tokens: None, r"rule <lambda> takes \(p, q, draft_tokens\): too many positional arguments; "
         r"it is called with \(p, q, draft_tokens, accept_uniforms, final_uniform\)$"),
        (lambda p, q, x, u, v, tree: None, "missing a required argument: 'tree'"),
        ("token", "rule is 'token'; it must be an acceptance rule of specnb.rules, or such a function"),
        (PlannedRule(returning_none), r"plan of returning_none is a NoneType with accept and after \['None"),
        (PlannedRule(lambda p, q, x, tree: Plan(x, p[..., 1:, :])), r"is a Plan with .* must be a Plan of tensors of"),
    ],
)  # fmt: skip
def test_what_is_no_rule_is_refused_by_loop_and_enumeration_alike(rule: Any, words: str) -> None:
    half = torch.tensor([0.5, 0.5]).double()
    with pytest.raises(TypeError, match=words):
        generate(TARGET, [[1]], chain(), gamma=1, rule=rule, max_new_tokens=3, progress=False)
    with pytest.raises(TypeError, match=words):
        step_distribution(rule, lambda _: half, lambda _: half, gamma=1)


def token_in_five(p: Tensor, q: Tensor, x: Tensor, accept: Tensor, final: Tensor) -> Outcome:
    return token_verification(p, q, x, accept, final)


def test_a_rule_for_a_tree_is_called_with_it() -> None:
    half = torch.tensor([0.5, 0.5]).double()
    with pytest.raises(TypeError, match=r"it is called with \(.*, final_uniform, tree\)"):
        step_distribution(token_in_five, lambda _: half, lambda _: half, (-1, -1))
    with pytest.raises(TypeError, match=r"the plan chain_only takes \(p, q, x\)"):

        @PlannedRule  # type: ignore[arg-type]
        def chain_only(p: Tensor, q: Tensor, x: Tensor) -> None: ...
