"""Assigns waiting prompts to free batch rows, collects finished rows, and reads how far the rows
are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.decoding.record import CompletedRow
from specnb.decoding.request import Request
from specnb.decoding.step import IDLE, IMPROPER, NAN, Batch

STARTED = (1, 0, 0)  # status of a row that has made no step: it has not ended


class Scheduler:
    """Continuous batching: a row of `batch` whose sequence has ended takes the next waiting prompt
    of `request`.

    The first prompts enter when the scheduler is made.
    """

    def __init__(self, request: Request, batch: Batch) -> None:
        self.request, self.batch = request, batch
        self.expected = len(request.prompts) * request.max_new_tokens
        self.ended: dict[int, CompletedRow] = {}
        self.entered = 0  # prompts that have, or had, a row
        self.prompt_of: dict[int, int] = {}
        self._enter(range(request.rows))

    def tokens_to_come(self, status: Sequence[int]) -> int:
        """The most tokens that all prompts together can still get; `status` are those left to each
        row."""
        return sum(status) + (len(self.request.prompts) - self.entered) * self.request.max_new_tokens

    def replace(self, status: Sequence[int]) -> list[int]:
        """Assigns waiting prompts to rows that have ended; returns these rows."""
        waiting = len(self.request.prompts) - self.entered
        rows = [row for row, remaining in enumerate(status) if remaining == IDLE][:waiting]
        if rows:
            self._collect(rows)
            self._enter(rows)
        return rows

    def completed_rows(self) -> list[CompletedRow]:
        """The result of each prompt, in their order; to be called when all rows have ended."""
        self._collect(list(self.prompt_of))
        return [self.ended[number] for number in range(len(self.request.prompts))]

    def _enter(self, rows: Sequence[int]) -> None:
        chosen = range(self.entered, self.entered + len(rows))
        self.entered += len(rows)
        self.prompt_of.update(zip(rows, chosen, strict=True))
        request = self.request
        own = self.batch.uniforms(request.seed, [request.numbers[one] for one in chosen], request.max_new_tokens)
        self.batch.enter(list(rows), [request.prompts[one] for one in chosen], own, request.max_new_tokens)

    def _collect(self, rows: list[int]) -> None:
        completed_rows = self.batch.state.completed_rows(rows)
        self.ended.update((self.prompt_of.pop(row), one) for row, one in zip(rows, completed_rows, strict=True))


class ProgressReader:
    """Reads `State.status`: on the CPU at once, on a CUDA device one step late, so that the host
    does not wait for the step in progress."""

    def __init__(self, batch: Batch) -> None:
        self.state = batch.state
        self.ahead = batch.state.tokens.is_cuda
        self.pending: tuple[Tensor, torch.cuda.Event] | None = None
        self.new: list[int] = []  # rows whose status on its way is that of their last sequence

    def read(self) -> NDArray[np.int64] | None:
        """The status of each row; None if none has arrived yet."""
        if not self.ahead:
            return self.state.status.numpy()
        before, status = self.pending, self.state.status
        copy = torch.empty(status.shape, dtype=status.dtype, pin_memory=True)
        copy.copy_(status, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
        self.pending = (copy, done)
        if before is None:
            return None
        before[1].synchronize()
        found = before[0].numpy()
        found[self.new] = STARTED
        self.new = []
        return found

    def entered(self, rows: list[int]) -> None:
        """New sequences have begun in `rows`."""
        self.new = rows


def require_no_nan(status: Sequence[int]) -> None:
    """Raises `FloatingPointError` if a row has NaN, `ValueError` if a drafter's token or q was
    improper.

    >>> require_no_nan([0, 5])
    """
    if IMPROPER in status:
        raise ValueError(
            "a drafter proposed a token outside the vocabulary, or a q that is no distribution: q must be 0 or more "
            "everywhere, above 0 at the draft token, and sum to 1 for each, and to 0 where the token is -1; see "
            "Drafter.propose"
        )
    if NAN in status:
        raise FloatingPointError(
            "a model produced NaN, or a row without a finite logit: try another dtype, or look at its weights"
        )
