"""Interleaved timing: what is compared runs in turn, in a new random order in each round; and on
which machine.

A machine that slows down for a while then slows down everything that is compared, and ratios of the
times of one round stay meaningful.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]
Clock = Callable[[], float]
T = TypeVar("T")


class Job(NamedTuple):
    """What is timed: `run`, `times` times in a row. The functions of `before` are called first and
    not timed."""

    run: Callable[[], Any]
    before: Sequence[Callable[[], Any]] = ()
    times: int = 1


def seconds_of(job: Job, clock: Clock) -> float:
    """Seconds of one call of `job.run`, the mean over `job.times` calls in a row.

    >>> ticks = iter([10.0, 14.0])
    >>> seconds_of(Job(lambda: None, times=2), lambda: next(ticks))
    2.0
    """
    for other in job.before:
        other()
    started = clock()
    for _ in range(job.times):
        job.run()
    return (clock() - started) / job.times


def run_round(functions: Sequence[Callable[[], T]], order: np.random.Generator) -> list[T]:
    """What each function returns, in the order given; they are called in a random order.

    >>> run_round([lambda: "a", lambda: "b"], np.random.default_rng(0))
    ['a', 'b']
    """
    found = {at: functions[at]() for at in order.permutation(len(functions)).tolist()}
    return [found[at] for at in range(len(functions))]


def time_round(jobs: Sequence[Job], clock: Clock, order: np.random.Generator) -> Array:
    """Seconds `(jobs,)` of each job, timed in a random order."""
    return np.array(run_round([partial(seconds_of, job, clock) for job in jobs], order))


def machine(device: torch.device = torch.device("cpu")) -> str:
    """The name of the device; for a processor also the number of its cores.

    >>> machine()  # doctest: +SKIP
    'AMD EPYC, 2 cores'
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    file = Path("/proc/cpuinfo")
    listed = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    names = re.findall(r"^model name\s*: (.*)$", listed, re.MULTILINE)
    return f"{names[0]}, {len(names)} cores" if names else platform.processor() or platform.machine()


def measured_on(dtype: torch.dtype, device: torch.device = torch.device("cpu")) -> str:
    """The conditions to state beside a speed: machine, threads, version of torch, dtype.

    >>> measured_on(torch.float32)  # doctest: +SKIP
    'AMD EPYC, 2 cores; 1 thread; torch 2.13.0+cpu; float32'
    """
    threads = torch.get_num_threads()
    name = str(dtype).removeprefix("torch.")
    return f"{machine(device)}; {threads} thread{'s' * (threads != 1)}; torch {torch.__version__}; {name}"
