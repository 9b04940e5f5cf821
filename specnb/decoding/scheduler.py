"""Who takes part in a batch: which prompt each row has, which wait, and how far the host knows them to be."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specnb.decoding.record import CompletedRow
from specnb.decoding.step import IDLE, IMPROPER, NAN, Batch
from specnb.sampling.randomness import uniforms


class Scheduler:
    """Which prompt each row has, which wait, and what has been told of those that ended."""

    def __init__(
        self, batch: Batch, prompts: Sequence[Sequence[int]], numbers: Sequence[int], seed: int, new: int
    ) -> None:
        self.batch, self.prompts, self.numbers, self.seed, self.new = batch, prompts, numbers, seed, new
        self.expected = len(prompts) * new
        self.ended: dict[int, CompletedRow] = {}
        self.entered = 0
        self.prompt_of: dict[int, int] = {}
        self._enter(range(len(batch.state.rows)))

    def tokens_to_come(self, status: Sequence[int]) -> int:
        """The most tokens that can still come, of all prompts."""
        return sum(status) + (len(self.prompts) - self.entered) * self.new

    def replace(self, status: Sequence[int]) -> bool:
        """Puts waiting prompts into the rows whose texts have ended; whether there were any."""
        waiting = len(self.prompts) - self.entered
        rows = [row for row, remaining in enumerate(status) if remaining == IDLE][:waiting]
        if rows:
            self._collect(rows)
            self._enter(rows)
        return bool(rows)

    def completed_rows(self) -> list[CompletedRow]:
        """Of each prompt, in their order, what came of it; to be called when all rows have ended."""
        self._collect(list(self.prompt_of))
        return [self.ended[number] for number in range(len(self.prompts))]

    def _enter(self, rows: Sequence[int]) -> None:
        chosen = range(self.entered, self.entered + len(rows))
        self.entered += len(rows)
        self.prompt_of.update(zip(rows, chosen, strict=True))
        own = uniforms(self.seed, [self.numbers[one] for one in chosen], self.new, self.batch.state.gamma)
        self.batch.enter(list(rows), [self.prompts[one] for one in chosen], own, self.new)

    def _collect(self, rows: list[int]) -> None:
        completed_rows = self.batch.state.completed_rows(rows)
        self.ended.update((self.prompt_of.pop(row), one) for row, one in zip(rows, completed_rows, strict=True))


class ProgressReader:
    """How far the rows are, for the host: at once where it computes itself, else as it was a step before, so
    that it never waits for a device that is at work."""

    def __init__(self, batch: Batch) -> None:
        self.state = batch.state
        self.ahead = batch.state.tokens.is_cuda
        self.pending: tuple[Tensor, torch.cuda.Event] | None = None

    def read(self) -> list[int] | None:
        """Tokens still to come of each row, `State.left`; None while nothing is known."""
        if not self.ahead:
            return self.state.status.tolist()
        before, status = self.pending, self.state.status
        copy = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
        copy.copy_(status, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self.pending = (copy, done)
        if before is None:
            return None
        before[1].synchronize()
        return before[0].tolist()

    def discard(self) -> None:
        """What is under way tells of texts that are no longer there."""
        self.pending = None


def require_no_nan(status: Sequence[int]) -> None:
    """Raises `FloatingPointError` where a row has seen NaN, and `ValueError` where a drafter's q is no distribution."""
    if IMPROPER in status:
        raise ValueError(
            "a drafter proposed a token outside the vocabulary, or a q that is no distribution: q must be 0 or more "
            "everywhere and sum to 1 for each draft, and to 0 where the draft is -1; see Drafter.propose"
        )
    if NAN in status:
        raise FloatingPointError(
            "a model produced NaN, or a row without a finite logit: try another dtype, or look at its weights"
        )
