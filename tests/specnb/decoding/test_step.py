"""A step's state and parts against a transcription for one row; a step can be captured, and runs on any device.

To be captured, it does nothing on the host, and no shape in it depends on what was sampled.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from drafter_kinds import TableDrafter
from implementation_distribution import PROMPTS, SHARP
from tape import Tape, taped
from tiny import gpt2, llama, near_copy, neox, qwen2
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

from specnb.decoding import generate as loop
from specnb.decoding import step
from specnb.decoding.generate import Study, generate
from specnb.decoding.step import IMPROPER, NAN, Batch, State, require_outcome, require_shapes
from specnb.distributions import Sampling, Uniforms, standardise, uniforms
from specnb.drafting.base import Context, Proposal
from specnb.drafting.model import ModelDrafter
from specnb.rules import (
    Outcome,
    Rule,
    TreeOutcome,
    exact_match,
    greedy_verification,
    rejection_sampling,
    token_verification,
)

# A device of which torch knows nothing but that it is another one.
_setup_privateuseone_for_python_backend("elsewhere")

MAKERS = [llama, gpt2, neox, qwen2]
RULES = [token_verification, exact_match, rejection_sampling, greedy_verification]
SAMPLINGS = [Sampling(), Sampling(temperature=0), SHARP, Sampling(0.7, top_p=0.8)]
TOKENS = 10


def batch_of(make: Callable[..., PreTrainedModel], rule: Rule = token_verification) -> Batch:
    return _batch(make(), make(seed=5, layers=1), rule)


def _batch(target: PreTrainedModel, draft: PreTrainedModel, rule: Rule) -> Batch:
    return Batch(target, ModelDrafter(draft), Sampling(), rule, 3, 3, 24, 8, 1)


def drafter_of(batch: Batch) -> ModelDrafter:
    assert isinstance(batch.drafter, ModelDrafter)
    return batch.drafter


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="elsewhere")


@contextmanager
def batch_without_values(make: Callable[..., PreTrainedModel], rule: Rule = token_verification) -> Iterator[Batch]:
    """A batch on a device that computes nothing, of tensors that have no contents: reading one is an error, and
    so is an operation on tensors of two devices."""
    target, draft = make(), make(seed=5, layers=1)
    with torch.inference_mode(), FakeTensorMode():
        for module in (*target.modules(), *draft.modules()):
            tables: Any = (module._parameters, module._buffers)
            for kept in tables:
                for name, tensor in kept.items():
                    kept[name] = tensor if tensor is None else _empty(tensor)
        batch = _batch(target, draft, rule)
        drafter_of(batch).allocate(3, 24)
        yield batch


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("make", MAKERS)
def test_replaying_the_operations_of_one_step_gives_the_whole_completion(
    make: Callable[..., PreTrainedModel], sampling: Sampling
) -> None:
    """What a CUDA graph would do: operations on memory, without Python."""
    target = make(dtype=torch.float64)
    draft_tokens = (near_copy(target, noise=0.3), 3), (None, 0)
    for draft, gamma in draft_tokens:
        asked: dict[str, Any] = {
            "gamma": gamma,
            "max_new_tokens": TOKENS,
            "sampling": sampling,
            "seed": 4,
            "progress": False,
        }
        plain = generate(target, PROMPTS, draft, **asked, eos=[2])
        replayed = generate(target, PROMPTS, draft, **asked, eos=[2], study=Study(batch_class=taped(Batch)))
        assert replayed.tokens == plain.tokens
        assert (replayed.record.draft_tokens == plain.record.draft_tokens).all()
        assert np.allclose(replayed.record.beta, plain.record.beta, rtol=0, atol=1e-12)


def test_a_tape_shows_what_a_step_does_on_the_host() -> None:
    class Counting(Batch):
        """Counts its steps in Python, and so uses the same uniforms again when replayed."""

        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            self.count = 0
            self.state.prepare_next_step = self.prepare_next_step  # type: ignore[method-assign]
            self.wrap(Tape, "step")

        def prepare_next_step(self) -> None:
            State.prepare_next_step(self.state)
            self.state.step_uniforms.copy_(self.state.uniforms[:, self.count])
            self.count += 1

    target = llama(dtype=torch.float64)
    asked: dict[str, Any] = {"gamma": 2, "max_new_tokens": TOKENS, "progress": False}
    plain = generate(target, PROMPTS, llama(seed=5, layers=1, dtype=torch.float64), **asked)
    draft = llama(seed=5, layers=1, dtype=torch.float64)
    assert generate(target, PROMPTS, draft, **asked, study=Study(batch_class=Counting)).tokens != plain.tokens


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("make", MAKERS)
def test_a_step_runs_on_a_device_without_reading_anything(make: Callable[..., PreTrainedModel], rule: Rule) -> None:
    with batch_without_values(make, rule) as batch:
        batch.step()
        batch.step()
        assert batch.state.status.device.type == "elsewhere"


def test_tensors_without_values_show_a_step_that_waits() -> None:
    def waiting(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, accept * float(p.max()), final)

    with batch_without_values(llama, waiting) as batch, pytest.raises(DataDependentOutputException):
        batch.step()


def test_tensors_without_values_show_a_step_that_mixes_devices() -> None:
    def elsewhere(p: Tensor, q: Tensor, draft_tokens: Tensor, accept: Tensor, final: Tensor) -> Outcome:
        return token_verification(p, q, draft_tokens, accept + torch.zeros(accept.shape), final)

    with batch_without_values(llama, elsewhere) as batch, pytest.raises(RuntimeError, match="device"):
        batch.step()


def places(batch: Batch) -> list[int]:
    """Where every tensor of the state and of both caches lies."""
    caches = [batch.runner.cache, drafter_of(batch).runner.cache]
    kept = [
        *vars(batch.state).values(),
        *(own for cache in caches for one in cache.ragged for own in vars(one).values()),
    ]
    return [tensor.data_ptr() for tensor in kept if isinstance(tensor, torch.Tensor)]


@torch.inference_mode()
def test_a_step_changes_tensors_in_place() -> None:
    batch = batch_of(llama)
    batch.clear([2])
    batch.enter([0, 1, 2], PROMPTS, uniforms(0, [0, 1, 2], 8, 3), 8)
    before = places(batch)
    for _ in range(4):
        batch.step()
    assert places(batch) == before


@pytest.mark.filterwarnings("ignore")  # of the compiler's own doings
def test_a_whole_step_compiles_in_one_piece() -> None:
    """No graph break, so nothing in it needs Python or the host; and the same tokens.

    The operations of the graph are run as they are: that compiled code gives the same is tested in test_loop.py.
    """
    target = llama(dtype=torch.float64)

    class Whole(Batch):
        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            self.wrap(partial(torch.compile, fullgraph=True, dynamic=False, backend="aot_eager"), "step")

    draft = near_copy(target, noise=0.3)
    asked: dict[str, Any] = {"gamma": 2, "max_new_tokens": TOKENS, "seed": 4, "progress": False}
    plain = generate(target, PROMPTS, draft, **asked)
    compiled = generate(target, PROMPTS, draft, **asked, study=Study(batch_class=Whole))
    assert compiled.tokens == plain.tokens


class Graph(Tape):
    """Stands for `specnb.models.compilation.Captured`: takes tensors only, and replays what its first call did."""

    def __call__(self, *tensors: object) -> None:
        assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
        assert not tensors, "only whole steps are replayed here"
        super().__call__()


@pytest.mark.parametrize("of_the_user", [False, True])
def test_a_step_captured_while_warming_up_serves_later_sequences(
    of_the_user: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device: captured on a meaningless sequence, replayed on others, with the same caches."""
    target = llama(dtype=torch.float64)
    model = near_copy(target, noise=0.3)
    draft = ModelDrafter(model) if of_the_user else model
    asked: dict[str, Any] = {"gamma": 3, "max_new_tokens": TOKENS, "seed": 4, "progress": False}
    plain = generate(target, PROMPTS, draft, **asked)

    class CapturedBatch(Batch):
        def __init__(self, *settings: Any) -> None:
            super().__init__(*settings)
            self.wrap(Graph, "step")
            self.warm_up(progress=False)

    monkeypatch.setattr(loop, "Captured", Graph)
    captured = generate(target, PROMPTS, draft, **asked, study=Study(batch_class=CapturedBatch))
    assert captured.tokens == plain.tokens
    assert (captured.record.accepted == plain.record.accepted).all()
    assert np.allclose(captured.record.beta, plain.record.beta, rtol=0, atol=1e-12)


