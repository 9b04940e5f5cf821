"""A step can be captured: it does nothing on the host, and no shape depends on what was sampled; on any device."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from implementation_distribution import PROMPTS, SHARP
from tape import Tape, taped
from tiny import gpt2, llama, near_copy, neox, qwen2
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

from specnb.decoding import loop
from specnb.decoding.loop import generate
from specnb.decoding.step import Batch, State
from specnb.drafting.model import ModelDrafter
from specnb.sampling.distributions import Sampling
from specnb.sampling.randomness import uniforms
from specnb.sampling.verification import (
    Outcome,
    Rule,
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
        replayed = generate(target, PROMPTS, draft, **asked, eos=[2], batch_class=taped(Batch))
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
    assert generate(target, PROMPTS, draft, **asked, batch_class=Counting).tokens != plain.tokens


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
    compiled = generate(target, PROMPTS, draft, **asked, batch_class=Whole)
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
    captured = generate(target, PROMPTS, draft, **asked, batch_class=CapturedBatch)
    assert captured.tokens == plain.tokens
    assert (captured.record.accepted == plain.record.accepted).all()
    assert np.allclose(captured.record.beta, plain.record.beta, rtol=0, atol=1e-12)
