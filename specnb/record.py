"""The record of a generation: per row and step, what was drafted, accepted and emitted, and how
long its parts took.

Analysis reads this; nothing prints from inside the loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True)
class StepRecord:
    """Arrays over rows and steps; a row that has ended emits 0 tokens in the steps that remain.

    draft_tokens  (batch, steps, gamma)  -1 where none was proposed
    accepted      (batch, steps)         number of draft tokens that the rule accepted, before
                  anything was cut off
    token         (batch, steps)         the final token of the step, recovered or bonus
    emitted       (batch, steps)         tokens emitted: accepted + 1, or fewer where the sequence
                  ended
    beta          (batch, steps, gamma)  overlap of p and q at each draft token: its acceptance
                  probability. In a tree that holds for the first child of a node only
    seconds       part -> (steps,)       for each of `PARTS`, if the generation was timed; of the
                  steps of the batch, which are more than those of any row if rows were refilled
    parents       for a tree, the parent of each node, -1 for the root; None for a chain
    path          (batch, steps, depth)  for a tree, the nodes accepted, -1 after the last; None for
                  a chain
    trace         (batch, steps, gamma, 3)  with `Hooks(trace=True)`, p and q of each draft token and
                  the uniform r that it was tested with; NaN where none was proposed

    >>> one = np.ones((1, 2), dtype=np.int64)
    >>> record = StepRecord(np.array([[[5, 6], [7, 8]]]), one * [2, 0], one * 9, one * [3, 1], np.ones((1, 2, 2)))
    >>> record.tokens_per_step, record.acceptance_rate
    (2.0, 0.5)
    >>> print(record)
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
    trace: NDArray[np.float64] | None = None

    @property
    def gamma(self) -> int:
        """Draft tokens per step."""
        return self.draft_tokens.shape[-1]  # type: ignore[no-any-return]  # numpy returns Any

    @property
    def active(self) -> NDArray[np.bool_]:
        """`(batch, steps)`: whether the row was still being generated."""
        return self.emitted > 0

    @property
    def accepted_nodes(self) -> NDArray[np.bool_]:
        """`(batch, steps, gamma)`: which draft tokens were accepted."""
        order = np.arange(self.gamma)
        if self.path is None:
            return order < self.accepted[..., None]
        return (self.path[..., None] == order).any(axis=-2)  # type: ignore[no-any-return]  # numpy returns Any

    @property
    def tested(self) -> NDArray[np.bool_]:
        """`(batch, steps, gamma)`: draft tokens that the rule tested, in order, the rejected ones
        included.

        In a tree, those are the children of each accepted node up to the one accepted.
        """
        possible = self.active[..., None] & (self.draft_tokens >= 0)
        if self.parents is None:
            return possible & (np.arange(self.gamma) <= self.accepted[..., None])
        accepted = self.accepted_nodes
        tested = np.zeros_like(accepted)
        for node, parent in enumerate(self.parents):
            earlier = [other for other in range(node) if self.parents[other] == parent]
            reached = parent < 0 or accepted[..., parent]
            tested[..., node] = reached & ~accepted[..., earlier].any(axis=-1)
        return possible & tested

    @property
    def target_passes(self) -> NDArray[np.int64]:
        """`(batch,)`: sequential forward passes of the target after the prompt's."""
        return self.active.sum(axis=1)  # type: ignore[no-any-return]  # numpy returns Any

    @property
    def tokens_per_step(self) -> float:
        """Block efficiency: mean number of tokens per step, the final one included, before anything
        was cut off.

        Over steps of which nothing was cut it would be too small: the end of a sequence cuts those
        that accept many.
        """
        return float(self.accepted[self.active].mean()) + 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; NaN if nothing was drafted. Not alpha, since draft tokens
        after a rejection count as drafted."""
        drafted = self.drafted
        return float(self.accepted[self.active].sum()) / drafted if drafted else float("nan")

    @property
    def drafted(self) -> int:
        """Draft tokens of all steps."""
        return int((self.draft_tokens[self.active] >= 0).sum())

    def show(self, row: int, step: int, begin: int = 0, text: Callable[[int], str] = str) -> str:
        """One step of a row in lines: each draft token with p, q, r and its fate, and the final token.

        `begin` is the length of the row's prompt, and `text` shows a token. A token's number, in
        brackets, is its place in the sequence. On a chain token verification accepts where r < p/q.

        >>> numbers = [np.array([[value]]) for value in (1, 9, 2)]
        >>> trace = np.array([[[[0.5, 0.4, 0.9], [0.1, 0.8, 0.6]]]])
        >>> print(StepRecord(np.array([[[5, 6]]]), *numbers, np.ones((1, 1, 2)), trace=trace).show(0, 0, begin=3))
        position 3, gamma 2, accepted 1
          [4] 5: p 0.5, q 0.4, p/q 1.25, r 0.9  accepted
          [5] 6: p 0.1, q 0.8, p/q 0.125, r 0.6  rejected
          [5] 9: recovered
        """
        if not self.active[row, step]:
            raise IndexError(f"row {row} made {self.target_passes[row]} steps, and step {step} is not one of them")
        position = begin + int(self.emitted[row, :step].sum())
        parents = self.parents or tuple(range(-1, self.gamma - 1))
        accepted, tested = self.accepted_nodes[row, step], self.tested[row, step]
        lines = [f"position {position}, gamma {self.gamma}, accepted {self.accepted[row, step]}"]
        depths, last = list[int](), -1
        for node, token in enumerate(self.draft_tokens[row, step].tolist()):
            parent = parents[node]
            depths.append(1 if parent < 0 else depths[parent] + 1)
            last = node if accepted[node] else last
            if token >= 0:
                p, q, r = [np.nan] * 3 if self.trace is None else self.trace[row, step, node]
                numbers = "" if self.trace is None else f": p {p:.3g}, q {q:.3g}, p/q {p / q:.3g}, r {r:.3g}"
                fate = "accepted" if accepted[node] else "rejected" if tested[node] else "not tested"
                lines.append(f"  [{position + depths[node]}] {text(token)}{numbers}  {fate}")
        failed = any(tested[node] and not accepted[node] and parents[node] == last for node in range(self.gamma))
        final = f"{text(int(self.token[row, step]))}: {'recovered' if failed else 'bonus'}"
        lines.append(f"  [{position + int(self.accepted[row, step]) + 1}] {final}")
        cut = int(self.accepted[row, step]) + 1 - int(self.emitted[row, step])
        return "\n".join(lines + [f"  the sequence ended: {cut} of these not emitted"] * (cut > 0))

    def __str__(self) -> str:
        """What was emitted and accepted, in a line."""
        told = (
            f"{self.acceptance_rate:.2f} of {self.drafted} draft tokens accepted" if self.drafted else "nothing drafted"
        )
        steps = f"{self.tokens_per_step:.2f} tokens per step in {self.active.sum()} steps of {len(self.emitted)} rows"
        return f"{steps}; {told}"


class CompletedRow(NamedTuple):
    """The result of one prompt.

    tokens  the new tokens
    record  (steps, gamma + 3)    draft tokens, number accepted, final token, number emitted
    beta    (steps, gamma)        overlaps of p and q
    path    (steps, depth)        nodes accepted, for a tree; depth 0 for a chain
    probs   (len(tokens), vocab)  the target's distribution of each token, if it was kept
    log_probs  (len(tokens),)     the target's log-probability of each token, if it was kept
    trace   (steps, gamma, 3)     p, q and r of each draft token, if they were kept
    """

    tokens: list[int]
    record: NDArray[np.int64]
    beta: NDArray[np.float64]
    path: NDArray[np.int64] | None = None
    probs: Tensor | None = None
    log_probs: Tensor | None = None
    trace: NDArray[np.float64] | None = None


def merge_rows(
    completed_rows: Sequence[CompletedRow],
    seconds: dict[str, NDArray[np.float64]],
    parents: tuple[int, ...] | None = None,
) -> StepRecord:
    """One record of all rows, as long as the longest. After its last step a row drafts and emits
    nothing.

    >>> rows = [CompletedRow([7] * n, np.ones((n, 4), dtype=np.int64), np.ones((n, 1))) for n in (2, 1)]
    >>> merge_rows(rows, {}).emitted
    array([[1, 1],
           [1, 0]])
    """
    steps, gamma = max(len(row.record) for row in completed_rows), completed_rows[0].beta.shape[1]
    record = _stacked([row.record for row in completed_rows], steps, 0)
    record[..., :gamma] = _stacked([row.record[:, :gamma] for row in completed_rows], steps, -1)
    beta = _stacked([row.beta for row in completed_rows], steps, 0.0)
    *_, accepted, token, emitted = np.moveaxis(record, -1, 0)
    path = None
    if parents is not None:
        path = _stacked([row.path for row in completed_rows if row.path is not None], steps, -1)
    traces = [row.trace for row in completed_rows if row.trace is not None]
    trace = _stacked(traces, steps, np.nan) if traces else None
    return StepRecord(record[..., :gamma], accepted, token, emitted, beta, seconds, parents, path, trace)


def _stacked(arrays: list[NDArray[Any]], steps: int, filling: float) -> NDArray[Any]:
    """`arrays` `(own steps, ...)` as one `(rows, steps, ...)`, with `filling` after the last step of
    each."""
    stacked = np.full((len(arrays), steps, *arrays[0].shape[1:]), filling, dtype=arrays[0].dtype)
    for row, own in enumerate(arrays):
        stacked[row, : len(own)] = own
    return stacked


PARTS = ("draft", "target", "rest")
"""The parts of a step: drafting, the target's forward pass, and verification with all that
remains."""


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