# The state of the rows.

CPU = torch.device("cpu")


def shapes_of(state: State) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    kept = {name: one for name, one in vars(state).items() if isinstance(one, Tensor)}
    return {name: (tuple(one.shape), one.dtype) for name, one in kept.items()}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_tensors_of_a_state_have_the_shapes_that_its_docstring_lists(device: str) -> None:
    """Two rows, gamma 3, 7 slots, 4 steps (and one behind them) and 2 tokens of eos."""
    state = State(2, 3, 7, 4, 2, torch.device(device))
    whole, real = torch.int64, torch.float64
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "tokens": ((2, 7), whole),
        **dict.fromkeys(("lengths", "starts", "remaining", "steps", "status"), ((2,), whole)),
        **dict.fromkeys(("has_nan", "improper"), ((2,), torch.bool)),
        "uniforms": ((2, 5, 7), real),
        "step_uniforms": ((2, 7), real),
        "record": ((2, 5, 9), real),
        "eos": ((2,), whole),
        "offsets": ((4,), whole),
        "rows": ((2,), whole),
    }
    assert shapes_of(state) == expected
    assert (state.gamma, state.path, state.probs) == (3, None, None)
    state.record_path(2)
    state.record_probs(6, torch.float32)
    # The last step may begin at the last token asked for, the fourth, and has 3 + 1 distributions.
    kept = {"path": ((2, 5, 2), whole), "probs": ((2, 8, 6), torch.float32)}
    assert shapes_of(state) == expected | kept
    assert {one.device.type for one in vars(state).values() if isinstance(one, Tensor)} == {device}
    if device == "cpu":
        assert state.offsets.tolist() == [0, 1, 2, 3]
        assert state.rows.tolist() == [0, 1]
        assert not any(bool(getattr(state, name).any()) for name in {*expected, *kept} - {"offsets", "rows"})


