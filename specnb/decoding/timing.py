"""The time of each part of a step."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

PARTS = ("draft", "target", "rest")
"""The parts of a step: drafting, the target's forward pass, and verification with all that remains."""


def now(device: torch.device) -> float:
    """Seconds of a monotonic clock, read after `device` has finished all its work.

    >>> now(torch.device("cpu")) <= now(torch.device("cpu"))
    True
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class StepTimer:
    """Measures the seconds of each part of each step.

    >>> timer = StepTimer(torch.device("cpu"))
    >>> timer.start()
    >>> timer.mark("draft")
    >>> timer.seconds["draft"].shape
    (1,)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []
        self.last = 0.0

    def start(self) -> None:
        """Begins a step. The time between two steps is not counted."""
        self.steps.append(dict.fromkeys(PARTS, 0.0))
        self.last = now(self.device)

    def mark(self, part: str) -> None:
        """Adds the seconds since `start` or the last `mark` to `part`."""
        before, self.last = self.last, now(self.device)
        self.steps[-1][part] += self.last - before

    @property
    def seconds(self) -> dict[str, NDArray[np.float64]]:
        """part -> (steps,); empty if no step was timed."""
        return {part: np.array([step[part] for step in self.steps]) for part in PARTS} if self.steps else {}
