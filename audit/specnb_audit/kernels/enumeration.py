"""The distribution of what one step emits, found by asking the sampler with scripted random
numbers.

A *uniform* is compared with thresholds; a *race* is a vector of standard exponentials E, won by the
token with the smallest E / weight (Gumbel noise and `torch.multinomial` are races). Neither
thresholds nor weights are assumed: where the emitted tokens change with a uniform is searched by
halving intervals, beginning beside the values that the token rule would have, and a token's weight
is the noise at which it stops to win. It is assumed that all thresholds form a grid of cells, and
that one race decides within a cell; steps with all noise random are compared with what follows.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import islice, pairwise, product
from math import exp, prod
from operator import eq
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specnb.distributions import Conditional
from specnb.enumeration import Emissions, completed, draft_trees, joint_distribution
from specnb.trees import chain, independent_children

RESOLUTION = 2.0**-20  # width of the interval that a threshold is known to be in
# The smallest uniform, and the intervals that are looked at before any is searched.
EDGE, PARTS = RESOLUTION / 2, 8
EVEN, FIRST, NEVER = (
    2.0**-8,
    1e-9,
    1e12,
)  # noise of all tokens, that with which a token wins, and with which it never does
# Logarithm of the largest ratio of two weights, and how well it is known.
FARTHEST, WEIGHTS = 16.0, 2.0**-19
# Of sums in float32; probability of a prefix compared alone; weight.
ROUNDING, VISITED, SMALLEST = 1e-6, 1e-4, 1e-12

Tokens = tuple[int, ...]
Noise = tuple[Sequence[float], Tensor]  # the uniforms of a step, and its races (races, vocab)
Ask = Callable[[list[float]], list[Tokens]]
Change = tuple[float, float, Tokens, Tokens]  # an interval, and what is emitted at its ends


def random_distributions(vocab: int, *key: int) -> Conditional:
    """A different random distribution for every context; each `key` has its own.

    >>> random_distributions(2, 7)((0, 1)).sum().item()
    1.0
    """

    @cache
    def probs(context: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(np.random.default_rng([*key, len(context), *context]).dirichlet(np.ones(vocab)))

    return probs


class Steps(NamedTuple):
    """Steps of a sampler, a row each: p (rows, gamma + 1, vocab), q (rows, gamma, vocab), draft
    tokens, noise."""

    p: Tensor
    q: Tensor
    drafts: Tensor
    uniforms: Tensor  # (rows, uniforms)
    races: Tensor  # (rows, races, vocab)


class Found(NamedTuple):
    """What was found of one sampler.

    total_variation  between the joint distributions of emitted tokens and of the target's own
    resolution       how far that may be off
    prefix           after which the next token deviates most, by `deviation`
    surprises        of `draws` steps with all noise random, those with another result than
    predicted
    decides          for each random number, the positions at which a token depends on it
    """

    total_variation: float
    resolution: float
    prefix: Tokens
    deviation: float
    surprises: int
    draws: int
    decides: dict[str, set[int]]

    @property
    def verdict(self) -> str:
        """`exact`, `deviates`, or `not understood` after surprises."""
        if self.surprises:
            return "not understood"
        return "exact" if self.total_variation <= self.resolution else "deviates"


class Cell(NamedTuple):
    """Uniforms between some thresholds: token v is emitted as `emitted[v]` if it wins `race` (-1:
    none)."""

    sides: tuple[tuple[float, float], ...]
    race: int
    emitted: list[Tokens]
    weights: Tensor


class Enumeration:
    """Enumerates steps of `sampler`, whose random numbers are named `uniforms` and `races`.

    sampler  from `Steps` to the tokens emitted by each (rows, gamma + 1), with -1 after the last
    p, q     distributions after each prefix; draft tokens have the probabilities of q
    drafted  races whose noise has sampled the draft token at a position, too
    """

    def __init__(
        self, sampler: Callable[[Steps], Tensor], p: Conditional, q: Conditional, gamma: int, uniforms: list[str],
        races: list[str], drafted: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self.sampler, self.target, self.uniforms, self.races = sampler, p, uniforms, races
        self.drafted = {races.index(name): at for name, at in (drafted or {}).items()}
        self.drafts = draft_trees(chain(gamma), q, independent_children)
        rows = [[p(tuple(row[:k])) for k in range(gamma + 1)] for row in self.drafts.tokens.tolist()]
        self.p = torch.stack([torch.stack(row) for row in rows])
        self.vocab, self.length = self.p.shape[2], gamma + 1
        self.even = torch.full((len(races), self.vocab), EVEN, dtype=torch.float64)
        self.decides: dict[str, set[int]] = {name: set() for name in [*uniforms, *races]}

    def ask(self, row: int, noise: list[Noise]) -> list[Tokens]:
        """What is emitted with the draft tokens of one row; a step with others is before them."""
        return self.emitted([(row + 1) % len(self.p), *[row] * len(noise)], [*noise[:1], *noise])[1:]

    def emitted(self, rows: list[int], noise: list[Noise]) -> list[Tokens]:
        uniforms = torch.tensor([one for one, _ in noise], dtype=torch.float64).reshape(len(rows), len(self.uniforms))
        races = torch.stack([race for _, race in noise])
        tokens = self.sampler(Steps(self.p[rows], self.drafts.q[rows], self.drafts.tokens[rows], uniforms, races))
        if tokens.min() < -1 or tokens.max() >= self.vocab:
            raise ValueError(f"emits {int(tokens.min())} to {int(tokens.max())}, with {self.vocab} tokens")
        lengths = (torch.arange(1, self.length + 1) * (tokens >= 0)).amax(1).tolist()
        return [tuple(row[:length]) for row, length in zip(tokens.tolist(), lengths, strict=True)]

    def found(self, draws: int = 500, seed: int = 1) -> Found:
        """What was found, with `draws` random steps. Raises `ValueError` where two races decide at
        once."""
        cells = [self.cells(row) for row in range(len(self.p))]
        emitted = Emissions()
        for row, chance in enumerate(self.drafts.probability.tolist()):
            for cell in cells[row]:
                volume, weights = chance * prod(high - low for low, high in cell.sides), cell.weights
                if (at := self.drafted.get(cell.race)) is not None:
                    q, x = self.drafts.q[row, at], self.drafts.tokens[row, at]
                    weights = won_together(q, weights)[x] / q[x]
                for tokens, weight in zip(cell.emitted, weights.tolist(), strict=True):
                    emitted[tokens] = emitted.get(tokens, 0.0) + volume * weight
        thresholds = max(len({side for cell in one for side in cell.sides}) for one in cells)
        resolution = thresholds * RESOLUTION + self.vocab * WEIGHTS + ROUNDING
        return Found(*self.compared(emitted, resolution), self.surprises(cells, draws, seed), draws, self.decides)

    def cells(self, row: int) -> list[Cell]:
        points = [EDGE + at * (1 - 2 * EDGE) / PARTS for at in range(PARTS + 1)]
        guesses, weights = self.guesses(row)
        edges = list[list[float]]()
        for column, name in enumerate(self.uniforms):
            inside = list[float]()
            for ends in product((points[0], points[-1]), repeat=len(self.uniforms) - 1):

                def ask(at: list[float], ends: tuple[float, ...] = ends, column: int = column) -> list[Tokens]:
                    return self.ask(row, [((*ends[:column], one, *ends[column:]), self.even) for one in at])

                parts = search(points, ask, guesses, RESOLUTION)
                inside += [(low + high) / 2 for low, high, *_ in parts]
                self.decides[name] |= {[*map(eq, one, other), False].index(False) for _, _, one, other in parts}
            apart = [high for low, high in pairwise([-1.0, *sorted(inside)]) if high - low > 2 * RESOLUTION]
            edges.append([0.0, *apart, 1.0])
        return [self.cell(row, sides, weights) for sides in product(*map(pairwise, edges))]

    def guesses(self, row: int) -> tuple[list[float], Tensor]:
        """Thresholds that exact rules have, and logarithms of the weights of their races."""
        p, q = self.p[row], self.drafts.q[row]
        ratios = (p[:-1] / q).gather(1, self.drafts.tokens[row, :, None])
        left = torch.cat([p, (p[:-1] - q).clamp_min(0)])
        sums = left.cumsum(1) / left.sum(1, keepdim=True).clamp_min(SMALLEST)
        return torch.cat([ratios.flatten(), ratios.prod()[None], sums.flatten()]).sort()[0].tolist(), left.log()

    def cell(self, row: int, sides: tuple[tuple[float, float], ...], guessed: Tensor) -> Cell:
        """What is emitted between these thresholds, and the weights of the race that decides it."""
        middle, winners = [sum(side) / 2 for side in sides], [*product(range(len(self.races)), range(self.vocab))]
        first: list[Noise] = [(middle, self.raced(race, {token: FIRST})) for race, token in winners]
        usual, *changed = self.ask(row, [(middle, self.even), *first])
        other = {one: tokens for one, tokens in zip(winners, changed, strict=True) if tokens != usual}
        races = {race for race, _ in other}
        if not races:
            return Cell(sides, -1, [usual], torch.ones(1))
        if len(races) > 1:
            raise ValueError("two races decide at once what a step emits")
        race = races.pop()
        self.decides[self.races[race]] |= {[*map(eq, usual, won), False].index(False) for won in other.values()}
        emitted = [other.get((race, token), usual) for token in range(self.vocab)]
        first = [(middle, self.raced(race, {token: FIRST, min(other)[1]: EVEN}, NEVER)) for token in range(self.vocab)]
        reference, weights = self.ask(row, first).index(usual), torch.zeros(self.vocab, dtype=torch.float64)
        # It wins: that the others change nothing may be because their weight is zero.
        weights[reference] = 1.0
        for _, token in other:

            def ask(at: list[float], token: int = token) -> list[Tokens]:
                two = [{token: EVEN * exp(one / 2), reference: EVEN * exp(-one / 2)} for one in at]
                return self.ask(row, [(middle, self.raced(race, noise, NEVER)) for noise in two])

            ratios = sorted((guessed[:, token] - guessed[:, reference]).nan_to_num(NEVER).tolist())
            (low, high, *_), *_ = search([-FARTHEST, FARTHEST], ask, ratios, WEIGHTS)
            weights[token] = exp((low + high) / 2)
        return Cell(sides, race, emitted, weights / weights.sum())

    def raced(self, race: int, noise: Mapping[int, float], others: float = EVEN) -> Tensor:
        """Races that are even but for one, in which some tokens have this noise and the others
        another."""
        races = self.even.clone()
        races[race] = torch.tensor([noise.get(token, others) for token in range(self.vocab)], dtype=torch.float64)
        return races

    def surprises(self, cells: list[list[Cell]], draws: int, seed: int) -> int:
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(len(self.p), (draws,), generator=generator).tolist()
        uniforms = torch.rand(draws, len(self.uniforms), generator=generator, dtype=torch.float64).tolist()
        races = -torch.rand(draws, *self.even.shape, generator=generator, dtype=torch.float64).log()
        noise, wrong = [*zip(uniforms, races, strict=True)], 0
        for row, (values, race), tokens in zip(rows, noise, self.emitted(rows, noise), strict=True):
            cell = next(c for c in cells[row] if all(a <= x <= b for x, (a, b) in zip(values, c.sides, strict=True)))
            wrong += cell.emitted[int((race[cell.race] / cell.weights).argmin()) if cell.race >= 0 else 0] != tokens
        return wrong

    def compared(self, emitted: Emissions, resolution: float) -> tuple[float, float, Tokens, float]:
        joint = completed({key: p for key, p in emitted.items() if key and -1 not in key}, self.target, self.length)
        off = (joint - joint_distribution(self.target, self.length)).abs().sum() + (1 - joint.sum()).clamp_min(0)
        found: dict[Tokens, float] = {(): 1.0}
        for prefix in [one for k in range(self.length) for one in product(range(self.vocab), repeat=k)]:
            after = joint[prefix].reshape(self.vocab, -1).sum(1)
            if after.sum() > VISITED:
                found[prefix] = float((after / after.sum() - self.target(prefix)).abs().sum() / 2)
        worst = max(found, key=lambda prefix: found[prefix])
        return float(off) / 2, resolution, worst, found[worst]


def search(points: list[float], ask: Ask, guesses: list[float], width: float) -> list[Change]:
    """The intervals between `points`, no wider than `width`, in which what is emitted changes."""
    parts = _changes(points, ask(points))
    while any(looked := [_between(low, high, guesses, width) for low, high, *_ in parts]):
        answers = iter(ask([at for inner in looked for at in inner]))
        parts = [
            new
            for (low, high, one, other), inner in zip(parts, looked, strict=True)
            for new in _changes([low, *inner, high], [one, *islice(answers, len(inner)), other])
        ]
    return parts


def _between(low: float, high: float, guesses: list[float], width: float) -> list[float]:
    """Where to look in an interval: beside the middle guess in it, at its middle, or nowhere."""
    if high - low <= 1.01 * width:
        return []
    inside = guesses[bisect(guesses, low + width) : bisect(guesses, high - width)]
    return [inside[len(inside) // 2] + side * width / 2 for side in (-1, 1)] if inside else [(low + high) / 2]


def _changes(points: list[float], tokens: list[Tokens]) -> list[Change]:
    pairs = zip(pairwise(points), pairwise(tokens), strict=True)
    return [(*side, *both) for side, both in pairs if both[0] != both[1]]


def won_together(one: Tensor, other: Tensor) -> Tensor:
    """The probability (vocab, vocab) that x wins with the weights `one` and y with `other`, by one
    noise.

    With r the ratio of the times at which they win, it is the integral of one[x] other[y] / s(r)^2
    over r from one[y] / other[y] to one[x] / other[x], where s(r) sums max(one, other r).
    """
    other = other.clamp_min(SMALLEST)
    edges, order = (one / other).sort()
    sums = torch.maximum(one, other * edges[:, None]).sum(1)
    areas = torch.cat([torch.zeros_like(one[:1]), (edges.diff() / (sums[1:] * sums[:-1])).cumsum(0)])
    below = areas[order.argsort()]
    both = torch.maximum(one / one[:, None], other / other[:, None]).sum(1)
    return one[:, None] * other * (below[:, None] - below).clamp_min(0) + torch.diag(1 / both)