def test_prompts_enter_their_rows_and_no_other() -> None:
    state = State(3, 2, 9, 4, 0, CPU)
    for tensor in (state.tokens, state.lengths, state.starts, state.remaining, state.steps, state.uniforms):
        tensor.fill_(7)
    state.steps[1] = 3
    state.has_nan[:], state.improper[:] = True, True
    given = uniforms(5, [0, 1], 2, 2)
    state.enter(torch.tensor([2, 0]), [[5], [1, 2, 3]], given, 6)
    assert state.tokens.tolist() == [[1, 2, 3, *[7] * 6], [7] * 9, [5, 0, 0, *[7] * 6]]
    assert state.lengths.tolist() == state.starts.tolist() == [3, 7, 1]
    assert state.remaining.tolist() == [6, 7, 6]
    assert state.steps.tolist() == [0, 3, 0]
    assert state.has_nan.tolist() == state.improper.tolist() == [False, True, False]
    assert (state.uniforms[1] == 7).all()
    assert (state.uniforms[:, 2:] == 7).all()
    for row, own in ((2, 0), (0, 1)):
        every = [given.draft[own], given.accept[own], given.final[own][:, None]]
        assert torch.equal(state.uniforms[row, :2], torch.cat(every, dim=1))
    assert torch.equal(state.step_uniforms, state.uniforms[[0, 1, 2], [0, 3, 0]])
    assert state.status.tolist() == [6, NAN, 6]


def test_the_status_is_what_remains_or_an_error_and_nan_comes_first() -> None:
    state = State(4, 1, 3, 2, 0, CPU)
    state.remaining.copy_(torch.tensor([0, 5, 5, 5]))
    state.improper.copy_(torch.tensor([False, False, True, True]))
    state.has_nan.copy_(torch.tensor([False, False, False, True]))
    state.uniforms.copy_(torch.rand(4, 3, 3, generator=torch.Generator().manual_seed(0)))
    state.steps.copy_(torch.tensor([2, 0, 1, 0]))
    state.prepare_next_step()
    assert state.status.tolist() == [0, 5, IMPROPER, NAN]
    assert torch.equal(state.step_uniforms, state.uniforms[[0, 1, 2, 3], [2, 0, 1, 0]])


def emitted_by_hand(
    drafted: list[int], accepted: int, token: int, remaining: int, eos: list[int]
) -> tuple[list[int], int]:
    """The tokens that a step emits in one row, and how many remain to be emitted."""
    new = [*drafted[:accepted], token][:remaining]
    ends = [at for at, one in enumerate(new) if one in eos]
    return (new[: ends[0] + 1], 0) if ends else (new, remaining - len(new))


@pytest.mark.parametrize("eos", [[], [3], [0, 4]], ids=str)
@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_any_step_appends_what_the_rule_accepted_up_to_the_end(gamma: int, eos: list[int]) -> None:
    """400 rows at random, a fifth of which have ended, against the loop that one would write for one row."""
    chance = np.random.default_rng(gamma)
    rows, vocab, slots = 400, 6, 12
    drafted, accepted = chance.integers(-1, vocab, (rows, gamma)), chance.integers(0, gamma + 1, rows)
    tokens, lengths = chance.integers(0, vocab, (rows, slots)), chance.integers(1, slots - gamma, rows)
    final, remaining = chance.integers(0, vocab, rows), chance.integers(0, 5, rows)
    state = State(rows, gamma, slots, 3, len(eos), CPU)
    state.eos.copy_(torch.tensor(eos, dtype=torch.int64))
    state.tokens.copy_(torch.from_numpy(tokens))
    state.lengths.copy_(torch.from_numpy(lengths))
    state.remaining.copy_(torch.from_numpy(remaining))
    proposal = Proposal(torch.from_numpy(drafted), torch.zeros(rows, gamma, vocab))
    emitted = state.append(proposal, Outcome(torch.from_numpy(accepted), torch.from_numpy(final)))
    for row in range(rows):
        new, left = emitted_by_hand(drafted[row].tolist(), accepted[row], final[row], remaining[row], eos)
        assert int(emitted[row]) == len(new)
        assert int(state.lengths[row]) == lengths[row] + len(new)
        assert int(state.remaining[row]) == left
        expected = [*tokens[row, : lengths[row]].tolist(), *new]
        assert state.tokens[row, : len(expected)].tolist() == expected


