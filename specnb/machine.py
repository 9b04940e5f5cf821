"""The name of the machine, to be stated beside every measured speed, and a key for what was measured on it."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import torch

# Variables that make the libraries under torch use fewer instructions than the processor has.
INSTRUCTION_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
CPU_FIELDS = ("model name", "cpu family", "model", "stepping", "cache size", "flags")  # lines of /proc/cpuinfo


def machine(device: torch.device = torch.device("cpu")) -> str:
    """The name of the device; for a processor also the number of its cores.

    >>> machine()  # doctest: +SKIP
    'AMD EPYC, 2 cores'
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cores = _cores()
    if cores and "model name" in cores[0]:
        return f"{cores[0]['model name']}, {len(cores)} cores"
    return platform.processor() or platform.machine()


def measured_on(dtype: torch.dtype, device: torch.device = torch.device("cpu")) -> str:
    """The conditions to state beside a speed: machine, threads, version of torch, dtype.

    >>> measured_on(torch.float32)  # doctest: +SKIP
    'AMD EPYC, 2 cores; 1 thread; torch 2.13.0+cpu; float32'
    """
    threads = torch.get_num_threads()
    name = str(dtype).removeprefix("torch.")
    return f"{machine(device)}; {threads} thread{'s' * (threads != 1)}; torch {torch.__version__}; {name}"


def processor_key(dtype: torch.dtype) -> str:
    """A key for measurements of the processor: where keys are equal, a measurement may be reused.

    `measured_on` and a digest of the processor's features, because different processors can have the same name, for
    example on virtual machines.

    >>> processor_key(torch.float32) == processor_key(torch.float64)
    False
    """
    limits = [f"{name}={os.environ[name]}" for name in INSTRUCTION_LIMITS if name in os.environ]
    cores = _cores()
    kind = "\n".join(cores[0].get(name, "") for name in CPU_FIELDS) if cores else platform.version()
    digest = hashlib.sha256(kind.encode()).hexdigest()[:8]
    return "; ".join([measured_on(dtype), digest, torch.backends.cpu.get_cpu_capability(), *limits])


def _cores() -> list[dict[str, str]]:
    """The blocks of /proc/cpuinfo, one for each core; none where there is no such file."""
    try:
        blocks = Path("/proc/cpuinfo").read_text(encoding="utf-8").strip().split("\n\n")
    except (OSError, UnicodeError):
        return []
    lines = [[line.partition(":") for line in block.splitlines()] for block in blocks]
    return [{name.strip(): value.strip() for name, _, value in block} for block in lines]
