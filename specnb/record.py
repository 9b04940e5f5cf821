"""The record of a generation: what each row and step drafted, accepted and emitted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.arguments import shown
from specnb.trees import chain, node_depths


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
        Overlap of p and q at each draft token; in a tree its acceptance probability for first
        children only.
    seconds
        For each of `PARTS`, the seconds of the batch's steps `(steps,)`, if timed.
    parents, path : (batch, steps, depth)
        For a tree, the parent of each node, and the accepted nodes, then -1.
    trace : (batch, steps, gamma, 3)
        With `Instruments(trace=True)`, p and q of each draft token and the uniform r that it was tested
        with; NaN if none was proposed.
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
        """Which draft tokens the rule tested, if it goes from the root down; of another, those after accepted ones."""
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
        """Block efficiency: mean tokens of a step, the final one included, before an end cuts any off."""
        return float(self.accepted[self.active].mean()) + 1

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted tokens; NaN if nothing was drafted. Tokens after a rejection count."""
        drafted = self.drafted
        return float(self.accepted[self.active].sum()) / drafted if drafted else float("nan")

    @property
    def drafted(self) -> int:
        return int((self.draft_tokens[self.active] >= 0).sum())

    def show(self, row: int, step: int, begin: int = 0, text: Callable[[int], str] = str) -> str:
        """One step of a row in lines: each draft token with its place, p, q, r and fate, and the final token.

        `begin` is the length of the row's prompt, and `text` shows a token. p, q and r explain the fate by a
        rule that goes from the root down, such as token verification.

        Examples
        --------
        >>> numbers = [np.array([[value]]) for value in (1, 9, 2)]
        >>> trace = np.array([[[[0.5, 0.4, 0.9], [0.1, 0.8, 0.6]]]])
        >>> print(StepRecord(np.array([[[5, 6]]]), *numbers, np.ones((1, 1, 2)), trace=trace).show(0, 0, begin=3))
        position 3, gamma 2, accepted 1
          [4] 5: p 0.5, q 0.4, p/q 1.25, r 0.9  accepted
          [5] 6: p 0.1, q 0.8, p/q 0.125, r 0.6  rejected
          [5] 9: recovered
        """
        if step not in range(passes := int(self.target_passes[row])):
            raise IndexError(f"row {row} made {passes} steps, and step {step} is not one of them: they begin with 0")
        position = begin + int(self.emitted[row, :step].sum())
        parents = self.parents or chain(self.gamma)
        accepted, tested = self.accepted_nodes[row, step], self.tested[row, step]
        lines = [f"position {position}, gamma {self.gamma}, accepted {self.accepted[row, step]}"]
        depths, last = node_depths(parents), -1
        for node, token in enumerate(self.draft_tokens[row, step].tolist()):
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
        accepted = f"{self.acceptance_rate:.2f} of {self.drafted} draft tokens accepted"
        return (
            f"{self.tokens_per_step:.2f} tokens per step in {self.active.sum()} steps, summed over {len(self.emitted)} "
            f"rows; {accepted if self.drafted else 'nothing drafted'}"
        )


@dataclass(frozen=True, repr=False)
class Generation:
    """The completions of a call, and the record of its steps.

    Attributes
    ----------
    tokens
        The new tokens of each prompt; `texts` with a tokenizer.
    probs
        The target's distribution of each new token, with `Instruments(keep_probs=True)`.

    Examples
    --------
    >>> from specnb import generate, load_pair
    >>> generate(load_pair().target, [[0], [1, 2]], draft=None, max_new_tokens=3)
    2 completions, 6 tokens
    1.00 tokens per step in 6 steps, summed over 2 rows; nothing drafted
    """

    tokens: list[list[int]]
    record: StepRecord
    probs: list[Tensor] | None = None
    prompts: list[list[int]] = field(default_factory=list)
    texts: list[str] | None = None
    tokenizer: Any = None

    def __repr__(self) -> str:
        lines = [f"{len(self.tokens)} completions, {sum(map(len, self.tokens))} tokens", str(self.record)]
        lines += [shown(text) for text in (self.texts or [])[:3]]
        return "\n".join(lines)

    def show(self, row: int, step: int) -> str:
        """A step of a row, to print; with `Instruments(trace=True)` p, q and r of each draft token."""
        text = str if self.tokenizer is None else lambda token: repr(self.tokenizer.decode([token]))
        return self.record.show(row, step, len(self.prompts[row]), text)

    def to_jsonl(self, file: str | Path) -> None:
        """Write a line of JSON for each prompt, for `specnb-audit audit`: its tokens, the new ones, how many each step
        emitted, and the new text if there is a tokenizer."""
        emitted = [[int(n) for n in row if n] for row in self.record.emitted]
        texts = [{"text": text} for text in self.texts or ()] or [{}] * len(self.tokens)
        rows = zip(self.prompts, self.tokens, emitted, texts, strict=True)
        lines = ({"prompt": prompt, "tokens": tokens, "steps": steps} | text for prompt, tokens, steps, text in rows)
        write_lines(file, lines)


def write_lines(file: str | Path, entries: Iterable[Any]) -> None:
    """Write lines of JSON; a file that was there stays as it is if an entry is no JSON."""
    lines = "".join(json.dumps(entry) + "\n" for entry in entries)
    Path(file).write_text(lines, encoding="utf-8")


class CompletedRow(NamedTuple):
    """The tokens of one prompt, and its part of the record.

    `record` `(steps, gamma + 3)` has draft tokens, number accepted, final token and number emitted.
    """

    tokens: list[int]
    record: NDArray[np.int64]
    beta: NDArray[np.float64]
    path: NDArray[np.int64]
    probs: Tensor | None = None
    log_probs: Tensor | None = None
    trace: NDArray[np.float64] | None = None


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
    path = None if parents is None else _stacked([row.path for row in completed_rows], steps, -1)
    traces = [row.trace for row in completed_rows if row.trace is not None]
    trace = _stacked(traces, steps, np.nan) if traces else None
    return StepRecord(record[..., :gamma], accepted, token, emitted, beta, seconds, parents, path, trace)


def _stacked(arrays: list[NDArray[Any]], steps: int, filling: float) -> NDArray[Any]:
    stacked = np.full((len(arrays), steps, *arrays[0].shape[1:]), filling, dtype=arrays[0].dtype)
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