def test_a_path_shorter_than_gamma_is_appended_too() -> None:
    """As in a tree of 4 nodes and depth 1."""
    state = State(2, 4, 8, 2, 1, CPU)
    state.eos.fill_(5)
    state.lengths.fill_(2)
    state.remaining.fill_(9)
    outcome = Outcome(torch.tensor([1, 0]), torch.tensor([3, 5]))
    assert state.append(Proposal(torch.tensor([[1], [2]]), torch.zeros(2, 4, 6)), outcome).tolist() == [2, 1]
    assert state.tokens[:, :4].tolist() == [[0, 0, 1, 3], [0, 0, 5, 5]]
    assert state.remaining.tolist() == [7, 0]


def test_what_a_step_did_is_recorded_in_the_rows_own_step_and_counted_while_it_emits() -> None:
    """The second row has made a step, the third has ended: what it writes lies behind its last step."""
    state = State(3, 2, 9, 4, 0, CPU)
    state.record_path(1)
    state.steps.copy_(torch.tensor([0, 1, 2]))
    beta = torch.tensor([[0.25, 0.5], [0.75, 1.0], [0.0, 0.125]])
    outcome = TreeOutcome(torch.tensor([2, 0, 1]), torch.tensor([7, 8, 9]), torch.tensor([[1], [-1], [0]]))
    proposal = Proposal(torch.tensor([[1, 2], [3, -1], [5, 6]]), torch.zeros(3, 2, 10))
    state.keep_path(outcome.path)
    state.remember(proposal, outcome, torch.tensor([3, 1, 0]), beta)
    assert state.record[0, 0].tolist() == [1, 2, 2, 7, 3, 0.25, 0.5]
    assert state.record[1, 1].tolist() == [3, -1, 0, 8, 1, 0.75, 1.0]
    assert state.record[2, 2].tolist() == [5, 6, 1, 9, 0, 0.0, 0.125]
    assert int((state.record != 0).any(dim=2).sum()) == 3
    assert state.path is not None
    assert [int(state.path[row, step]) for row, step in ((0, 0), (1, 1), (2, 2))] == [1, -1, 0]
    assert int((state.path != 0).sum()) == 2
    assert state.steps.tolist() == [1, 2, 2]


def test_distributions_are_kept_behind_those_of_the_tokens_before() -> None:
    state = State(2, 2, 12, 5, 0, CPU)
    p = torch.rand(2, 3, 4, generator=torch.Generator().manual_seed(0))
    state.keep_probs(p)  # not asked for: nothing is kept
    state.record_probs(4, torch.float32)
    state.starts.copy_(torch.tensor([3, 1]))
    state.lengths.copy_(torch.tensor([3, 5]))
    state.keep_probs(p)
    state.lengths += 1
    state.keep_probs(2 + p[:, :2])  # of a path of two, over the last two of three
    assert state.probs is not None
    assert torch.equal(state.probs[0, :3], torch.stack([p[0, 0], 2 + p[0, 0], 2 + p[0, 1]]))
    assert torch.equal(state.probs[1, 4:7], torch.stack([p[1, 0], 2 + p[1, 0], 2 + p[1, 1]]))
    assert not state.probs[0, 3:].any()
    assert not state.probs[1, :4].any()
    assert not state.probs[1, 7:].any()


@pytest.mark.parametrize("kept", [False, True])
def test_completed_rows_are_given_in_the_order_asked_for(kept: bool) -> None:
    state = State(3, 2, 8, 4, 0, CPU)
    state.tokens.copy_(torch.arange(24).reshape(3, 8))
    state.starts.copy_(torch.tensor([1, 2, 3]))
    state.lengths.copy_(torch.tensor([4, 7, 5]))
    state.steps.copy_(torch.tensor([2, 4, 1]))
    state.record.copy_(torch.arange(3 * 5 * 7).reshape(3, 5, 7) + 0.0)
    if kept:
        state.record_path(2)
        state.record_probs(5, torch.float64)
        assert state.path is not None
        assert state.probs is not None
        state.path.copy_(torch.arange(30).reshape(3, 5, 2))
        state.probs.copy_(torch.rand(state.probs.shape, generator=torch.Generator().manual_seed(0)))
    rows = state.completed_rows([2, 0])
    assert [row.tokens for row in rows] == [[19, 20], [1, 2, 3]]
    for made, row, steps, new in ((rows[0], 2, 1, 2), (rows[1], 0, 2, 3)):
        expected = np.arange(3 * 5 * 7).reshape(3, 5, 7)[row, :steps]
        assert made.record.tolist() == expected[:, :5].tolist()
        assert made.beta.tolist() == expected[:, 5:].tolist()
        assert made.path is not None
        assert [one.dtype.name for one in (made.record, made.beta, made.path)] == ["int64", "float64", "int64"]
        assert made.path.tolist() == (np.arange(30).reshape(3, 5, 2)[row, :steps].tolist() if kept else [[]] * steps)
        if kept:
            assert state.probs is not None
            assert made.probs is not None
            assert torch.equal(made.probs, state.probs[row, :new])
            assert made.probs.untyped_storage().nbytes() == new * 5 * 8  # a copy: the next prompt writes over it
        else:
            assert made.probs is None


