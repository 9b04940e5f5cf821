"""Judges texts one after the other, keeps what it saw, and can be stopped after any of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from specnb.audit.bets import Bets, Margin, Row
from specnb.audit.distance import DistanceEstimate
from specnb.audit.evidence import Evidence, total
from specnb.audit.numerics import Numerics, crossing
from specnb.audit.report import Impossible, Report

Ends = int | Iterable[int] | None
LISTED = 100
OFFSETS = (0, 1, 4, 16, 64, 256, 1024)


class Auditor:
    """Judges row after row; `found_after` is the number of tokens at which exactness was rejected, or None.

    `eos` are tokens after which a sequence must end, `max_new_tokens` its length without one; both are judged
    only where given. `seed` is that of the audit's own uniforms. `numerics` is what the target differs from itself.

    Raises `ValueError` for a delta outside (0, 1), a negative seed or end token, and `max_new_tokens` below 1.
    """

    def __init__(
        self,
        delta: float = 1e-6,
        seed: int = 0,
        eos: Ends = None,
        max_new_tokens: int | None = None,
        numerics: Numerics | None = None,
    ) -> None:
        if not 0 < delta < 1:
            raise ValueError(f"delta is {delta}; a rate of false alarms lies between 0 and 1")
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must be a non-negative integer")
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be a positive integer, or None: not judged")
        self.delta = delta
        self.ends = end_tokens(eos)
        self.max_new_tokens = max_new_tokens
        self.numerics = numerics
        self.bets = Bets(seed)
        self.kinds: list[str] = []
        self.evidence: Evidence | None = None
        self.distance = DistanceEstimate()
        self.logs: list[NDArray[np.float64]] = []  # of each kind, after each token
        self.positions: list[NDArray[np.int64]] = []  # text, offset, token and place in the step
        self.certain_at: int | None = None  # the first token with a finding that needs no statistics
        self.certain: dict[str, int] = {}
        self.impossible: list[Impossible] = []
        self.border: list[Impossible] = []
        self.found_after: int | None = None
        self.numerics_only = False
        self.tokens = self.rows = self.offset = 0
        self.ended = False

    @torch.no_grad()
    def add(self, row: Row) -> None:
        """Judges one row. Raises `ValueError` for tokens and distributions that do not fit together."""
        _require_row(row)
        if not row.continues:
            self.rows, self.offset, self.ended = self.rows + 1, 0, False
            self.bets.begin(row.prompt)
        end_tokens(self.ends, row.p.shape[1])
        row = self._until_the_end(row)
        if len(row.tokens) == 0:
            return
        placed = self.bets.place(row)
        if self.evidence is None:
            self.kinds = placed.kinds
            self.evidence = Evidence(placed.kinds, placed.masks.shape[1])
        if placed.kinds != self.kinds or placed.masks.shape[1] != self.evidence.places:
            raise ValueError(
                "some texts come with a draft's distributions or with steps and others do not; give them for all"
            )
        zero = row.p.gather(-1, _tokens(row)[:, None])[:, 0].numpy(force=True) == 0
        ratios = np.where(zero[:, None], 1.0, placed.ratios)
        log_e = self.evidence.add(ratios, placed.masks)
        self.distance.add(placed.excess)
        self._name_impossible(row, np.flatnonzero(zero))
        n = len(row.tokens)
        places = self.offset + np.arange(n)
        self.positions.append(np.stack([np.full(n, self.rows - 1), places, np.asarray(row.tokens), placed.place]))
        self.logs.append(log_e)
        self._update_verdict(total(log_e))
        self.tokens += n
        self.offset += n

    def _until_the_end(self, row: Row) -> Row:
        """The row up to its end-of-text; what stands behind is a finding, and so is a wrong length."""
        tokens = [int(token) for token in row.tokens]
        keep = 0 if self.ended else len(tokens)
        ends = [at for at, token in enumerate(tokens[:keep]) if token in self.ends]
        if ends:
            keep, self.ended = ends[0] + 1, True
        if keep < len(tokens):
            self._certain("after-the-end", self.tokens + keep + 1, len(tokens) - keep)
        if self.max_new_tokens is not None:
            length = self.offset + keep
            if length > self.max_new_tokens:
                self._certain("wrong-length", self.tokens + max(self.max_new_tokens - self.offset, 0) + 1, 1)
            elif length < self.max_new_tokens and not self.ended and not row.more:
                self._certain("wrong-length", self.tokens + keep, 1)
        if keep == len(tokens):
            return row
        q, raw = (None if probs is None else probs[:keep] for probs in (row.q, row.raw))
        steps = None if row.steps is None else _cut_steps(row.steps, keep)
        return replace(row, tokens=tokens[:keep], p=row.p[:keep], q=q, raw=raw, steps=steps)

    def _name_impossible(self, row: Row, zeros: NDArray[np.intp]) -> None:
        for at in zeros.tolist():
            margin = row.margins.get(self.offset + at, Margin(float("nan"), float("nan")))
            named = Impossible(self.rows - 1, self.offset + at, int(row.tokens[at]), *margin)
            if self._at_border(margin):
                self.border += [named][: LISTED - len(self.border)]
            else:
                self.impossible += [named][: LISTED - len(self.impossible)]
                self._certain("impossible", self.tokens + at + 1, 1)

    def _at_border(self, margin: Margin) -> bool:
        """Whether the two kinds of target run, which may err in both directions, could disagree on it."""
        numerics = self.numerics
        return numerics is not None and margin.logit <= 2 * numerics.logit and margin.mass <= 2 * numerics.tv

    def _certain(self, kind: str, after: int, count: int) -> None:
        """Records findings that need no statistics, the first one known after that many tokens."""
        self.certain[kind] = self.certain.get(kind, 0) + count
        at = max(after - 1, 0)
        self.certain_at = at if self.certain_at is None else min(self.certain_at, at)
        self.found_after = after if self.found_after is None else min(self.found_after, after)

    def _update_verdict(self, log_e: NDArray[np.float64]) -> None:
        if self.found_after is not None:
            if self.found_after > self.tokens:  # certain in this row; the evidence may have passed before it
                before = self._crossed(log_e, self._nats)
                self.found_after = min(self.found_after, before or self.found_after)
            return
        self.found_after = self._crossed(log_e, self._nats)
        self.numerics_only = self.numerics_only or self._crossed(log_e, 0.0) is not None

    @property
    def _nats(self) -> float:
        return 0.0 if self.numerics is None else self.numerics.nats

    def _crossed(self, log_e: NDArray[np.float64], nats: float) -> int | None:
        return crossing(log_e, self.delta, nats, before=self.tokens)

    @property
    def log10_e(self) -> float:
        """Decimal logarithm of the e-value so far."""
        if self.certain_at is not None:
            return float("inf")
        return float(total(self.logs[-1][-1:])[0] / np.log(10)) if self.logs else 0.0

    def report(self, detect: bool = True) -> Report:
        """What has been found so far; `detect` computes what would have been found, where nothing was.

        Raises `ValueError` where there was no token and nothing was found.
        """
        if self.evidence is None:
            return self._report_without_tokens()
        logs = np.concatenate(self.logs) / np.log(10)
        running = total(logs * np.log(10)) / np.log(10)
        if self.certain_at is not None:
            running[self.certain_at :] = np.inf
            running[-1] = np.inf  # it may have been behind the last token judged
        kinds = dict(zip(self.evidence.names, logs.T, strict=True))
        leading = int(logs[-1].argmax())
        nothing = self.found_after is None
        return Report(
            delta=self.delta,
            tokens=self.tokens,
            rows=self.rows,
            found_after=self.found_after,
            numerics_only=nothing and self.numerics_only,
            running=running,
            running_kinds=kinds,
            tv=self.distance.estimate(),
            certain=self.certain,
            impossible=self.impossible,
            border=self.border,
            where={} if nothing else self._where(np.diff(logs[:, leading], prepend=0.0)),
            detectable=self._detectable() if detect and nothing and not self.numerics_only else {},
            numerics=self.numerics,
        )

    def _report_without_tokens(self) -> Report:
        if not self.certain:
            raise ValueError("there are no tokens to judge; give at least one text with a token in it")
        return Report(
            delta=self.delta, tokens=0, rows=self.rows, found_after=self.found_after, numerics_only=False,
            running=np.empty(0), running_kinds={}, tv=self.distance.estimate(), certain=self.certain,
            numerics=self.numerics,
        )  # fmt: skip

    def _detectable(self) -> dict[str, float]:
        assert self.evidence is not None
        always = {"impossible": 1 - 0.1 ** (1 / self.tokens)}  # one such token in the text is enough
        return always | self.evidence.detectable(self.delta)

    def _where(self, gains: NDArray[np.float64]) -> dict[str, list[tuple[str, int, float]]]:
        """Where the evidence of the leading kind comes from; sums of gains over groups of tokens."""
        text, offset, token, place = np.concatenate(self.positions, axis=1)
        groups: dict[str, tuple[NDArray[np.int64], Callable[[int], str]]] = {
            "in the text at": (np.searchsorted(OFFSETS, offset, side="right") - 1, _offset_name),
            "from token": (token, str),
            "in text": (text, str),
        }
        if (place >= 0).any():
            groups["at the place in a step"] = (place, str)
        return {what: _summed(index, gains, name) for what, (index, name) in groups.items()}


def end_tokens(eos: Ends, vocab: int | None = None) -> set[int]:
    """The set of end tokens that `eos` names: one, several or none.

    Raises `ValueError` for one that is negative, or outside a vocabulary of `vocab` tokens.
    """
    ends = set(eos) if isinstance(eos, Iterable) else set() if eos is None else {eos}
    outside = [token for token in sorted(ends) if token < 0 or (vocab is not None and token >= vocab)]
    if outside:
        known = "token ids are 0 or more" if vocab is None else f"the vocabulary has the tokens 0 to {vocab - 1}"
        raise ValueError(f"eos is {outside[0]}; {known}")
    return ends


def _offset_name(group: int) -> str:
    return (
        f"offset {OFFSETS[group]} on"
        if group + 1 == len(OFFSETS)
        else f"offsets {OFFSETS[group]} to {OFFSETS[group + 1] - 1}"
    )


def _summed(
    index: NDArray[np.int64], gains: NDArray[np.float64], name: Callable[[int], str]
) -> list[tuple[str, int, float]]:
    """The twenty groups with the largest sums."""
    groups, inverse, counts = np.unique(index, return_inverse=True, return_counts=True)
    sums = np.bincount(inverse, gains)
    best = np.argsort(-sums, kind="stable")[:20]
    return [(name(int(groups[at])), int(counts[at]), float(sums[at])) for at in best]


def _cut_steps(steps: Sequence[int], keep: int) -> list[int]:
    ends = np.minimum(np.cumsum(steps), keep)
    return [int(size) for size in np.diff(ends, prepend=0) if size > 0]


def _tokens(row: Row) -> torch.Tensor:
    return torch.as_tensor([int(token) for token in row.tokens], device=row.p.device)


def _require_row(row: Row) -> None:
    n = len(row.tokens)
    for name, probs in (("p", row.p), ("q", row.q), ("raw", row.raw)):
        if probs is not None and (probs.ndim != 2 or len(probs) != n or probs.shape[1] != row.p.shape[1]):
            raise ValueError(
                f"{name} has shape {tuple(probs.shape)} for {n} tokens and p {tuple(row.p.shape)}; "
                "each needs one distribution per token, all over the same vocabulary"
            )
    if n and not bool((row.p.sum(dim=-1) - 1).abs().max() < 1e-3):  # NaN fails too
        raise ValueError("a row of p does not sum to 1; give probabilities after standardisation, not logits")
    if n and bool(row.p.min() < 0):
        raise ValueError("p has a negative entry; give probabilities")
    if n and not (min(row.tokens) >= 0 and max(row.tokens) < row.p.shape[1]):
        raise ValueError(f"tokens go from {min(row.tokens)} to {max(row.tokens)} in a vocabulary of {row.p.shape[1]}")
    if row.steps is not None and (sum(row.steps) != n or min(row.steps, default=1) < 1):
        raise ValueError(f"steps add up to {sum(row.steps)} for {n} tokens; give the tokens emitted by each step")
