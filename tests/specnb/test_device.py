"""The CUDA path: the tokens of the CPU, steps that wait for nothing, faults that are noticed.

On a simulated device, or on a real one where there is one; only the simulated one counts
operations. Times are not tested.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any

import cuda_guard
import drafter_kinds
import numpy as np
import pytest
import torch
from drafter_kinds import CHAINS, DEEP, DEPTH_2, HIERARCHICAL, TREES, VOCAB, TableDrafter, gamma_of, table
from real_cuda import RealCuda
from simulated_cuda import Event, SimulatedCuda, simulated_cuda
from tiny import ARCHITECTURES, llama, mistral, near_copy, neox, qwen2, roomy_pair, without_tokenizer
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

import specnb
from specnb import check, rules
from specnb.acceptance import measure_acceptance
from specnb.beam import beam_search
from specnb.copies import PromptLookupDrafter
from specnb.cost import measure_costs
from specnb.distributions import Sampling
from specnb.drafters import Context, ModelDrafter, TreeDrafter
from specnb.fast import Captured
from specnb.record import Generation
from specnb.sampler import Instruments, Sampler, generate
from specnb.statistics import BOUNDS, machine
from specnb.step import Batch, ProgressReader
from studies.drafters.tables import MixtureDrafter, UniformDrafter

PROMPTS = ([0], [3, 1], [2, 0, 1, 3])
ASKED: dict[str, Any] = {"max_new_tokens": 5, "seed": 1, "eos": [2], "batch_size": 2}
COMMON = ASKED | {"check": False, "progress": False}
ALL = CHAINS | HIERARCHICAL | TREES
WAITING = {"trigram", *HIERARCHICAL}
"""Their steps wait for the device, as their docstrings say: tables are on the host."""


@pytest.fixture
def any_device() -> Iterator[SimulatedCuda | RealCuda]:
    """A real device, or the simulated one."""
    if torch.cuda.is_available():
        with torch.inference_mode():
            yield RealCuda()
        return
    if reason := cuda_guard.reason_to_skip():
        pytest.skip(reason)
    with simulated_cuda() as simulated, torch.inference_mode():
        yield simulated


@pytest.fixture
def device(any_device: SimulatedCuda | RealCuda) -> SimulatedCuda:
    """The simulated one."""
    if isinstance(any_device, RealCuda):
        pytest.skip("there is a real device")
    return any_device


Log = list[tuple[str, str]]


@pytest.fixture
def steps(any_device: SimulatedCuda | RealCuda, monkeypatch: pytest.MonkeyPatch) -> list[Log]:
    """What the device logs in each step, from now on."""
    logs: list[Log] = []
    make = Batch.step

    def logged(batch: Batch, mark: Any = None) -> None:
        assert len(logs) < 50, "the host does not learn that all rows have ended"
        before = len(any_device.log)
        with any_device.watched(batch) if isinstance(any_device, RealCuda) else nullcontext():
            make(batch, mark)
        logs.append(any_device.log[before:])

    monkeypatch.setattr(Batch, "step", logged)
    return logs


def kinds(logs: Iterable[Log]) -> set[str]:
    return {kind for log in logs for kind, _ in log}


@cache
def target() -> PreTrainedModel:
    return llama(dtype=torch.float64)


@cache
def draft() -> PreTrainedModel:
    return near_copy(target(), noise=0.2)


@cache
def placed(model: PreTrainedModel) -> Any:
    """A copy of the model on the device."""
    return copy.deepcopy(model).to("cuda")  # type: ignore[arg-type]  # the stub takes no name


def on_the_cpu(*given: Any, **settings: Any) -> Generation:
    """What `generate` returns without the simulation."""
    with _disable_current_modes():
        return generate(*given, **settings)


@cache
def of_kind(name: str) -> Generation:
    """With that drafter, on the CPU."""
    drafter = ALL[name]()
    return on_the_cpu(target(), PROMPTS, drafter, gamma=gamma_of(drafter), **COMMON)


def bound(simulated: float) -> float:
    """How far a number may lie from the CPU's. On a real device sums have another order, in float32
    in places."""
    return BOUNDS[1] if torch.cuda.is_available() else simulated


def require_equal(made: Generation, expected: Generation) -> None:
    assert made.tokens == expected.tokens
    width = expected.record.gamma
    assert np.array_equal(made.record.draft_tokens[..., :width], expected.record.draft_tokens)
    difference = np.abs(made.record.beta[..., :width] - expected.record.beta).max(initial=0)
    assert difference < bound(1e-6)  # drafts are float32


# Every drafter


@pytest.mark.parametrize("name", ALL)
def test_tokens_are_those_of_the_cpu_and_a_step_waits_for_nothing(
    name: str, steps: list[Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = of_kind(name)
    steps.clear()
    monkeypatch.setattr(drafter_kinds, "DEVICE", "cuda")
    drafter = ALL[name]()
    require_equal(generate(placed(target()), PROMPTS, drafter, gamma=gamma_of(drafter), **COMMON), expected)
    assert ("read" in kinds(steps)) == (name in WAITING)
    assert name in WAITING or kinds(steps) == {"launch"}


@pytest.mark.parametrize("name", [name for name in ALL if name not in WAITING])
def test_a_captured_step_is_one_replay_with_the_tokens_of_the_cpu(
    name: str, steps: list[Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = of_kind(name)
    steps.clear()
    monkeypatch.setattr(drafter_kinds, "DEVICE", "cuda")
    drafter = ALL[name]()
    drafter.capturable = True
    common = COMMON | {"compile": "auto", "check": True}
    made = generate(placed(target()), PROMPTS, drafter, gamma=gamma_of(drafter), **common)
    require_equal(made, expected)
    assert len(steps) > 3
    assert steps[1:] == [[("replay", "a graph")]] * len(steps[1:])  # after the one that captures


# Every setting


RULES = {
    "token": rules.token_verification,
    "exact match": rules.exact_match,
    "rejection sampling": rules.rejection_sampling,
    "lenient": rules.lenient_verification(0.5),
    "lenient, greedy": rules.lenient_greedy_verification(0.5),
    "block or traversal": rules.traversal_verification,
}
SAMPLINGS = (Sampling(0.7, top_k=3, top_p=0.9), Sampling(0))


class Checked(Captured):
    """Captures again before each replay, and compares: what the host would do now has to be what
    the graph does."""

    def __call__(self, *tensors: torch.Tensor) -> Any:
        if self.version() in self.graphs:
            graph, inputs, _ = self.graphs[self.version()]
            for captured, given in zip(inputs, tensors, strict=True):
                captured.copy_(given)
            graph.require_current(lambda: self.function(*inputs))  # type: ignore[attr-defined]
        return super().__call__(*tensors)


@pytest.fixture
def checked(any_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(any_device, RealCuda):
        monkeypatch.setattr("specnb.step.Captured", Checked)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("parents", [None, DEPTH_2], ids=["chain", "tree"])
def test_every_rule(name: str, parents: tuple[int, ...] | None, any_device: Any) -> None:
    def drafter(model: PreTrainedModel) -> Any:
        return model if parents is None else TreeDrafter(model, parents, capturable=True)

    common = COMMON | {"gamma": len(parents or "123"), "rule": RULES[name]}
    expected = on_the_cpu(target(), PROMPTS, drafter(draft()), **common)
    made = generate(placed(target()), PROMPTS, drafter(placed(draft())), compile="auto", **common)
    require_equal(made, expected)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_every_sampling(sampling: Sampling, any_device: Any, checked: None) -> None:
    models = placed(target()), placed(draft())
    common = COMMON | {"gamma": 2, "sampling": sampling}
    expected = on_the_cpu(target(), PROMPTS, draft(), **common)
    for compile in (False, "auto"):
        require_equal(generate(models[0], PROMPTS, models[1], compile=compile, **common), expected)


@pytest.mark.parametrize("make", [*ARCHITECTURES.values(), neox, qwen2, mistral], ids=lambda make: make.__name__)
def test_every_architecture(make: Callable[..., PreTrainedModel], any_device: Any, checked: None) -> None:
    """A window of two tokens in the last one."""
    model = make(dtype=torch.float64)
    tree = drafter_kinds.TableTreeDrafter(drafter_kinds.TWO_DRAFTS)
    expected = on_the_cpu(model, PROMPTS, tree, gamma=2, **COMMON)
    tree.table = tree.table.to("cuda")
    for compile in (False, "auto"):
        common = COMMON | {"compile": compile, "check": True}
        require_equal(generate(placed(model), PROMPTS, tree, gamma=2, **common), expected)


def test_a_sampler_s_graph_serves_other_prompts_seeds_and_ends(any_device: Any, checked: None) -> None:
    sampler = Sampler(placed(target()), placed(draft()), gamma=3, progress=False)
    batches = []
    for seed, eos in ((1, [2, 0]), (2, [3, 1]), (1, [2, 0])):
        asked = ASKED | {"seed": seed, "eos": eos, "max_new_tokens": 3 + seed}
        expected = on_the_cpu(target(), PROMPTS[::-1], draft(), gamma=3, progress=False, **asked)
        require_equal(sampler.generate(PROMPTS[::-1], **asked), expected)
        batches.append(sampler.batch)
    assert batches == batches[:1] * 3


@pytest.mark.parametrize("compile", [False, "auto"])
@pytest.mark.parametrize("name", ["model", "EAGLE-3 head", "tree of a model"])
def test_a_step_reads_few_slots_and_all_in_use(
    name: str, compile: Any, any_device: Any, checked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More as sequences grow, and fewer when a later call begins."""
    asked: dict[str, Any] = {"max_new_tokens": 11, "seed": 1, "batch_size": 2}
    expected = on_the_cpu(target(), PROMPTS, ALL[name](), gamma=gamma_of(ALL[name]()), progress=False, **asked)
    for constant, value in (("cache.SEEN_MULTIPLE", 4), ("cache.LEAST_SLOTS", 4), ("sampler.SLOT_MULTIPLE", 4)):
        monkeypatch.setattr(f"specnb.{constant}", value)
    monkeypatch.setattr("specnb.sampler.LEAST_SLOTS", 4)
    monkeypatch.setattr(drafter_kinds, "DEVICE", "cuda")
    read: list[int] = []
    make = Batch.step

    def watched(batch: Batch, mark: Any = None) -> None:
        going = batch.state.remaining > 0
        longest = int((batch.state.lengths * going).max())
        make(batch, mark)
        assert batch.bound.seen >= longest + batch.state.gamma
        read.append(batch.bound.seen)

    monkeypatch.setattr(Batch, "step", watched)
    drafter = ALL[name]()
    drafter.capturable = True
    sampler = Sampler(placed(target()), drafter, gamma=gamma_of(drafter), compile=compile, progress=False)
    for _ in range(2):
        read.clear()
        assert sampler.generate(PROMPTS, **asked).tokens == expected.tokens
        assert read[0] < max(read)


