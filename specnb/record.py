"""The record of a generation: what each row and step drafted, accepted and emitted. Analysis reads it;
the loop prints nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """Arrays over rows and steps; a row that has ended emits 0 tokens in later steps.

    Attributes
    ----------
    draft_tokens : (batch, steps, gamma)
        -1 if nothing was proposed.
    accepted, token, emitted : (batch, steps)
        Accepted draft tokens, the final token, and tokens emitted: accepted + 1, or fewer if the
        sequence ended.
    beta : (batch, steps, gamma)
        Overlap of p and q at each draft token, its acceptance probability; in a tree for first
        children only.
    seconds
        For each of `PARTS`, the seconds of the batch's steps `(steps,)`, if timed.
    parents, path : (batch, steps, depth)
        For a tree, the parent of each node, and the accepted nodes, then -1.

    Examples
    --------
    >>> one = np.ones((1, 2), dtype=np.int64)
    >>> print(StepRecord(np.array([[[5, 6], [7, 8]]]), one * [2, 0], one * 9, one * [3, 1], np.ones((1, 2, 2))))
    2.00 tokens per step in 2 steps of 1 rows; 0.50 of 4 draft tokens accepted
    """

    draft_tokens: NDArray[np.int64]
    accepted: NDArray[np.int64]
    token: NDArray[np.int64]
    emitted: NDArray[np.int64]
    beta: NDArray[np.float64]
    seconds: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    parents: tuple[int, ...] | None = None
    path: NDArray[np.int64] | None = None

    @property
    def gamma(self) -> int:
        return self.draft_tokens.shape[-1]  # type: ignore[no-any-return]  # numpy returns Any

    @property
    def active(self) -> NDArray[np.bool_]:
        return self.emitted > 0

    @property
    def accepted_nodes(self) -> NDArray[np.bool_]:
        """Which draft tokens were accepted `(batch, steps, gamma)`."""
        order = np.arange(self.gamma)
        if self.path is None:
            return order < self.accepted[..., None]
        return (self.path[..., None] == order).any(axis=-2)  # type: ignore[no-any-return]  # numpy returns Any

    @property
    def tested(self) -> NDArray[np.bool_]:
        """Which draft tokens the rule tested; in a tree the children of each accepted node up to the accepted one."""
        possible = self.active[..., None] & (self.draft_tokens >= 0)
        if self.parents is None:
            return possible & (np.arange(self.gamma) <= self.accepted[..., None])
        accepted = self.accepted_nodes
        tested = np.zeros_like(accepted)
        for node, parent in enumerate(self.parents):
            earlier = [sibling for sibling in range(node) if self.parents[sibling] == parent]
            reached = parent < 0 or accepted[..., parent]
            tested[..., node] = reached & ~accepted[..., earlier].any(axis=-1)
        return possible & tested

    @property
    def target_passes(self) -> NDArray[np.int64]:
        """Target passes of each row after the prompt's."""
        return self.active.sum(axis=1)  # type: ignore[no-any-return]  # numpy returns Any

    @property
    def tokens_per_step(self) -> float:
        """Block efficiency: mean tokens of a step, the final one included, before the end of a
        sequence cuts any off."""
        return float(self.accepted[self.active].mean()) + 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; NaN if nothing was drafted. Less than alpha: tokens after a rejection count."""
        drafted = self.drafted
        return float(self.accepted[self.active].sum()) / drafted if drafted else float("nan")

    @property
    def drafted(self) -> int:
        return int((self.draft_tokens[self.active] >= 0).sum())

    def __str__(self) -> str:
        steps = f"{self.tokens_per_step:.2f} tokens per step in {self.active.sum()} steps of {len(self.emitted)} rows"
        if not self.drafted:
            return f"{steps}; nothing drafted"
        return f"{steps}; {self.acceptance_rate:.2f} of {self.drafted} draft tokens accepted"


class CompletedRow(NamedTuple):
    """The tokens of one prompt, and its part of the record.

    `record` `(steps, gamma + 3)` has draft tokens, number accepted, final token and number emitted.
    """

    tokens: list[int]
    record: NDArray[np.int64]
    beta: NDArray[np.float64]
    path: NDArray[np.int64] | None = None
    probs: Tensor | None = None
    log_probs: Tensor | None = None


def merge_rows(
    completed_rows: Sequence[CompletedRow],
    seconds: dict[str, NDArray[np.float64]],
    parents: tuple[int, ...] | None = None,
) -> StepRecord:
    """One record of all rows, as long as the longest."""
    steps, gamma = max(len(row.record) for row in completed_rows), completed_rows[0].beta.shape[1]
    record = _stacked([row.record for row in completed_rows], steps, 0)
    record[..., :gamma] = _stacked([row.record[:, :gamma] for row in completed_rows], steps, -1)
    beta = _stacked([row.beta for row in completed_rows], steps, 0.0)
    *_, accepted, token, emitted = np.moveaxis(record, -1, 0)
    path = None
    if parents is not None:
        path = _stacked([row.path for row in completed_rows if row.path is not None], steps, -1)
    return StepRecord(record[..., :gamma], accepted, token, emitted, beta, seconds, parents, path)


def _stacked(arrays: list[NDArray[Any]], steps: int, filling: float) -> NDArray[Any]:
    stacked = np.full((len(arrays), steps, arrays[0].shape[1]), filling, dtype=arrays[0].dtype)
    for row, array in enumerate(arrays):
        stacked[row, : len(array)] = array
    return stacked


PARTS = ("draft", "target", "rest")  # parts of a step; "rest" is verification and all that follows


def now(device: torch.device) -> float:
    """Seconds of a monotonic clock, read after `device` has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class StepTimer:
    """Measures the seconds of each part of each step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[dict[str, float]] = []
        self.last = 0.0

    def start(self) -> None:
        self.steps.append(dict.fromkeys(PARTS, 0.0))
        self.last = now(self.device)

    def mark(self, part: str) -> None:
        before, self.last = self.last, now(self.device)
        self.steps[-1][part] += self.last - before

    @property
    def seconds(self) -> dict[str, NDArray[np.float64]]:
        return {part: np.array([step[part] for step in self.steps]) for part in PARTS} if self.steps else {}
