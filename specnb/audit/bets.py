"""All bets on one text: the alternatives' distributions, the transform in three orders, noise that is used twice.

Everything here is known before the token it is about, or is the token itself; the state that goes from
text to text (histograms, the text before) is made of tokens already judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.audit import pit
from specnb.audit.alternatives import alternative_distributions
from specnb.audit.condensed import CondensedView, condense, greater_mask
from specnb.audit.shared_noise import CumulativeMass, Interval, reused, same_uniform

Array = NDArray[np.float64]

LAGS = (1, 2, 3, 4, 5, 6)
STREAM = int.from_bytes(b"specnb.audit", "big")
"""A sampler that is seeded with the same small number must not share its uniforms with the audit."""
EARLY, LATE = 4, 32  # bets are also placed on the first tokens of a text alone, and on those far behind
TOP_P = [number for number, edge in enumerate(pit.EDGES) if edge >= 0.5]
"""The fixed bets along p that all mass lies in the likeliest part: what top-p does."""


class Margin(NamedTuple):
    """How far a token is from being possible: `logit` below the least that the argmax or top-k keeps (0 if
    these keep it), and probability `mass` before it beyond top-p (0 if that keeps it)."""

    logit: float
    mass: float


@dataclass(frozen=True)
class Row:
    """One text, or a piece of one: its tokens, and the distributions they should have been drawn from.

    tokens     n tokens
    p          (n, vocab) the target's distributions, standardised as claimed, before each of them
    q          (n, vocab) the draft's distributions there, standardised; zero where it drafts nothing
    raw        (n, vocab) the draft's distributions not standardised, where that is another distribution
    prompt     what stands before the text
    steps      tokens emitted by each step, which add up to n
    margins    of tokens that p makes impossible, by their place: how far outside they are
    continues  whether it goes on where the row before it ended
    more       whether the next row goes on where it ends
    """

    tokens: Sequence[int]
    p: Tensor
    q: Tensor | None = None
    raw: Tensor | None = None
    prompt: Sequence[int] = ()
    steps: Sequence[int] | None = None
    margins: Mapping[int, Margin] = field(default_factory=dict)
    continues: bool = False
    more: bool = False


class Placed(NamedTuple):
    """Bets of one row: the `kinds` of K bets, r(x)/p(x) `(n, K)`, the `excess` of J witnesses `(n, J)`, at
    which tokens the bets are placed as well `(n, places)`, and each token's `place` in its step, or -1."""

    kinds: list[str]
    ratios: Array
    excess: Array
    masks: NDArray[np.bool_]
    place: NDArray[np.int64]