@pytest.mark.parametrize("drafter", [draft, lambda: PromptLookupDrafter(VOCAB, shortest=1)], ids=["model", "copies"])
def test_what_torch_compiles(
    drafter: Callable[[], Any], any_device: Any, steps: list[Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time in the tensors of the first. On the simulated device, what torch would compile
    is run as it is."""
    if not isinstance(any_device, RealCuda):
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    made = drafter()
    there = placed(made) if isinstance(made, PreTrainedModel) else made
    sampler = Sampler(placed(target()), there, gamma=3, compile=True, progress=False)
    for seed in (8, 9):
        asked = ASKED | {"seed": seed}
        expected = on_the_cpu(target(), PROMPTS, made, gamma=3, progress=False, **asked)
        steps.clear()
        require_equal(sampler.generate(PROMPTS, **asked), expected)
    assert kinds(steps) == {"replay"}
    assert sampler.private.compiled is not None
    assert sampler.private.compiled.ready


@pytest.mark.parametrize("compile", [False, "auto", True])
def test_parts_of_steps_are_timed(compile: Any, any_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part is a graph of its own. What torch would compile is run as it is."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    asked = ASKED | {"max_new_tokens": 10, "eos": None}
    common: dict[str, Any] = {"gamma": len(DEEP), "check": False, "progress": False}
    common["instruments"] = Instruments(timed=True)
    expected = on_the_cpu(target(), PROMPTS, TreeDrafter(draft(), DEEP), **common, **asked)
    for slots in (None, 600):  # of which one number is captured, and two
        drafter = TreeDrafter(placed(draft()), DEEP, capturable=True)
        made = Sampler(placed(target()), drafter, compile=compile, slots=slots, **common).generate(PROMPTS, **asked)
        require_equal(made, expected)
        assert all(len(seconds) >= made.record.target_passes.max() for seconds in made.record.seconds.values())


@pytest.mark.parametrize("compile", [False, "auto"])
def test_traces_and_distributions_are_those_of_the_cpu_and_nothing_is_read_for_them(
    compile: Any, steps: list[Log]
) -> None:
    common = COMMON | {"gamma": 3, "instruments": Instruments(trace=True, keep_probs=True)}
    expected = on_the_cpu(target(), PROMPTS, draft(), **common)
    steps.clear()
    made = generate(placed(target()), PROMPTS, placed(draft()), compile=compile, **common)
    assert made.record.trace is not None
    assert expected.record.trace is not None
    np.testing.assert_allclose(made.record.trace, expected.record.trace, rtol=0, atol=bound(1e-12))
    for own, other in zip(made.probs or [], expected.probs or [], strict=True):
        assert own.device.type == "cuda"
        assert torch.allclose(own.cpu(), other, rtol=0, atol=bound(1e-12))
    assert kinds(steps[1:]) == {"replay" if compile else "launch"}


def test_a_graph_keeps_its_drafter(any_device: Any) -> None:
    """With another cache in the drafter, the graph would go on with memory that is somebody
    else's."""
    drafter = ModelDrafter(placed(draft()), capturable=True)
    generate(placed(target()), PROMPTS, drafter, gamma=2, compile="auto", **COMMON)
    with pytest.raises(ValueError, match="make another drafter"):
        generate(placed(target()), PROMPTS, drafter, gamma=2, **COMMON)


def test_a_mixture_is_captured_if_both_parts_can_be() -> None:
    copies = PromptLookupDrafter(VOCAB, shortest=1)
    for capturable in (True, False):
        model = ModelDrafter(draft(), capturable=capturable)
        assert MixtureDrafter(copies, model, 0.5).capturable == capturable


# Everything else that runs on a device


def test_beam_search(any_device: Any) -> None:
    common: dict[str, Any] = {"width": 2, "draft_width": 3, "gamma": 2, "max_new_tokens": 5, "progress": False}
    for model in (None, draft()):
        expected = beam_search(target(), [2, 0], model, eos=1, **common)
        own = None if model is None else placed(model)
        made = beam_search(placed(target()), [2, 0], own, eos=1, **common)
        assert made.tokens == expected.tokens


def test_costs_are_measured_on_captured_passes(device: SimulatedCuda) -> None:
    pair = roomy_pair()
    pair = without_tokenizer(placed(pair.target), placed(pair.draft))
    for compile in (False, "auto"):
        costs = measure_costs(pair, context=3, lengths=(1, 2), repetitions=3, compile=compile, progress=False)
        assert (costs.target.shape, costs.draft.shape) == ((3, 2), (3,))
    assert device.counts()["replay"] > 0
    assert machine(torch.device("cuda")) == "simulated"


def test_acceptance_is_measured(any_device: Any) -> None:
    models = (target(), draft())
    found = [
        measure_acceptance(one, PROMPTS, other, new_tokens=5, progress=False)
        for one, other in (models, map(placed, models))
    ]
    assert np.allclose(found[0].beta["draft"], found[1].beta["draft"], rtol=0, atol=bound(1e-12))


def test_a_model_in_16_bits_is_compared_by_a_copy_in_32(device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    model = placed(llama(dtype=torch.bfloat16))
    monkeypatch.setattr(check, "ROUNDING", -1.0)  # no difference is too small for it
    monkeypatch.setattr(check, "DISAGREEING", -1.0)
    monkeypatch.setattr(check.Rounding, "most", lambda rounding, places: 1e-5)
    compared = check.Check(model, gamma=3)
    compared.new_batch(model, slots=16)
    assert compared.copy is not None
    assert (compared.copy.dtype, compared.copy.device) == (torch.float32, model.device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))
    compared = check.Check(model, gamma=3)
    with pytest.warns(RuntimeWarning, match="not resolved below"):
        compared.new_batch(model, slots=16)
    assert compared.copy is None


def test_a_pair_is_loaded_to_the_device(any_device: Any) -> None:
    pair = specnb.load_pair(device="cuda")
    assert {pair.target.device.type, pair.draft.device.type} == {"cuda"}
    assert len(generate(pair.target, [[1, 2]], pair.draft, max_new_tokens=3, progress=False).tokens[0]) == 3


LAUNCHES = {None: 203, "table": 290, "prompt lookup": 279, "model": 660, "tree of a model": 660}
"""The most operations of an eager step, 5% above what there were: models of two layers, gamma 3, a
tree of 5 nodes."""


@pytest.mark.parametrize("compile", [False, "auto"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_the_host_calls_few_operations_and_reads_once_a_step(
    name: str | None, compile: Any, device: SimulatedCuda, steps: list[Log], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The status is copied to pinned memory between steps; nothing else happens there."""
    monkeypatch.setattr(drafter_kinds, "DEVICE", "cuda")
    drafter = None if name is None else ALL[name]()
    if drafter is not None:
        drafter.capturable = True
    gamma = gamma_of(drafter) if drafter else 0
    sampler = Sampler(placed(target()), drafter, gamma=gamma, compile=compile, check=False, progress=False)
    for _ in range(2):  # the first time a graph is captured
        steps.clear()
        before = len(device.log)
        sampler.generate(PROMPTS, max_new_tokens=5)
    assert kinds(steps) == {"replay" if compile else "launch"}
    assert max(map(len, steps)) <= (1 if compile else LAUNCHES[name])
    expected = [entry for log in steps for entry in [*log, ("copy out", "aten.copy_.default")]]
    log = device.log[before:]
    start = next(at for at in range(len(log)) if log[at : at + len(steps[0])] == steps[0])
    assert log[start : start + len(expected)] == expected


# Faults


class Faulty(TableDrafter):
    """A drafter with `fault` in the place of a correct distribution."""

    capturable = True

    def __init__(self, fault: Callable[[Faulty, Context], torch.Tensor]) -> None:
        super().__init__(table().to("cuda"))
        self.fault, self.calls, self.offset = fault, 0, torch.tensor(0)

    def distribution(self, context: Context, position: int) -> torch.Tensor:
        self.calls += 1
        self.offset += 1
        return self.fault(self, context)


FAULTS: dict[str, tuple[Callable[[Any, Context], torch.Tensor], str, str]] = {
    "a value is read": (
        lambda self, context: self.table[context.newest] * (context.newest.sum().item() >= 0),
        "read",
        "read by aten._local_scalar_dense.default: not permitted while a graph is captured",
    ),
    "a mask chooses": (
        lambda self, context: self.table[context.newest][context.newest >= 0],
        "read",
        "read by aten.index.Tensor: not permitted",
    ),
    "an index is on the CPU": (
        lambda self, context: self.table[context.newest][:, torch.arange(VOCAB)],
        "copy in",
        "copy in by aten.index.Tensor: not permitted",
    ),
    "an index is a list": (
        lambda self, context: self.table[context.newest][:, [0, 1, 2, 3]],
        "copy in",
        "copy in by aten._to_copy.default: not permitted",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_a_step_is_logged_and_cannot_be_captured(name: str, device: SimulatedCuda, steps: list[Log]) -> None:
    fault, kind, message = FAULTS[name]
    model = placed(target())
    expected = on_the_cpu(target(), PROMPTS, TableDrafter(table()), gamma=2, **COMMON)
    require_equal(generate(model, PROMPTS, Faulty(fault), gamma=2, **COMMON), expected)
    assert kinds(steps) == {"launch", kind}
    with pytest.raises(RuntimeError, match=re.escape(message)):
        generate(model, PROMPTS, Faulty(fault), gamma=2, compile="auto", **COMMON)


def shifted(table: torch.Tensor, context: Context, by: Any) -> torch.Tensor:
    return table[(context.newest + by) % VOCAB]


CHANGES: dict[str, tuple[Callable[[Any, Context], torch.Tensor], str]] = {
    "a number": (lambda self, context: shifted(self.table, context, self.calls), "which would be"),
    "a tensor without dimensions": (
        lambda self, context: shifted(self.table, context, self.offset),
        "the graph was captured with the number ",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_number_that_changes_between_replays_is_noticed(name: str, device: SimulatedCuda, checked: None) -> None:
    """It changes with every call, and a graph keeps the one that it was captured with."""
    fault, message = CHANGES[name]
    with pytest.raises(RuntimeError, match=message):
        generate(placed(target()), PROMPTS, Faulty(fault), gamma=2, compile="auto", **COMMON)


class MadeAtStart(UniformDrafter):
    """Makes a new tensor for each call, so that no graph can hold its operations."""

    capturable = True

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        if rows is None:
            self.zeros = torch.zeros(len(context.lengths), self.vocab, device=context.lengths.device)

    def distribution(self, context: Context, position: int) -> Tensor:
        return super().distribution(context, position) + self.zeros


def test_memory_that_a_graph_uses_has_to_stay(device: SimulatedCuda) -> None:
    drafter = MadeAtStart(VOCAB)
    with pytest.raises(RuntimeError, match=r"the graph uses a tensor \(2, 4\) that no longer exists"):
        generate(placed(target()), PROMPTS, drafter, gamma=3, compile="auto", **COMMON)


@pytest.mark.parametrize("waits", [True, False])
def test_a_status_that_is_not_waited_for_is_not_the_one_copied(
    waits: bool, device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not waits:
        monkeypatch.setattr(Event, "synchronize", lambda event: None)
    state = SimpleNamespace(tokens=torch.zeros(1, device="cuda"), status=torch.full((2,), 5, device="cuda"))
    reader = ProgressReader(SimpleNamespace(state=state))  # type: ignore[arg-type]
    assert reader.read() is None
    for expected in ([5, 5], [4, 4]):
        state.status -= 1
        assert (reader.read() == expected) == waits
    reader.new = [1]
    assert (reader.read() == [3, 1]) == waits


# The simulation itself


def test_operands_on_two_devices_are_an_error(device: SimulatedCuda) -> None:
    there, here = torch.ones(2, device="cuda"), torch.ones(2)
    assert (there + torch.tensor(1.0)).tolist() == [2.0, 2.0]
    mixed: list[Callable[[], Any]] = [
        lambda: there + here, lambda: torch.cat([there, here]), lambda: here.index_select(0, there.long()),
    ]  # fmt: skip
    for mix in mixed:
        with pytest.raises(RuntimeError, match="of tensors on cuda:0 and cpu"):
            mix()
    with pytest.raises(RuntimeError, match="numpy"):
        there.numpy()


def test_afterwards_torch_is_as_it_was() -> None:
    if reason := cuda_guard.reason_to_skip():
        pytest.skip(reason)
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda) if not name.startswith("_")}
    with simulated_cuda():
        kept = torch.zeros(1, device="cuda")
        assert torch.cuda.Event is not before["Event"]
    assert {name: getattr(torch.cuda, name) for name in before} == before
    assert torch.tensor([1]).to(torch.float64).tolist() == [1.0]
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA"):
        torch.zeros(1, device="cuda")
    with pytest.raises(RuntimeError, match=r"outside simulated_cuda\(\)"):
        kept + 1
