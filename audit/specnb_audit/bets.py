"""All bets on one sequence: alternative distributions, transforms in three orders, reused uniforms.

Each bet is fixed before its token is seen; what is carried from sequence to sequence depends on
tokens judged before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb_audit.absences import Absences
from specnb_audit.alternatives import (
    DEPENDENCE,
    CondensedDistributions,
    Frequencies,
    Verification,
    alternative_distributions,
    condense_distributions,
    greater_mask,
)
from specnb_audit.claimed import CutoffGap as CutoffGap
from specnb_audit.distant_noise import DistantNoise
from specnb_audit.shared_tests import SharedTests
from specnb_audit.uniforms import (
    EDGES,
    CumulativeMass,
    Histogram,
    Interval,
    Likely,
    fixed_bets,
    ratio_of,
    same_race,
    same_uniform_ratio,
    transform,
    within_step_ratios,
)

Array = NDArray[np.float64]

LAGS = (1, 2, 3, 4, 5, 6)
STREAM = int.from_bytes(b"specnb.audit", "big")
"""Keeps the audit's uniforms apart from those of a sampler that is seeded with the same small
number."""
# Bets are also made on the first 4 tokens of a sequence alone, and on those from offset 32 on.
EARLY, LATE = 4, 32
KEPT = 1000
"""Different prompts, and batches, whose last sequence is remembered for comparison with the next
one of the same."""
RACING = 32
"""The likeliest tokens of each position that are remembered for samplers that race."""
WHOLE = 0.02
"""The share of sequences that are taken to deviate as a whole before any is seen; it counts as much
as 20 of them."""
LARGEST = 1e100
"""The most that a factor may be: that of a token of nearly no probability, or its square, would be
infinite."""
TOP_P_BETS = [number for number, edge in enumerate(EDGES) if edge >= 0.5]
"""The fixed bets along p that put all mass on the likeliest part of p, as an unclaimed top-p
does."""


@dataclass(frozen=True)
class Row:
    """One sequence, or a piece of one, with the distributions its tokens should have been sampled
    from.

    Attributes
    ----------
    tokens : sequence of int
        n tokens.
    p, q : Tensor
        `(n, vocab)` distributions of target and draft before each of them, standardised as claimed;
        q is zero where nothing was drafted.
    raw : Tensor, optional
        The draft's before standardisation, where that differs.
    suspected : Tensor, optional
        The distribution of a model that may have been used instead of the target.
    prompt : sequence of int
        The tokens before the sequence.
    steps : sequence of int, optional
        Tokens emitted by each step; they add up to n.
    cutoff_gaps : mapping
        From the offset of an impossible token in the sequence to its `CutoffGap`.
    continues, more : bool
        Whether it continues the sequence of the row before, and whether the next row continues it.
    batch : int, str or None
        What sequences that were generated together share.
    faults : mapping
        From an alternative to the probabilities `(m, n)` of the tokens under m faults of its kind,
        which take logits to compute.

    Examples
    --------
    >>> row = Row(tokens=[0], p=torch.tensor([[0.5, 0.5]]))
    """

    tokens: Sequence[int]
    p: Tensor
    q: Tensor | None = None
    raw: Tensor | None = None
    suspected: Tensor | None = None
    prompt: Sequence[int] = ()
    steps: Sequence[int] | None = None
    cutoff_gaps: Mapping[int, CutoffGap] = field(default_factory=dict)
    continues: bool = False
    more: bool = False
    batch: int | str | None = None
    faults: Mapping[str, Tensor] = field(default_factory=dict)


def steps_between(steps: Sequence[int], start: int, stop: int) -> list[int]:
    """The tokens of each step among the tokens `start` to `stop`; a divided step has a part."""
    ends = np.cumsum(np.asarray(steps, dtype=np.int64)).clip(start, stop)
    return [int(size) for size in np.diff(ends, prepend=start) if size > 0]


class RowBets(NamedTuple):
    """The K bets on n tokens.

    alternatives    the name of each bet's alternative
    ratios          (n, K) r(x)/p(x)
    deviations      (n, J) deviations of J test functions from their expectation under p
    masks           (n, subsets) the subsets of tokens on which each bet is also made alone
    step_positions  (n,) each token's position in its step; -1 where steps are unknown
    """

    alternatives: list[str]
    ratios: Array
    deviations: Array
    masks: NDArray[np.bool_]
    step_positions: NDArray[np.int64]

    def without(self, ignored: Collection[str]) -> RowBets:
        kept = [number for number, name in enumerate(self.alternatives) if name not in ignored]
        return self._replace(alternatives=[self.alternatives[at] for at in kept], ratios=self.ratios[:, kept])


class Bets:
    """All bets, on row after row; `seed` is that of the transforms, `ends` are the end tokens."""

    def __init__(self, seed: int = 0, ends: Collection[int] = ()) -> None:
        self.random = np.random.default_rng([STREAM, seed])
        self.histograms = {name: Histogram() for name in ("along-p", "along-q/p", "along-ids")}
        self.frequencies = Frequencies()
        self.absences = Absences(ends)
        self.longest_step = 1
        self.sequence = _History()
        self.previous_p: Tensor | None = None  # p before the last token judged, `(1, vocab)`
        self.references: tuple[_History, _History] = (_History(), _History())
        self.last_with_prompt: dict[tuple[int, ...], _History] = {}
        self.last_in_batch: dict[int | str | None, _History] = {}
        self.first_token: Mixture | None = None
        self.whole_sequences: Mixture | None = None
        self.shared_tests = SharedTests()
        self.distant_noise = DistantNoise()

    def begin(self, prompt: Sequence[int], batch: int | str | None = None) -> None:
        """Begin a sequence, which is compared with the last one of its batch, or else with the one
        before. What is kept of earlier ones does not grow with the vocabulary."""
        self.frequencies.begin()
        self.shared_tests.begin()
        self.distant_noise.begin()
        if self.references[0].batch is None:
            self.references[0].races = []
        before, self.sequence, self.previous_p = self.sequence, _History(list(prompt), batch), None
        with_prompt = _exchanged(self.last_with_prompt, tuple(prompt), self.sequence)
        in_batch = None if batch is None else _exchanged(self.last_in_batch, batch, self.sequence)
        self.references = (in_batch or before, with_prompt or _History())
        if self.whole_sequences is not None:
            self.whole_sequences.learn()

    def bets_on(self, row: Row) -> RowBets:
        tokens = torch.as_tensor(row.tokens, device=row.p.device)
        row, q_interval, q_mass = _with_p_where_nothing_was_drafted(row), None, None
        p_interval = CumulativeMass(row.p).interval(tokens)
        if row.q is not None:
            q_mass = CumulativeMass(row.q)
            q_interval = q_mass.interval(tokens)
        condensed = self._condensed(row, tokens)
        deviations: list[Array] = []
        bets = [*self._on_alternatives(tokens, condensed, deviations)]
        bets += self._on_transforms(condensed, p_interval, deviations)
        biased, more = self.frequencies.bets(row.p, tokens)
        bets += [("token-bias", ratio) for ratio in biased]
        deviations += [*more]
        bets += self._on_reused_uniforms(tokens, p_interval, q_interval)
        bets += [("noise-of-texts", self._same_race(row.p, tokens))]
        bets += [("noise-of-texts", self.distant_noise.ratios(row.p, tokens, p_interval))]
        if row.steps is not None:
            bets += [("noise-of-steps", ratio) for ratio in self._carried(row, condensed, p_interval, q_interval)]
        if row.q is not None and q_mass is not None:
            within_step = within_step_ratios(row.p, row.q, tokens, q_mass)
            bets += zip(("one-uniform", "shared-noise", "not-clamped", "not-clamped"), within_step, strict=True)
        longest = self.longest_step
        masks, step_positions = self._subsets(row)
        if condensed.q is not None:
            places = step_positions, longest
            shared = self.shared_tests.ratios(condensed.p, condensed.q, condensed.cell, *places)
            bets += [("constant-uniform", shared)]
        own = row.p.gather(-1, tokens[:, None])[:, 0]
        if row.suspected is not None:
            bets += [("suspected-model", ratio_of(row.suspected.gather(-1, tokens[:, None])[:, 0], own))]
        bets += [(name, ratio_of(probs, own)) for name, faults in row.faults.items() for probs in faults]
        # Where one token alone is possible, as where an engine forces it, nothing was chosen.
        certain = ((row.p > 0).sum(dim=-1) == 1).numpy(force=True)
        bets = [(name, np.where(certain, 1.0, np.minimum(ratio, LARGEST))) for name, ratio in bets]
        bets += self._learnt(np.stack([ratio for name, ratio in bets if name not in DEPENDENCE], axis=1))
        never = self.absences.bets(row.p, tokens, len(self.sequence.tokens))
        bets += [("never-occurs", ratio) for ratio in never]
        self.sequence.extend(row, p_interval, q_interval, condensed)
        self.previous_p = row.p[-1:].clone()
        names, ratios = zip(*bets, strict=True)
        return RowBets(list(names), np.stack(ratios, 1), np.stack(deviations, 1), masks, step_positions)

    def _condensed(self, row: Row, tokens: Tensor) -> CondensedDistributions:
        first = row.p[:1] if self.previous_p is None else self.previous_p
        previous_p = torch.cat([first, row.p[:-1]])
        last = [*self.sequence.prompt, *self.sequence.tokens][-1:]
        return condense_distributions(tokens, row.p, previous_p, row.q, row.raw, previous_token=last[0] if last else 0)

    def _on_alternatives(
        self, tokens: Tensor, condensed: CondensedDistributions, deviations: list[Array]
    ) -> Iterator[tuple[str, Array]]:
        occurred = torch.nn.functional.pad(self.sequence.occurred(condensed.ids, tokens.cpu()), (0, 2))
        names, at_token = [], []
        for name, distributions in alternative_distributions(condensed, occurred):
            names += [name] * len(distributions)
            at_token.append(condensed.at_token(distributions))
            likelier = greater_mask(distributions, condensed.p)
            deviations += [
                *(condensed.at_token(likelier) - torch.linalg.vecdot(likelier, condensed.p)).numpy(force=True)
            ]
        # Dividing by the smallest float32 would overflow.
        p = condensed.at_token(condensed.p).double()
        quotients = torch.where(p > 0, torch.cat(at_token) / p.where(p > 0, 1.0), 1.0)
        ratios = quotients.clamp_max(LARGEST).numpy(force=True)
        yield from zip(names, ratios, strict=True)
        constant = [ratio for name, ratio in zip(names, ratios, strict=True) if name == "constant-uniform"]
        if constant:
            self.sequence.constant = self.sequence.constant or Mixture(np.ones(len(constant)))
            yield "constant-uniform", self.sequence.constant.mean(np.stack(constant, axis=1))

    def _learnt(self, ratios: Array) -> Iterator[tuple[str, Array]]:
        """Two mixtures of the bets `(n, K)`: on the first token of each sequence, weighted by what
        first tokens have shown, and on whole sequences, weighted by what earlier ones have."""
        bets = ratios.shape[1]
        if self.first_token is None or self.whole_sequences is None or len(self.first_token.counts) != bets:
            self.first_token = Mixture(np.ones(bets))
            self.whole_sequences = Mixture(20 * np.array([1 - WHOLE, *[WHOLE / bets] * bets]))
        first = np.ones(len(ratios))
        if not self.sequence.tokens:
            first[0] = self.first_token.mean(ratios[:1])[0]
        yield "first-token", first
        yield "whole-sequences", self.whole_sequences.mean(np.pad(ratios, ((0, 0), (1, 0)), constant_values=1.0))

    def _on_transforms(
        self, condensed: CondensedDistributions, p_interval: Interval, deviations: list[Array]
    ) -> Iterator[tuple[str, Array]]:
        w = self.random.random(len(p_interval.low))
        scores = {"along-p": condensed.p / condensed.sizes.clamp_min(1)}
        if condensed.q is not None:
            possible = condensed.p > 0
            scores["along-q/p"] = torch.where(possible, condensed.q / condensed.p.where(possible, 1.0), torch.inf)
        transforms = {name: transform(condensed.p, score, condensed.cell, w) for name, score in scores.items()}
        transforms["along-ids"] = np.clip(p_interval.low + w * p_interval.width, 0.0, 1.0)
        for name, u in transforms.items():
            bets = np.concatenate([fixed_bets(u), self.histograms[name].bets(u)], axis=1)
            for number, ratio in enumerate(bets.T):
                yield "tail-cut" if name == "along-p" and number in TOP_P_BETS else name, ratio
            below = (u[:, None] < np.array(EDGES)) - np.array(EDGES)
            deviations += [*below.T, *-below.T]

    def _on_reused_uniforms(
        self, tokens: Tensor, p_interval: Interval, q_interval: Interval | None
    ) -> Iterator[tuple[str, Array]]:
        """Compares with the tokens a few positions before, and at the same offset with the
        reference sequence and with the last one of the same prompt."""
        start, n = len(self.sequence.tokens), len(tokens)
        for model, interval in enumerate((p_interval, q_interval)):
            if interval is None:
                continue
            so_far = self.sequence.intervals(model, interval)
            for lag in LAGS:
                earlier = _take(so_far, start - lag + np.arange(n))
                yield "noise-of-steps", same_uniform_ratio(p_interval, earlier, interval)
            for reference in self.references:
                earlier = _take(reference.intervals(model), start + np.arange(n))
                yield "noise-of-texts", same_uniform_ratio(p_interval, earlier, interval)
        for reference in self.references:
            expected = np.full(n, -1)
            known = reference.tokens[start : start + n]
            expected[: len(known)] = known
            width = np.where(p_interval.width > 0, p_interval.width, 1.0)
            hit = np.where(expected == tokens.numpy(force=True), 1 / width, 0.0)
            yield "same-tokens", np.where(expected >= 0, hit, 1.0)

    def _same_race(self, p: Tensor, tokens: Tensor) -> Array:
        n, start, reference = len(tokens), len(self.sequence.tokens), self.references[0]
        ids, probs = reference.likely()
        at = slice(start, start + n)
        missing = n - len(ids[at])
        likely = Likely(np.pad(ids[at], ((0, missing), (0, 0))), np.pad(probs[at], ((0, missing), (0, 0))))
        before = np.pad(np.array(reference.tokens[at], dtype=np.int64), (0, missing))
        return same_race(p, tokens, before, likely, _take(reference.intervals(0), start + np.arange(n)).width)

    def _carried(
        self, row: Row, condensed: CondensedDistributions, p_interval: Interval, q_interval: Interval | None
    ) -> Iterator[Array]:
        """Bets that a uniform of the step before, which sampled or tested a token, is used again:
        at the same position, or its last one for the first."""
        assert row.steps is not None
        before, same, last = self.sequence.step, list[int](), list[int]()
        for size in row.steps:
            same += [before[0] + at if at < before[1] else -1 for at in range(size)]
            last += [before[0] + before[1] - 1, *[-1] * (size - 1)]
            before = (before[0] + before[1], size)
        self.sequence.step = before
        tested, test = self._tested(row, condensed)
        so_far = self.sequence.intervals(0, p_interval)
        for interval, model in ((p_interval, 0), (q_interval, 1)):
            if interval is not None:
                yield same_uniform_ratio(p_interval, _take(self.sequence.intervals(model, interval), same), interval)
                yield same_uniform_ratio(p_interval, _take(so_far, last), interval)
        if tested is not None and test is not None:
            self.sequence.tested = Interval(*map(np.concatenate, zip(self.sequence.tested, tested, strict=True)))
            for earlier in (_take(self.sequence.tested, same), _take(self.sequence.tested, last), _take(so_far, last)):
                yield test(earlier)

    def _tested(
        self, row: Row, condensed: CondensedDistributions
    ) -> tuple[Interval, Callable[[Interval], Array]] | tuple[None, None]:
        """The uniform that tested each draft token, as far as the tokens tell; and the bets given
        that."""
        if (q := condensed.q) is None or row.steps is None:
            return None, None
        step, p = Verification(condensed.p, q), condensed.at_token(condensed.p)
        weight = q * (1 - step.accept_prob)
        rejected = (weight * step.accept_prob).sum(dim=-1) / weight.sum(dim=-1).clamp_min(1e-30)
        high = condensed.at_token(step.accept_prob).double().numpy(force=True).copy()
        low, end, longest = np.zeros(len(high)), 0, self.longest_step
        for size in row.steps:
            end, full = end + size, size >= longest
            longest = max(longest, size)
            low[end - 1], high[end - 1] = (0.0, 0.0) if full else (float(rejected[end - 1]), 1.0)

        def bets(earlier: Interval) -> Array:
            below, width = (torch.from_numpy(one).to(p)[:, None] for one in (earlier.low, earlier.width))
            known = (width[:, 0] > 0) & (p > 0)
            chance = ((step.accept_prob - below) / width.where(width > 0, 1.0)).clamp(0, 1)
            accepted = q * chance
            r = accepted + (1 - accepted.sum(dim=-1, keepdim=True)).clamp_min(0) * step.residual
            ratio = condensed.at_token(r) / p.where(known, 1.0)
            return ratio.where(known, 1.0).double().numpy(force=True)

        return Interval(low, high), bets

    def _subsets(self, row: Row) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """The masks of `RowBets`: early and late tokens; with steps, the first, inner and last
        positions of a step, and the first one after a step of full length."""
        offset = len(self.sequence.tokens) + np.arange(len(row.tokens))
        masks = [offset < EARLY, offset >= LATE]
        if row.steps is None:
            return np.stack(masks, axis=1), np.full(len(offset), -1)
        positions: list[int] = []
        context: list[tuple[bool, int]] = []
        after_full = False
        for emitted in row.steps:
            positions += range(emitted)
            context += [(after_full, self.longest_step)] * emitted
            after_full = emitted >= self.longest_step > 1
            self.longest_step = max(self.longest_step, emitted)
        position = np.array(positions, dtype=np.int64)
        after, longest = np.array(context, dtype=np.int64).reshape(-1, 2).T
        masks += [position == 0, (position > 0) & (position < longest - 1), (position > 0) & (position == longest - 1)]
        return np.stack([*masks, (position == 0) & (after > 0)], axis=1), position


def _exchanged(last: dict[Any, _History], key: Any, sequence: _History) -> _History | None:
    """The last sequence of `key`, which `sequence` becomes now; forgets the key seen longest ago."""
    before = last.pop(key, None)
    last[key] = sequence
    if len(last) > KEPT:
        del last[next(iter(last))]
    return before


class Mixture:
    """A mixture of bets, weighted by `counts` and by what each has gained so far."""

    def __init__(self, counts: Array) -> None:
        self.counts = counts
        self.log_weight: Array = np.log(counts)

    def mean(self, ratios: Array) -> Array:
        """The mean `(n,)` of the bets `(n, K)`, each staked almost whole."""
        staked = np.log(0.05 + 0.95 * ratios)
        gained = self.log_weight + np.concatenate([np.zeros((1, ratios.shape[1])), staked.cumsum(axis=0)])
        self.log_weight = gained[-1]
        weight = np.exp(gained[:-1] - gained[:-1].max(axis=1, keepdims=True))
        mean: Array = (weight * np.exp(staked)).sum(axis=1) / weight.sum(axis=1)
        return mean

    def learn(self) -> None:
        """Begin a sequence; weights are how often each bet was right before."""
        weight = np.exp(self.log_weight - self.log_weight.max())
        self.counts = self.counts + weight / weight.sum()
        self.log_weight = np.log(self.counts)


class _History:
    """What is kept of a sequence: its tokens and the intervals of their uniforms under p and q.

    step      first token and size of the last step; `tested`: the uniforms that tested each token
    constant  the mixture of bets on one uniform for all tests
    """

    def __init__(self, prompt: list[int] | None = None, batch: int | str | None = None) -> None:
        self.prompt = prompt or []
        self.batch = batch
        self.tokens: list[int] = []
        self.pieces: tuple[list[Interval], list[Interval]] = ([], [])
        self.races: list[tuple[NDArray[np.int64], Array]] = []
        self.step = (0, 0)
        self.tested = Interval(np.empty(0), np.empty(0))
        self.constant: Mixture | None = None

    def extend(
        self, row: Row, p_interval: Interval, q_interval: Interval | None, condensed: CondensedDistributions
    ) -> None:
        self.tokens += [int(token) for token in row.tokens]
        self.pieces[0].append(p_interval)
        if q_interval is not None:
            self.pieces[1].append(q_interval)
        single = condensed.p[:, :-2]
        probs, at = single.topk(min(RACING, single.shape[1]), dim=-1, sorted=False)
        self.races.append((condensed.ids.gather(-1, at).int().numpy(), probs.float().numpy()))

    def likely(self) -> Likely:
        if not self.races:
            return Likely(np.empty((0, 0), np.int64), np.empty((0, 0)))
        return Likely(*(np.concatenate(column) for column in zip(*self.races, strict=True)))

    def intervals(self, model: int, more: Interval | None = None) -> Interval:
        parts = [*self.pieces[model], *([] if more is None else [more])]
        if not parts:
            return Interval(np.empty(0), np.empty(0))
        return Interval(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def occurred(self, ids: Tensor, tokens: Tensor) -> Tensor:
        """Which of `ids` `(n, H)` occur in the sequence before each of the next `tokens` `(n,)`."""
        known = torch.as_tensor([*self.prompt, *self.tokens], dtype=torch.int64, device=ids.device)
        vocab = int(max(ids.max(), tokens.max(), known.max() if len(known) else 0)) + 1
        first = torch.full((vocab,), len(tokens), device=ids.device)
        positions = torch.arange(len(tokens), device=ids.device)
        first.scatter_reduce_(0, tokens, positions + 1, "amin")
        first[known] = 0
        return first[ids] <= positions[:, None]


def _with_p_where_nothing_was_drafted(row: Row) -> Row:
    if row.q is None:
        return row
    mass = row.q.sum(dim=-1, keepdim=True)
    return replace(row, q=torch.where(mass > 0, row.q, row.p)) if bool((mass == 0).any()) else row


def _take(intervals: Interval, index: Sequence[int] | NDArray[np.int64]) -> Interval:
    """Entries `index` of the intervals; empty ones outside."""
    at = np.asarray(index, dtype=np.int64)
    inside = (at >= 0) & (at < len(intervals.low))
    low, high = (np.append(ends, 0.0)[np.where(inside, at, -1)] for ends in intervals)
    return Interval(low, high)
