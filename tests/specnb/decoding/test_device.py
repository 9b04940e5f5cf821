"""The CUDA path on the simulated device: the tokens of the CPU, steps that wait for nothing, and faults that are noticed.

Times, and the rounding of a GPU, are not tested; `test_generate.py` compares with a real one where there is one.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import cuda_guard
import drafter_kinds
import numpy as np
import pytest
import torch
from drafter_kinds import CHAINS, DEEP, HIERARCHICAL, TREES, VOCAB, gamma_of, table
from simulated_cuda import SimulatedCuda, simulated_cuda
from tiny import ARCHITECTURES, llama, mistral, near_copy, neox, qwen2, roomy_pair, without_tokenizer
from transformers import (
    BartConfig, BartForConditionalGeneration, PreTrainedModel, T5Config, T5ForConditionalGeneration,
)  # fmt: skip

import specnb
from specnb import rules
from specnb.beam import beam_search
from specnb.decoding import generate as loop
from specnb.decoding.generate import FIXED, Generation, Study, forget_compiled, generate
from specnb.decoding.scheduler import ProgressReader
from specnb.decoding.step import Batch
from specnb.distributions import Sampling
from specnb.drafting.base import Context, Drafter, Proposal
from specnb.drafting.model import TreeDrafter
from specnb.drafting.ngram import PromptLookupDrafter
from specnb.measure.acceptance import measure_acceptance
from specnb.measure.cost import measure_costs
from specnb.measure.timing import machine
from specnb.models import compilation, loading
from specnb.models.compilation import Captured
from studies.drafters.stopping_rules import TableDrafter

PROMPTS = ([0], [3, 1], [2, 0, 1, 3])
COMMON: dict[str, Any] = {"max_new_tokens": 8, "seed": 1, "eos": [1], "batch_size": 2, "progress": False}
ALL = CHAINS | HIERARCHICAL | TREES
WAITING = {"suffix", "suffix, proportional", "trigram, backing off", "skip-gram", *HIERARCHICAL}
WAITING |= {name for name in ALL if name.startswith("copy, otherwise") and name != "copy, otherwise a table"}
"""Their steps wait for the device, as their docstrings say: tables on the host, or a choice made there."""
REPLACING = {name for name in ALL if "bandit" in name}
"""They make new tensors at `start`, so that no graph can hold their operations."""


@pytest.fixture
def device() -> Iterator[SimulatedCuda]:
    if reason := cuda_guard.reason_to_skip():
        pytest.skip(reason)
    with simulated_cuda() as simulated, torch.inference_mode():
        yield simulated
        forget_compiled()


@pytest.fixture
def steps(device: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, str]]]:
    """The log of the device in each step, from now on."""
    logs: list[list[tuple[str, str]]] = []
    step = Batch.step

    def logged(batch: Batch) -> None:
        before = len(device.log)
        step(batch)
        logs.append(device.log[before:])

    monkeypatch.setattr(Batch, "step", logged)
    return logs


def placed(model: Any) -> Any:
    """A copy of the model on the device."""
    return copy.deepcopy(model).to("cuda")


@cache
def target() -> PreTrainedModel:
    return llama(dtype=torch.float64)


def draft() -> PreTrainedModel:
    return near_copy(target(), noise=0.2)


@cache
def on_the_cpu(name: str) -> Generation:
    drafter = ALL[name]()
    return generate(target(), PROMPTS, drafter, gamma=gamma_of(drafter), **COMMON)


def require_equal(made: Generation, expected: Generation) -> None:
    assert made.tokens == expected.tokens
    width = expected.record.gamma
    assert np.array_equal(made.record.draft_tokens[..., :width], expected.record.draft_tokens)
    assert np.allclose(made.record.beta[..., :width], expected.record.beta, rtol=0, atol=1e-6)  # drafts are float32


# Every drafter


@pytest.mark.parametrize("name", ALL)
def test_tokens_are_those_of_the_cpu_and_a_step_waits_for_nothing(
    name: str, steps: list[list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_the_cpu(name)
    monkeypatch.setattr(drafter_kinds, "DEVICE", "cuda")
    drafter = ALL[name]()
    require_equal(generate(placed(target()), PROMPTS, drafter, gamma=gamma_of(drafter), **COMMON), expected)
    kinds = {kind for log in steps for kind, _ in log}
    assert ("read" in kinds) == (name in WAITING)
    assert name in WAITING or kinds == {"launch"}


@pytest.mark.parametrize("name", [name for name in ALL if name not in WAITING | REPLACING])
def test_a_captured_step_is_one_replay_with_the_tokens_of_the_cpu(
    name: str, steps: list[list[tuple[str, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = on_the_cpu(name)
    monkeypatch.setattr(drafter_kinds, "DEVICE", "cuda")
    drafter = ALL[name]()
    drafter.capturable = True
    made = generate(placed(target()), PROMPTS, drafter, gamma=gamma_of(drafter), compile="graph", **COMMON)
    require_equal(made, expected)
    captured, *replayed = steps
    assert len(captured) > 100
    assert all(log == [("replay", "a graph")] for log in replayed)