class Bets:
    """Places all bets on row after row; `seed` is that of the transform's own uniforms."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng([STREAM, seed])
        self.histograms = {kind: pit.Histogram() for kind in ("along-p", "along-q/p", "along-ids")}
        self.longest = 1
        self.text = _Sequence()
        self.last: Tensor | None = None  # p before the token placed last, `(1, vocab)`
        self.others: tuple[_Sequence, _Sequence] = (_Sequence(), _Sequence())
        self.after_prompt: dict[tuple[int, ...], _Sequence] = {}

    def begin(self, prompt: Sequence[int]) -> None:
        """Begins a new sequence. What is kept of earlier ones does not grow with the vocabulary."""
        before, self.text, self.last = self.text, _Sequence(prompt=list(prompt)), None
        self.others = (before, self.after_prompt.get(tuple(prompt), _Sequence()))
        self.after_prompt[tuple(prompt)] = self.text

    def place(self, row: Row) -> Placed:
        """The bets on `row`, a piece of the sequence begun last, whose tokens and distributions have been checked."""
        tokens = torch.as_tensor(row.tokens, device=row.p.device)
        row, drafted, cumulated = _drafted_everywhere(row), None, None
        own = CumulativeMass(row.p).interval(tokens)
        if row.q is not None:
            cumulated = CumulativeMass(row.q)
            drafted = cumulated.interval(tokens)
        seen = self._view(row, tokens)
        collected = _Collected([], [], [])
        self._bet_on_alternatives(collected, tokens, seen)
        self._bet_on_transforms(collected, seen, own)
        self._bet_on_noise(collected, tokens, own, drafted)
        if row.q is not None and cumulated is not None:
            ratios = reused(row.p, row.q, tokens, cumulated)
            for kind, ratio in zip(("one-uniform", "shared-noise"), ratios, strict=True):
                collected.bet(kind, ratio)
        masks, place = self._places(row)
        self.text.grow(row, own, drafted)
        self.last = row.p[-1:].clone()
        return Placed(collected.kinds, np.stack(collected.ratios, 1), np.stack(collected.excess, 1), masks, place)

    def _view(self, row: Row, tokens: Tensor) -> CondensedView:
        first = row.p[:1] if self.last is None else self.last
        before = torch.cat([first, row.p[:-1]])
        last = [*self.text.prompt, *self.text.tokens][-1:]
        return condense(tokens, row.p, before, row.q, row.raw, previous=last[0] if last else 0)

    def _bet_on_alternatives(self, collected: _Collected, tokens: Tensor, seen: CondensedView) -> None:
        known = torch.nn.functional.pad(self.text.had(seen.ids, tokens.cpu()), (0, 2))
        kinds, at_token = [], []
        for kind, distributions in alternative_distributions(seen, known):
            kinds += [kind] * len(distributions)
            at_token.append(seen.at_token(distributions))
            likelier = greater_mask(distributions, seen.p)
            excess = seen.at_token(likelier) - torch.linalg.vecdot(likelier, seen.p)
            collected.excess.extend(excess.numpy(force=True))
        p = seen.at_token(seen.p).double()  # over the least float32, a ratio would overflow
        ratios = torch.where(p > 0, torch.cat(at_token) / p.where(p > 0, 1.0), 1.0).numpy(force=True)
        for kind, ratio in zip(kinds, ratios, strict=True):
            collected.bet(kind, ratio)
        constant = [ratio for kind, ratio in zip(kinds, ratios, strict=True) if kind == "constant-uniform"]
        if constant:
            collected.bet("constant-uniform", self.text.learned(np.stack(constant, axis=1)))

    def _bet_on_transforms(self, collected: _Collected, seen: CondensedView, own: Interval) -> None:
        w = self.random.random(len(own.low))
        scores = {"along-p": seen.p / seen.sizes.clamp_min(1)}
        if seen.q is not None:
            scores["along-q/p"] = torch.where(seen.p > 0, seen.q / seen.p.where(seen.p > 0, 1.0), torch.inf)
        transforms = {kind: pit.transform(seen.p, score, seen.cell, w) for kind, score in scores.items()}
        transforms["along-ids"] = np.clip(own.low + w * own.width, 0.0, 1.0)
        for kind, u in transforms.items():
            bets = np.concatenate([pit.fixed_bets(u), self.histograms[kind].bets(u)], axis=1)
            for number, ratio in enumerate(bets.T):
                cut = kind == "along-p" and number in TOP_P
                collected.bet("tail-cut" if cut else kind, ratio)
            below = (u[:, None] < np.array(pit.EDGES)) - np.array(pit.EDGES)
            collected.excess.extend([*below.T, *-below.T])

    def _bet_on_noise(self, collected: _Collected, tokens: Tensor, own: Interval, drafted: Interval | None) -> None:
        """Against the tokens a few places before, and against two earlier texts at the same place: the one
        before, and the last one with the same prompt."""
        start, n = len(self.text.tokens), len(tokens)
        for number, probs in enumerate((own, drafted)):
            if probs is None:
                continue
            so_far = self.text.intervals(number, probs)
            for lag in LAGS:
                collected.bet("noise-of-steps", same_uniform(own, _cut(so_far, start - lag, n), probs))
            for other in self.others:
                earlier = _cut(other.intervals(number), start, n)
                collected.bet("noise-of-texts", same_uniform(own, earlier, probs))
        for other in self.others:
            expected = np.full(n, -1)
            there = other.tokens[start : start + n]
            expected[: len(there)] = there
            hit = np.where(expected == tokens.numpy(force=True), 1 / np.where(own.width > 0, own.width, 1.0), 0.0)
            collected.bet("same-tokens", np.where(expected >= 0, hit, 1.0))

    def _places(self, row: Row) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        offset = len(self.text.tokens) + np.arange(len(row.tokens))
        masks = [offset < EARLY, offset >= LATE]
        if row.steps is None:
            return np.stack(masks, axis=1), np.full(len(offset), -1)
        place: list[int] = []
        full: list[tuple[bool, int]] = []
        after_full = False
        for emitted in row.steps:
            place += range(emitted)
            full += [(after_full, self.longest)] * emitted
            after_full = emitted >= self.longest > 1
            self.longest = max(self.longest, emitted)
        places = np.array(place, dtype=np.int64)
        after, longest = np.array(full, dtype=np.int64).reshape(-1, 2).T
        masks += [places == 0, (places > 0) & (places < longest - 1), (places > 0) & (places == longest - 1)]
        return np.stack([*masks, (places == 0) & (after > 0)], axis=1), places


class _Collected(NamedTuple):
    kinds: list[str]
    ratios: list[Array]
    excess: list[Array]

    def bet(self, kind: str, ratio: Array) -> None:
        self.kinds.append(kind)
        self.ratios.append(ratio)


class _Sequence:
    """What is remembered of a text: its tokens, where they lay in the cumulated distributions."""

    def __init__(self, prompt: list[int] | None = None) -> None:
        self.prompt = prompt or []
        self.tokens: list[int] = []
        self.laid: tuple[list[Interval], list[Interval]] = ([], [])
        self.log_weight: Array | float = 0.0

    def grow(self, row: Row, own: Interval, drafted: Interval | None) -> None:
        self.tokens += [int(token) for token in row.tokens]
        self.laid[0].append(own)
        if drafted is not None:
            self.laid[1].append(drafted)

    def intervals(self, number: int, more: Interval | None = None) -> Interval:
        """Of all tokens so far, under p (0) or q (1), and `more` behind them."""
        parts = [*self.laid[number], *([] if more is None else [more])]
        if not parts:
            return Interval(np.empty(0), np.empty(0))
        return Interval(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def had(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Which of `ids` `(n, H)` the prompt or the text has before each of the `tokens` `(n,)` that come."""
        known = torch.as_tensor([*self.prompt, *self.tokens], dtype=torch.int64, device=ids.device)
        vocab = int(max(ids.max(), tokens.max(), known.max() if len(known) else 0)) + 1
        first = torch.full((vocab,), len(tokens), device=ids.device)
        places = torch.arange(len(tokens), device=ids.device)
        first.scatter_reduce_(0, tokens, places + 1, "amin")
        first[known] = 0
        return first[ids] <= places[:, None]

    def learned(self, ratios: Array) -> Array:
        """The bets `(n, U)` averaged with weights that each has earned in this text so far, `(n,)`."""
        floored = np.log(0.05 + 0.95 * ratios)
        earned = self.log_weight + np.concatenate([np.zeros((1, ratios.shape[1])), floored.cumsum(axis=0)])
        self.log_weight = earned[-1]
        weight = np.exp(earned[:-1] - earned[:-1].max(axis=1, keepdims=True))
        return (weight * np.exp(floored)).sum(axis=1) / weight.sum(axis=1)


def _drafted_everywhere(row: Row) -> Row:
    """Where nothing was drafted, p takes the place of q."""
    if row.q is None:
        return row
    mass = row.q.sum(dim=-1, keepdim=True)
    return replace(row, q=torch.where(mass > 0, row.q, row.p)) if bool((mass == 0).any()) else row


def _cut(laid: Interval, start: int, n: int) -> Interval:
    """Entries `start` to `start + n`, empty intervals where there are none."""
    index = start + np.arange(n)
    inside = (index >= 0) & (index < len(laid.low))
    index = np.where(inside, index, 0)
    if len(laid.low) == 0:
        return Interval(np.zeros(n), np.zeros(n))
    return Interval(laid.low[index], np.where(inside, laid.high[index], laid.low[index]))