# The parts of a step.


def chain_batch(rows: int = 3, gamma: int = 2, steps: int = 4, ends: int = 0, **more: Any) -> Batch:
    """Of a table of four tokens; entered prompts have 5 tokens to come."""
    table = torch.softmax(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)), dim=-1)
    settings: dict[str, Any] = {"sampling": Sampling(), "rule": token_verification, "drafter": TableDrafter(table)}
    chosen = settings | more
    target = llama(dtype=torch.float64)
    return Batch(target, chosen["drafter"], chosen["sampling"], chosen["rule"], rows, gamma, 24, steps, ends)


@torch.inference_mode()
def test_a_batch_is_made_of_what_it_is_given() -> None:
    batch = chain_batch(ends=2)
    assert batch.drafter is not None
    assert (batch.vocab, batch.cold, batch.wrapped, batch.parents) == (4, True, {}, None)
    assert (batch.state.gamma, len(batch.state.rows), batch.state.tokens.shape) == (2, 3, (3, 24))
    assert batch.state.uniforms.shape[1] == 5
    assert (batch.runner.capacity, batch.runner.hidden_states) == (24, None)
    batch.clear([3, 1])
    assert batch.state.eos.tolist() == [3, 1]
    assert chain_batch(gamma=0).drafter is None


@torch.inference_mode()
def test_the_hidden_states_that_a_drafter_names_are_kept_and_cleared() -> None:
    class Looking(TableDrafter):
        hidden_layers = (-1, 0)

    drafter = Looking(torch.full((4, 4), 0.25))
    batch = chain_batch(drafter=drafter)
    batch.clear([])
    batch.enter([0, 1, 2], [[1, 2, 3]] * 3, uniforms(0, range(3), 5, 2), 5)
    states = batch.runner.hidden_states
    assert states is not None
    assert states.shape == (3, 24, 16)
    assert batch.context.hidden_states is states
    assert bool(states[:, :2].any())
    assert chain_batch(gamma=0, drafter=drafter).runner.hidden_states is None
    batch.clear([])
    assert not states.any()


@torch.inference_mode()
def test_a_drafter_is_told_of_all_rows_at_first_and_then_of_those_that_begin_anew() -> None:
    started: list[tuple[list[int] | None, list[int]]] = []

    class Recording(TableDrafter):
        def start(self, context: Context, rows: Tensor | None = None) -> None:
            started.append((None if rows is None else rows.tolist(), context.lengths.tolist()))

    batch = chain_batch(drafter=Recording(torch.full((4, 4), 0.25)))
    batch.clear([])
    batch.enter([0, 1, 2], PROMPTS, uniforms(0, range(3), 5, 2), 5)
    batch.enter([2, 0], [[1], [3, 3]], uniforms(0, [3, 4], 5, 2), 5)
    assert started == [(None, [len(prompt) for prompt in PROMPTS]), ([2, 0], [2, len(PROMPTS[1]), 1])]


@torch.inference_mode()
def test_a_drafter_is_told_the_outcome_of_each_step_and_the_tokens_emitted() -> None:
    updates: list[tuple[list[int], list[int]]] = []

    class Recording(TableDrafter):
        def update(self, context: Context, outcome: Outcome | TreeOutcome) -> None:
            updates.append((outcome.accepted.tolist(), context.lengths.tolist()))

    batch = chain_batch(drafter=Recording(torch.full((4, 4), 0.25)))
    batch.clear([])
    batch.enter([0, 1, 2], PROMPTS, uniforms(0, range(3), 5, 2), 5)
    batch.step()
    accepted = batch.state.record[:, 0, 2].int().tolist()
    assert updates == [(accepted, [len(prompt) + n + 1 for prompt, n in zip(PROMPTS, accepted, strict=True)])]


def test_the_uniforms_of_a_batch_are_those_of_its_gamma() -> None:
    made, expected = chain_batch().uniforms(7, [4, 2], 3), uniforms(7, [4, 2], 3, 2)
    for name in ("draft", "accept", "final"):
        assert torch.equal(getattr(made, name), getattr(expected, name))


