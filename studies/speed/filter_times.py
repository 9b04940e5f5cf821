"""Milliseconds of one thread from logits to a distribution, by the filters, beside the processors
of transformers.

Five rows of logits that are normal with standard deviation 3, float32, in vocabularies of 49,152
(SmolLM2) and 151,936 tokens (Qwen2.5). The hot setting keeps thousands of tokens. Times are those
of the thread alone, the smallest of `rounds` in which all take turns, so that other work on the
machine changes them little. `to_temperature` is the time in units of temperature alone,
`transformers_ms` that of its processors for the same settings and a softmax.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from specnb.distributions import Sampling, standardise
from studies.study import Study

ROWS, DEVIATION = 5, 3.0
SETTINGS = {
    "temperature": Sampling(0.7),
    "top-k": Sampling(0.7, top_k=20),
    "top-p": Sampling(0.7, top_p=0.8),
    "top-k and top-p": Sampling(0.7, top_k=20, top_p=0.8),
    "min-p": Sampling(0.7, min_p=0.05),
    "hot top-p": Sampling(1.5, top_p=0.8),
}


def of_transformers(sampling: Sampling, logits: Tensor) -> Tensor:
    """The distribution that its processors make of `logits` `(rows, vocab)`."""
    chain: Any = LogitsProcessorList([processors.TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k is not None:
        chain.append(processors.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(processors.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        chain.append(processors.MinPLogitsWarper(sampling.min_p))
    return torch.softmax(chain(None, logits), dim=-1)


def milliseconds(call: Callable[[], Tensor]) -> float:
    """Time of this thread."""
    start = time.thread_time()
    call()
    return 1e3 * (time.thread_time() - start)


def measure(item: str, rounds: int) -> Iterator[dict[str, Any]]:
    """The rows of one vocabulary. torch is set to one thread, and back afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logits = DEVIATION * torch.randn(ROWS, int(item), generator=torch.Generator().manual_seed(0))
    calls = [partial(standardise, logits, sampling) for sampling in SETTINGS.values()]
    calls += [partial(of_transformers, sampling, logits) for sampling in SETTINGS.values()]
    times = np.array([[milliseconds(call) for call in calls] for _ in range(rounds)]).min(axis=0)
    torch.set_num_threads(threads)
    own, theirs = times.reshape(2, -1).tolist()
    for name, sampling, ms, transformers_ms in zip(SETTINGS, SETTINGS.values(), own, theirs, strict=True):
        kept = float((standardise(logits, sampling) > 0).sum(dim=-1).double().mean())
        found = {"vocab": int(item), "filters": name, "kept": kept, "ms": ms, "to_temperature": ms / own[0]}
        yield found | {"transformers_ms": transformers_ms}


STUDY = Study(measure, settings={"rounds": 60}, small={"rounds": 2}, items=("49152", "151936"), small_items=("49152",))
