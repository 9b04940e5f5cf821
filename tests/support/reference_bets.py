"""The bets of `specnb_audit.bets`, computed token by token, for float64 distributions.

What other modules compute (cells, alternative distributions, densities on the transform, frequencies, reuse within a
step) is taken from them; each has tests of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb_audit.alternatives import (
    UNIFORMS,
    CondensedDistributions,
    alternative_distributions,
    condense_distributions,
)
from specnb_audit.bets import Row
from specnb_audit.frequencies import Frequencies
from specnb_audit.uniforms import CumulativeMass, Histogram, fixed_bets, within_step_ratios

Array = NDArray[np.float64]
Ends = tuple[float, float]
Ratios = dict[str, list[Array]]


@dataclass
class Text:
    """A sequence begun: its prompt, its tokens, and the interval of each under p and q."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    intervals: dict[str, list[Ends]] = field(default_factory=lambda: {"p": [], "q": []})
    weights: Array = field(default_factory=lambda: np.ones(len(UNIFORMS)))
    last_p: Tensor | None = None


class ReferenceBets:
    """By alternative the ratios `(n,)` of its bets in order, and the deviations `(n,)` of all test functions."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng([int.from_bytes(b"specnb.audit", "big"), seed])
        self.histograms = {name: Histogram() for name in ("along-p", "along-q/p", "along-ids")}
        self.frequencies = Frequencies()
        self.texts: list[Text] = []
        self.references: list[Text | None] = []

    def begin(self, prompt: list[int]) -> None:
        self.frequencies.begin()
        same = [one for one in self.texts if one.prompt == prompt]
        self.references = [self.texts[-1] if self.texts else None, same[-1] if same else None]
        self.texts.append(Text(prompt))

    def bets_on(self, row: Row) -> tuple[Ratios, list[Array]]:
        now, tokens, q = self.texts[-1], list(row.tokens), row.q
        if q is not None:
            q = torch.stack([own if own.sum() > 0 else p for p, own in zip(row.p, q, strict=True)])
        chance = np.array([float(row.p[at, token]) for at, token in enumerate(tokens)])
        intervals = {"p": _intervals(row.p, tokens)} | ({} if q is None else {"q": _intervals(q, tokens)})
        previous = torch.cat([row.p[:1] if now.last_p is None else now.last_p, row.p[:-1]])
        last = [*now.prompt, *now.tokens][-1:] or [0]
        condensed = condense_distributions(torch.tensor(tokens), row.p, previous, q, row.raw, previous_token=last[0])
        ratios, deviations = _of_alternatives(now, tokens, condensed)
        deviations += self._of_transforms(ratios, condensed, intervals["p"])
        by_token, more = self.frequencies.bets(row.p, torch.tensor(tokens))
        ratios["token-bias"] = list(by_token)
        deviations += list(more)
        self._of_uniforms_used_again(ratios, tokens, chance, intervals)
        if q is not None:
            within = within_step_ratios(row.p, q, torch.tensor(tokens), CumulativeMass(q))
            ratios["one-uniform"], ratios["shared-noise"] = [within[0]], [within[1]]
        if row.suspected is not None:
            suspected = [float(row.suspected[at, token]) for at, token in enumerate(tokens)]
            ratios["suspected-model"] = [np.array(suspected) / chance]
        now.tokens += tokens
        for name, found in intervals.items():
            now.intervals[name] += found
        now.last_p = row.p[-1:]
        return ratios, deviations

    def _of_transforms(self, ratios: Ratios, condensed: CondensedDistributions, intervals: list[Ends]) -> list[Array]:
        w, p = self.random.random(len(intervals)), condensed.p
        per_token = torch.where(condensed.sizes > 0, p / condensed.sizes, 0.0)
        transformed = {"along-p": _transformed(condensed, per_token, w)}
        if condensed.q is not None:
            transformed["along-q/p"] = _transformed(condensed, torch.where(p > 0, condensed.q / p, torch.inf), w)
        transformed["along-ids"] = np.array([low + w[at] * (high - low) for at, (low, high) in enumerate(intervals)])
        deviations: list[Array] = []
        for name, u in transformed.items():
            fixed, learnt = fixed_bets(u).T, self.histograms[name].bets(u).T
            for number, bet in enumerate([*fixed, *learnt]):
                top_p = name == "along-p" and 3 <= number < 7  # on u below 0.5, 0.75, 0.9 and 0.95
                ratios.setdefault("tail-cut" if top_p else name, []).append(bet)
            below = [np.where(u < edge, 1 - edge, -edge) for edge in (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95)]
            deviations += [*below, *(-one for one in below)]
        return deviations

    def _of_uniforms_used_again(
        self, ratios: Ratios, tokens: list[int], chance: Array, intervals: dict[str, list[Ends]]
    ) -> None:
        now, before, n = self.texts[-1], len(self.texts[-1].tokens), len(tokens)
        for name, own in intervals.items():
            whole = [*now.intervals[name], *own]
            for lag in range(1, 7):
                earlier = [whole[before + at - lag] if before + at >= lag else None for at in range(n)]
                ratios.setdefault("noise-of-steps", []).append(_same_uniform(earlier, own, chance))
            for one in self.references:
                there = [] if one is None else one.intervals[name]
                earlier = [there[before + at] if before + at < len(there) else None for at in range(n)]
                ratios.setdefault("noise-of-texts", []).append(_same_uniform(earlier, own, chance))
        for one in self.references:
            text = [] if one is None else one.tokens
            expected = [text[before + at] if before + at < len(text) else None for at in range(n)]
            ratio = [1.0 if x is None else (x == tokens[at]) / chance[at] for at, x in enumerate(expected)]
            ratios.setdefault("same-tokens", []).append(np.array(ratio))


def _intervals(probs: Tensor, tokens: list[int]) -> list[Ends]:
    cumulated = probs.numpy().cumsum(axis=1)
    ends = zip(cumulated, tokens, strict=True)
    return [((line[token - 1] if token else 0.0) / line[-1], line[token] / line[-1]) for line, token in ends]


def _transformed(condensed: CondensedDistributions, score: Tensor, w: Array) -> Array:
    """The probability of the cells with a larger score, and w times that of those with the same."""
    found, p = [], condensed.p
    for at, cell in enumerate(condensed.cell.tolist()):
        own = score[at, cell]
        found.append(float(p[at][score[at] > own].sum()) + w[at] * float(p[at][score[at] == own].sum()))
    return np.array(found)


def _of_alternatives(now: Text, tokens: list[int], condensed: CondensedDistributions) -> tuple[Ratios, list[Array]]:
    n, known, cells = len(tokens), [*now.prompt, *now.tokens], condensed.cell.tolist()
    occurred = torch.zeros_like(condensed.p, dtype=torch.bool)
    for at in range(n):
        for number, token in enumerate(condensed.ids[at].tolist()):
            occurred[at, number] = token in [*known, *tokens[:at]]
    chance = np.array([float(condensed.p[at, cell]) for at, cell in enumerate(cells)])
    ratios: Ratios = {}
    deviations = []
    for name, distributions in alternative_distributions(condensed, occurred):
        for r in distributions:
            at_token = np.array([float(r[at, cell]) for at, cell in enumerate(cells)])
            ratios.setdefault(name, []).append(at_token / chance)
            likelier = (r > condensed.p).double()
            mean = [float(likelier[at] @ condensed.p[at]) for at in range(n)]
            deviations.append(np.array([float(likelier[at, cell]) for at, cell in enumerate(cells)]) - mean)
    if condensed.q is not None:
        ratios["constant-uniform"].append(_mixture(now, np.stack(ratios["constant-uniform"], axis=1)))
    return ratios, deviations


def _mixture(now: Text, ratios: Array) -> Array:
    mixed = []
    for staked in 0.05 + 0.95 * ratios:
        mixed.append((now.weights * staked).sum() / now.weights.sum())
        now.weights = now.weights * staked
    return np.array(mixed)


def _same_uniform(earlier: Sequence[Ends | None], intervals: list[Ends], chance: Array) -> Array:
    found = []
    for at, ((low, high), one) in enumerate(zip(intervals, earlier, strict=True)):
        shared = 0.0 if one is None else max(0.0, min(high, one[1]) - max(low, one[0]))
        found.append(1.0 if one is None else shared / (one[1] - one[0]) / chance[at])
    return np.array(found)
