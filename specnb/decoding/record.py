"""The record that a generation carries: per row and step, what was drafted, accepted and emitted.

Every analysis reads this; nothing prints from inside the loop. This module knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class StepRecord:
    """Arrays over rows and steps; a row that has ended emits 0 tokens in the steps that remain.

    drafts    (batch, steps, gamma)  drafted tokens, -1 where there was none
    accepted  (batch, steps)         drafts accepted by the rule, before anything was cut off
    token     (batch, steps)         the token that the target added
    emitted   (batch, steps)         tokens emitted: accepted + 1, or fewer where the text ended
    beta      (batch, steps, gamma)  overlap of p and q at each draft: its chance of being accepted
    seconds   part -> (steps,)       for each of `PARTS`, where the generation was timed; steps of the batch,
                                     which are more than those of any row where rows were taken over
    """

    draft_tokens: NDArray[np.int64]
    accepted: NDArray[np.int64]
    token: NDArray[np.int64]
    emitted: NDArray[np.int64]
    beta: NDArray[np.float64]
    seconds: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    @property
    def gamma(self) -> int:
        """Draft tokens per step."""
        return self.draft_tokens.shape[-1]

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
        return self.active[..., None] & (order <= self.accepted[..., None]) & (self.draft_tokens >= 0)

    @property
    def target_passes(self) -> NDArray[np.int64]:
        """`(batch,)`: serial runs of the target after the prompt's."""
        return self.active.sum(axis=1)

    @property
    def tokens_per_step(self) -> float:
        """Mean number of tokens per target run, the last one included, counted before anything was cut off."""
        return float(self.accepted[self.active].mean()) + 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens: a number other than alpha, since drafts after a rejection count.
        NaN where nothing was drafted."""
        drafted = int((self.draft_tokens[self.active] >= 0).sum())
        return float(self.accepted[self.active].sum()) / drafted if drafted else float("nan")


class CompletedRow(NamedTuple):
    """What came of one prompt: its new tokens; of each step `(steps, gamma + 3)` the drafts, how many were
    accepted, the token that the target added, how many were emitted; and the overlaps `(steps, gamma)`."""

    text: list[int]
    record: NDArray[np.int64]
    beta: NDArray[np.float64]


def merge_rows(completed_rows: Sequence[CompletedRow], seconds: dict[str, NDArray[np.float64]]) -> StepRecord:
    """One record of all prompts, as long as the longest; behind its last step a row drafts and emits nothing."""
    steps, gamma = max(len(one.record) for one in completed_rows), completed_rows[0].beta.shape[1]
    record = np.zeros((len(completed_rows), steps, gamma + 3), dtype=np.int64)
    record[..., :gamma] = -1
    beta = np.zeros((len(completed_rows), steps, gamma))
    for row, one in enumerate(completed_rows):
        record[row, : len(one.record)], beta[row, : len(one.beta)] = one.record, one.beta
    *_, accepted, token, emitted = np.moveaxis(record, -1, 0)
    return StepRecord(record[..., :gamma], accepted, token, emitted, beta, seconds)
