"""The record that a generation carries: per row and step, what was drafted, accepted and emitted.

Every analysis reads this; nothing prints from inside the loop. This module knows nothing of models.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PARTS = ("draft", "target", "rest")


@dataclass(frozen=True)
class StepRecord:
    """Arrays over rows and steps; a row that has ended emits 0 tokens in the steps that remain.

    drafts    (batch, steps, gamma)  drafted tokens, -1 where there was none
    accepted  (batch, steps)         drafts accepted by the rule, before anything was cut off
    token     (batch, steps)         the token that the target added
    emitted   (batch, steps)         tokens emitted: accepted + 1, or fewer where the text ended
    beta      (batch, steps, gamma)  overlap of p and q at each draft: its chance of being accepted
    seconds   part -> (steps,)       for each of `PARTS`, where the generation was timed
    """

    drafts: NDArray[np.int64]
    accepted: NDArray[np.int64]
    token: NDArray[np.int64]
    emitted: NDArray[np.int64]
    beta: NDArray[np.float64]
    seconds: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def gamma(self) -> int:
        """Draft tokens per step."""
        return self.drafts.shape[-1]

    @property
    def active(self) -> NDArray[np.bool_]:
        """`(batch, steps)`: whether the row was still being generated."""
        return self.emitted > 0

    @property
    def whole(self) -> NDArray[np.bool_]:
        """`(batch, steps)`: steps of which nothing was cut off. Means over these alone are too small: it is
        the steps with many accepted drafts that the end of a text cuts."""
        return self.active & (self.emitted == self.accepted + 1)

    @property
    def tested(self) -> NDArray[np.bool_]:
        """`(batch, steps, gamma)`: drafts that the rule came to, the first rejected one included."""
        order = np.arange(self.gamma)
        return self.active[..., None] & (order <= self.accepted[..., None]) & (self.drafts >= 0)

    @property
    def target_runs(self) -> NDArray[np.int64]:
        """`(batch,)`: serial runs of the target after the prompt's."""
        return self.active.sum(axis=1)

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens per target run, the last one included, counted before anything was cut off."""
        return float(self.accepted[self.active].mean()) + 1

    @property
    def accepted_fraction(self) -> float:
        """Accepted over drafted tokens: a number other than alpha, since drafts after a rejection count.
        NaN where nothing was drafted."""
        drafted = int((self.drafts[self.active] >= 0).sum())
        return float(self.accepted[self.active].sum()) / drafted if drafted else float("nan")


def now(device: torch.device) -> float:
    """Seconds on a clock of no particular origin, read when `device` has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class Recorder:
    """Collects tensors step by step without looking at them; `finish` brings them to the host at once."""

    def __init__(self, timed: bool, device: torch.device) -> None:
        self.timed = timed
        self.device = device
        self.steps: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        self.laps: dict[str, list[float]] = {part: [] for part in PARTS} if timed else {}
        self.last = 0.0

    def start(self) -> None:
        """Begins the time of a step."""
        if self.timed:
            self.last = now(self.device)

    def lap(self, part: str) -> None:
        """Ends one part of a step."""
        if self.timed:
            ended = now(self.device)
            self.laps[part].append(ended - self.last)
            self.last = ended

    def add(self, drafts: Tensor, accepted: Tensor, token: Tensor, emitted: Tensor, beta: Tensor) -> None:
        """Keeps one step; shapes as in `StepRecord` without the steps."""
        self.steps.append((drafts, accepted, token, emitted, beta))

    def finish(self) -> StepRecord:
        """The record of all steps."""
        columns = [torch.stack(column, dim=1).cpu().numpy() for column in zip(*self.steps, strict=True)]
        drafts, accepted, token, emitted, beta = columns
        seconds = {part: np.array(laps) for part, laps in self.laps.items()}
        return StepRecord(drafts, accepted, token, emitted, beta.astype(np.float64), seconds)