@torch.inference_mode()
def test_a_step_marks_its_parts_and_runs_each_through_its_wrapper() -> None:
    batch, seen = chain_batch(), []

    def named(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda function: lambda *tensors: seen.append(name) or function(*tensors)

    batch.clear([])
    batch.enter([0, 1, 2], PROMPTS, uniforms(0, range(3), 5, 2), 5)
    for part in ("draft", "target", "rest"):
        batch.wrap(named(part), part)
    batch.step_in_parts(lambda part: seen.append(f"{part} ended"))
    assert seen == ["draft", "draft ended", "target", "target ended", "rest"]
    seen.clear()
    batch.wrap(named("outer"), "draft", "step")
    batch.step()
    assert seen == ["outer", "outer", "draft", "target", "rest"]
    assert batch.state.steps.tolist() == [2, 2, 2]


@torch.inference_mode()
def test_without_a_drafter_nothing_is_proposed() -> None:
    draft_tokens, q = chain_batch(gamma=0).propose(torch.zeros(3, 0, dtype=torch.float64))
    assert (draft_tokens.shape, draft_tokens.dtype) == ((3, 0), torch.int64)
    assert (q.shape, q.dtype) == ((3, 0, 4), torch.float32)


@torch.inference_mode()
def test_the_target_runs_over_the_newest_token_and_the_draft_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was proposed, or what is not in the vocabulary, it runs over the nearest token."""
    batch = chain_batch()
    batch.state.tokens.copy_(torch.arange(3 * 24).reshape(3, 24) % 4)
    batch.state.lengths.copy_(torch.tensor([1, 4, 6]))
    given: list[Any] = []
    monkeypatch.setattr(batch.runner, "run", lambda *inputs, **named: given.append((*inputs, named)))
    batch.run_target(torch.tensor([[1, -1], [3, 4], [9, 0]]))
    ((tokens, slots, named),) = given
    assert tokens.tolist() == [[0, 1, 0], [3, 3, 3], [1, 3, 0]]
    assert slots.tolist() == [[0, 1, 2], [3, 4, 5], [5, 6, 7]]
    assert named == {"keep": 3}


@pytest.mark.parametrize("rule", [token_verification, exact_match], ids=lambda rule: rule.__name__)
@torch.inference_mode()
def test_a_step_is_verified_and_recorded_as_the_rule_says(rule: Rule) -> None:
    """Logits at random: tokens, record, distributions and the step's count, against the rule called by itself."""
    sampling = Sampling(0.8, top_k=3)
    batch = chain_batch(rule=rule, sampling=sampling, ends=1)
    state, chance = batch.state, torch.Generator().manual_seed(1)
    batch.clear([2])
    batch.enter([0, 1, 2], [[1, 2], [3], [0, 0, 1]], uniforms(4, range(3), 5, 2), 5)
    state.record_probs(4, torch.float64)
    logits = torch.randn(3, 3, 4, generator=chance, dtype=torch.float64)
    q = torch.softmax(torch.randn(3, 2, 4, generator=chance), dim=-1)
    draft_tokens = torch.tensor([[0, 1], [3, 0], [1, -1]])
    q[2, 1] = 0
    accept, final = state.step_uniforms[:, 2:4].clone(), state.step_uniforms[:, 4].clone()
    assert all(torch.equal(*pair) for pair in zip(batch.verification_uniforms(), (accept, final), strict=True))
    p = standardise(logits, sampling)
    expected = rule(p, q, draft_tokens, accept, final)
    outcome = batch.verify_and_emit(logits, draft_tokens, q)
    assert all(torch.equal(*pair) for pair in zip(outcome, expected, strict=True))
    for row, (accepted, token) in enumerate(zip(*(one.tolist() for one in expected), strict=True)):
        new, left = emitted_by_hand(draft_tokens[row].tolist(), accepted, token, 5, [2])
        start = int(state.starts[row])
        assert state.tokens[row, start : start + len(new)].tolist() == new
        assert int(state.remaining[row]) == int(state.status[row]) == left
        beta = np.minimum(p[row, :2].numpy(), q[row].numpy()).sum(axis=1)
        recorded = state.record[row, 0].tolist()
        assert recorded[:5] == [*draft_tokens[row].tolist(), accepted, token, len(new)]
        assert recorded[5:] == pytest.approx(beta, abs=1e-12)
        assert state.probs is not None
        assert torch.equal(state.probs[row, :3], p[row])
    assert torch.equal(state.step_uniforms, state.uniforms[:, 1])
    assert state.steps.tolist() == [1, 1, 1]
    assert not state.has_nan.any()
    assert not state.improper.any()


@torch.inference_mode()
def test_nan_is_found_in_any_distribution_of_the_target_or_the_draft() -> None:
    """One row each: before the first and the second draft token, after the last, in q at each; and none."""
    batch = chain_batch(rows=6)
    batch.clear([])
    batch.enter(list(range(6)), [[1]] * 6, uniforms(0, range(6), 5, 2), 5)
    logits, q = torch.zeros(6, 3, 4), torch.full((6, 2, 4), 0.25)
    for row in range(3):
        logits[row, row, 2] = torch.nan
    for row in (3, 4):
        q[row, row - 3, 1] = torch.nan
    batch.verify_and_emit(logits, torch.ones(6, 2, dtype=torch.int64), q)
    assert batch.state.has_nan.tolist() == [True] * 5 + [False]
    assert batch.state.status[:5].tolist() == [NAN] * 5
    assert not batch.state.improper.any()
    batch.state.remaining.fill_(5)
    batch.verify_and_emit(torch.zeros(6, 3, 4), torch.ones(6, 2, dtype=torch.int64), torch.full((6, 2, 4), 0.25))
    assert batch.state.has_nan.tolist() == [True] * 5 + [False], "a later step does not forget it"


def of_sums(*sums: float) -> Tensor:
    """A q of four tokens for each of two draft tokens, `(1, 2, 4)`, with these sums."""
    return torch.tensor(sums)[None, :, None].expand(1, 2, 4) / 4


@pytest.mark.parametrize(
    ("draft_tokens", "q", "improper"),
    [
        ([1, 3], of_sums(1, 1), False),
        ([0, -1], of_sums(1, 0), False),
        ([-1, -1], of_sums(0, 0), False),
        ([-1, -1], torch.tensor([[[1e-4, 0, 0, 0], [0, 0, 0, 1e-4]]], dtype=torch.float64), False),
        ([1, 3], of_sums(1 + 9e-5, 1 - 9e-5), False),
        ([1, 3], of_sums(1, 1 + 1.2e-4), True),
        ([1, 3], of_sums(1 - 1.2e-4, 1), True),
        ([0, -1], of_sums(0, 0), True),
        ([0, -1], of_sums(1, 1), True),
        ([1, 4], of_sums(1, 1), True),
        ([-2, 1], of_sums(0, 1), True),
        ([1, 3], of_sums(1, 1) + torch.tensor([-0.25, 0.25, 0, 0]), False),
        ([1, 3], of_sums(1, 1) + torch.tensor([-0.26, 0.26, 0, 0]), True),
    ],
)
@torch.inference_mode()
def test_a_proposal_is_proper_if_q_is_a_distribution_where_there_is_a_token(
    draft_tokens: list[int], q: Tensor, improper: bool
) -> None:
    """Rows with 1 token to come, none, and 5 for which nothing is wrong; each is marked for itself, and for good."""
    batch = chain_batch()
    batch.state.remaining.copy_(torch.tensor([1, 0, 5]))
    tokens = torch.tensor([draft_tokens, draft_tokens, [1, 1]])
    known = batch.checked(tokens, torch.cat([q, q, of_sums(1, 1)]))
    assert known.tolist() == [[min(max(token, -1), 3) for token in row] for row in tokens.tolist()]
    assert batch.state.improper.tolist() == [improper, False, False]
    batch.checked(torch.tensor([[1, 1]] * 3), of_sums(1, 1).expand(3, 2, 4))
    assert batch.state.improper.tolist() == [improper, False, False]


@torch.inference_mode()
def test_an_improper_proposal_is_marked_in_the_step_that_verifies_it() -> None:
    batch = chain_batch()
    batch.clear([])
    batch.enter([0, 1, 2], PROMPTS, uniforms(0, range(3), 5, 2), 5)
    q = of_sums(1, 1).repeat(3, 1, 1)
    q[1] *= 2
    batch.verify_and_emit(torch.zeros(3, 3, 4), torch.tensor([[0, 1], [0, 1], [0, 4]]), q)
    assert batch.state.improper.tolist() == [False, True, True]
    assert batch.state.status.tolist()[1:] == [IMPROPER, IMPROPER]
    assert batch.state.record[2, 0, :2].tolist() == [0, 3], "clamped, so that a rule can index by it"


@torch.inference_mode()
def test_proposals_and_outcomes_are_checked_in_every_step() -> None:
    class Short(TableDrafter):
        def propose(self, context: Context, uniforms: Tensor) -> Proposal:
            return Proposal(*(one[:, :1] for one in super().propose(context, uniforms)))

    batch = chain_batch(drafter=Short(torch.full((4, 4), 0.25)))
    batch.state.lengths.fill_(1)
    with pytest.raises(ValueError, match=re.escape("shapes ((3, 1), (3, 1, 4)); they must be ((3, 2), (3, 2, 4))")):
        batch.propose(torch.zeros(3, 2, dtype=torch.float64))
    batch = chain_batch(rule=lambda p, *others: None)
    with pytest.raises(TypeError, match="the rule returned a NoneType"):
        batch.verify_and_emit(torch.zeros(3, 3, 4), torch.zeros(3, 2, dtype=torch.int64), of_sums(1, 1).repeat(3, 1, 1))


class Bar:
    """Stands for tqdm: what it was made with, and by how much it was moved."""

    def __init__(self, **settings: Any) -> None:
        self.settings, self.n, self.moves = settings, 0, 0

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *_: object) -> None:
        return

    def update(self, by: int = 1) -> None:
        self.n, self.moves = self.n + by, self.moves + 1


