"""The time of each part of a step."""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray

PARTS = ("draft", "target", "rest")


def now(device: torch.device) -> float:
    """Seconds on a clock of no particular origin, read when `device` has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class StepTimer:
    """The clock of steps: `start` begins one, `lap` ends a stretch of it that belongs to one of `PARTS`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []
        self.last = 0.0

    def start(self) -> None:
        """Begins a step; what lies between two steps counts for neither."""
        self.steps.append(dict.fromkeys(PARTS, 0.0))
        self.last = now(self.device)

    def mark(self, part: str) -> None:
        """Adds the time since the last call to `part`."""
        before, self.last = self.last, now(self.device)
        self.steps[-1][part] += self.last - before

    @property
    def seconds(self) -> dict[str, NDArray[np.float64]]:
        """part -> (steps,); empty where nothing was timed."""
        return {part: np.array([step[part] for step in self.steps]) for part in PARTS} if self.steps else {}