@pytest.mark.parametrize("progress", [False, True])
@torch.inference_mode()
def test_warming_up_makes_two_steps_and_shows_the_three_parts_of_the_first(
    progress: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars: list[Bar] = []
    monkeypatch.setattr(step, "tqdm", lambda **settings: bars.append(Bar(**settings)) or bars[0])
    batch, ran = chain_batch(ends=2), []
    batch.wrap(lambda whole: lambda: ran.append("whole") or whole(), "step")
    batch.wrap(lambda rest: lambda *tensors: ran.append("rest") or rest(*tensors), "rest")
    batch.warm_up(progress)
    assert ran == ["rest", "whole", "rest"]
    assert not batch.cold
    # One token after two of the only token that every vocabulary has.
    assert (batch.state.starts.tolist(), batch.state.lengths.tolist()) == ([2, 2, 2], [3, 3, 3])
    assert not batch.state.tokens[:, :2].any()
    assert not batch.state.eos.any()
    assert not batch.state.has_nan.any()
    (bar,) = bars
    assert bar.settings.pop("desc").startswith("compiling")
    assert bar.settings == {"total": 3, "leave": False, "disable": not progress}
    assert (bar.n, bar.moves) == (3, 3)


def test_torch_s_default_device_makes_no_difference_to_a_step() -> None:
    """Every tensor of a step is made on the model's device."""
    batch, other = chain_batch(ends=1), chain_batch(ends=1)
    own = uniforms(0, range(3), 5, 2)
    again = Uniforms(own.draft[:2], own.accept[:2], own.final[:2])
    with torch.inference_mode():
        for one, default in ((batch, "cpu"), (other, "meta")):
            one.clear([2])
            with torch.device(default):
                one.enter([0, 1, 2], PROMPTS, own, 5)
                one.step()
                one.enter([2, 0], PROMPTS[:2], again, 5)
                one.step()
                one.state.completed_rows([1])
    assert torch.equal(other.state.tokens, batch.state.tokens)
    assert torch.equal(other.state.record, batch.state.record)


# What drafters and rules may not return: the complete messages.

DRAFTED, Q = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, 5)


@pytest.mark.parametrize(
    ("proposal", "error", "message"),
    [
        (None, TypeError, "a drafter proposed a NoneType; it must return a Proposal(draft_tokens, q)"),
        ([DRAFTED, Q], TypeError, "a drafter proposed a list; it must return a Proposal(draft_tokens, q)"),
        ((DRAFTED, Q, Q), TypeError, "a drafter proposed a tuple; it must return a Proposal(draft_tokens, q)"),
        ((DRAFTED, [0.5]), TypeError, "a drafter proposed Tensor and list; both must be tensors"),
        (([0], Q), TypeError, "a drafter proposed list and Tensor; both must be tensors"),
        (
            (DRAFTED[:1], Q),
            ValueError,
            "a drafter proposed tokens and q of the shapes ((1, 3), (2, 3, 5)); they must be ((2, 3), (2, 3, 5))",
        ),
        (
            (DRAFTED, Q[..., :4]),
            ValueError,
            "a drafter proposed tokens and q of the shapes ((2, 3), (2, 3, 4)); they must be ((2, 3), (2, 3, 5))",
        ),
        (
            (DRAFTED.int(), Q),
            TypeError,
            "a drafter proposed torch.int32 and torch.float32; tokens are int64, and q float32 or float64",
        ),
        (
            (DRAFTED, Q.half()),
            TypeError,
            "a drafter proposed torch.int64 and torch.float16; tokens are int64, and q float32 or float64",
        ),
    ],
)
def test_a_proposal_that_is_none_is_refused_with_what_it_is(proposal: Any, error: type, message: str) -> None:
    with pytest.raises(error) as caught:
        require_shapes(proposal, rows=2, gamma=3, vocab=5)
    assert str(caught.value) == message


def test_a_proposal_of_either_dtype_is_accepted_also_as_a_plain_tuple() -> None:
    for q in (Q, Q.double()):
        require_shapes((DRAFTED, q), rows=2, gamma=3, vocab=5)  # type: ignore[arg-type]


ROWS = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    ("outcome", "given"),
    [
        (None, "a NoneType with accepted and token ['NoneType', 'NoneType']"),
        ((ROWS, ROWS), "a tuple with accepted and token ['NoneType', 'NoneType']"),
        (
            Outcome(ROWS.float(), ROWS),
            "a Outcome with accepted and token [((2,), torch.float32), ((2,), torch.int64)]",
        ),
        (
            Outcome(ROWS, ROWS[:1]),
            "a Outcome with accepted and token [((2,), torch.int64), ((1,), torch.int64)]",
        ),
        (
            TreeOutcome([0, 1], ROWS[:, None], ROWS),  # type: ignore[arg-type]
            "a TreeOutcome with accepted and token ['list', ((2, 1), torch.int64)]",
        ),
    ],
    ids=["none", "tuple", "float", "rows", "tree"],
)
def test_an_outcome_that_is_none_is_refused_with_what_it_has(outcome: Any, given: str) -> None:
    with pytest.raises(TypeError) as caught:
        require_outcome(outcome, rows=2)
    wanted = "it must return an Outcome of two int64 tensors of the shape (2,)"
    assert str(caught.value) == f"the rule returned {given}; {wanted}"


def test_an_outcome_of_a_chain_or_a_tree_is_accepted() -> None:
    for outcome in (Outcome(ROWS, ROWS), TreeOutcome(ROWS, ROWS, ROWS[:, None])):
        require_outcome(outcome, rows=2)
