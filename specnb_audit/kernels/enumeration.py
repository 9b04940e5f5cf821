"""The distribution of what one step emits, found by asking the sampler with scripted random numbers.

Random numbers are of two kinds. A *uniform* is compared with thresholds; a *race* is a vector of standard exponentials
E, won by the token with the smallest E / weight (Gumbel noise and `torch.multinomial` are races). Neither thresholds
nor weights are assumed: where the emitted tokens change with a uniform is searched by halving intervals, and a token's
weight is the noise at which it stops to win against another. Searches look first at both sides of values that the token
rule would have, and halve intervals where those are wrong. It is assumed that all thresholds together form a grid of
cells, and that one race decides within a cell. Steps with all noise random are compared with what follows from that.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Generator, Mapping, Sequence
from itertools import islice, pairwise, product
from math import exp, prod
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.distributions import Conditional
from specnb.enumeration import Emissions, completed, draft_trees, joint_distribution
from specnb.trees import chain, independent_children

RESOLUTION = 2.0**-20  # width of the interval that a threshold is known to be in
EDGE, PARTS = RESOLUTION / 2, 8  # the smallest uniform, and the intervals that are looked at before any is searched
EVEN, FIRST, NEVER = 0.25, 1e-9, 1e12  # noise of all tokens, that with which a token wins, and with which it never does
FARTHEST, WEIGHTS = 16.0, 2.0**-19  # logarithm of the largest ratio of two weights, and how well it is known
ROUNDING, VISITED = 1e-6, 1e-4  # of sums in float32; the smallest probability of a prefix that is compared alone
SMALLEST = 1e-12  # weight in place of zero

Tokens = tuple[int, ...]
Noise = tuple[Sequence[float], Tensor]  # the uniforms of a step, and its races (races, vocab)
Change = tuple[float, float, Tokens, Tokens]  # an interval, and what is emitted at its ends


class Steps(NamedTuple):
    """Steps of a sampler, a row each: p (rows, gamma + 1, vocab), q (rows, gamma, vocab), draft tokens, and noise."""

    p: Tensor
    q: Tensor
    drafts: Tensor
    uniforms: Tensor  # (rows, uniforms)
    races: Tensor  # (rows, races, vocab)


class Found(NamedTuple):
    """What was found of one sampler.

    total_variation  between the distribution of emitted tokens, followed by the target's, and the target's alone
    resolution       how far that may be off, by the width of the intervals searched and rounding in float32
    prefix           after which the next token deviates most, by a total variation of `deviation`
    surprises        of `draws` steps with all noise random, those that emitted something else than predicted
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
        """`exact`, `deviates`, or `not understood` where steps with random noise were not as predicted."""
        if self.surprises:
            return "not understood"
        return "exact" if self.total_variation <= self.resolution else "deviates"


class Cell(NamedTuple):
    """The uniforms between some thresholds: there token v is emitted as `emitted[v]` if it wins `race` (-1: none)."""

    sides: tuple[tuple[float, float], ...]
    race: int
    emitted: list[Tokens]
    weights: Tensor


class Enumeration:
    """Enumerates steps of `sampler`, whose random numbers are named `uniforms` and `races`.

    sampler  from `Steps` to the tokens emitted by each (rows, gamma + 1), with -1 after the last
    p, q     the target's and the draft's distributions after each prefix; draft tokens have the probabilities of q
    drafted  races whose noise has sampled the draft token at a position, too, by their names

    >>> def plain(steps):  # samples a token of the target, and drops the draft tokens
    ...     return torch.nn.functional.pad((steps.races[:, :1] / steps.p[:, :1]).argmin(-1), (0, 1), value=-1)
    >>> p, q = (lambda prefix, row=row: torch.tensor(row).double() for row in ([0.1, 0.9], [0.5, 0.5]))
    >>> Enumeration(plain, p, q, 1, [], ["token"]).found().verdict
    'exact'
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

    def ask(self, rows: list[int], noise: list[Noise]) -> list[Tokens]:
        """What is emitted with the draft tokens of `rows` and this noise. Raises `ValueError` for what is no token."""
        uniforms = torch.tensor([one for one, _ in noise], dtype=torch.float64).reshape(len(rows), len(self.uniforms))
        races = torch.stack([race for _, race in noise])
        tokens = self.sampler(Steps(self.p[rows], self.drafts.q[rows], self.drafts.tokens[rows], uniforms, races))
        if tokens.min() < -1 or tokens.max() >= self.vocab:
            raise ValueError(f"emits {int(tokens.min())} to {int(tokens.max())}, with {self.vocab} tokens")
        lengths = (torch.arange(1, self.length + 1) * (tokens >= 0)).amax(1).tolist()
        return [tuple(row[:length]) for row, length in zip(tokens.tolist(), lengths, strict=True)]

    def found(self, draws: int = 500, seed: int = 1) -> Found:
        """What was found, with `draws` steps with random noise. Raises `ValueError` where two races decide at once."""
        walks = [self.walk(row) for row in range(len(self.p))]
        waiting, cells = {row: next(walk) for row, walk in enumerate(walks)}, dict[int, list[Cell]]()
        while waiting:  # the walks of all rows go on together, so that a batch has different rows
            noise = [(row, one) for row, asked in waiting.items() for one in asked]
            answers = iter(self.ask([row for row, _ in noise], [one for _, one in noise]))
            for row, asked in [*waiting.items()]:
                try:
                    waiting[row] = walks[row].send([next(answers) for _ in asked])
                except StopIteration as end:
                    cells[row] = end.value
                    del waiting[row]
        emitted = Emissions()
        for row, chance in enumerate(self.drafts.probability.tolist()):
            for cell in cells[row]:
                volume, weights = chance * prod(high - low for low, high in cell.sides), cell.weights
                if (at := self.drafted.get(cell.race)) is not None:
                    q, x = self.drafts.q[row, at], self.drafts.tokens[row, at]
                    weights = won_together(q, weights)[x] / q[x]
                for tokens, weight in zip(cell.emitted, weights.tolist(), strict=True):
                    emitted[tokens] = emitted.get(tokens, 0.0) + volume * weight
        thresholds = max(len({side for cell in one for side in cell.sides}) for one in cells.values())
        resolution = thresholds * RESOLUTION + self.vocab * WEIGHTS + ROUNDING
        return Found(*self.compared(emitted, resolution), self.surprises(cells, draws, seed), draws, self.decides)

    def walk(self, row: int) -> Generator[list[Noise], list[Tokens], list[Cell]]:
        """Finds the cells of one row: yields noise, and is sent what is emitted with it."""
        points = [EDGE + at * (1 - 2 * EDGE) / PARTS for at in range(PARTS + 1)]
        guesses, weights = self.guesses(row)
        edges = list[list[float]]()
        for column, name in enumerate(self.uniforms):
            inside = list[float]()
            for ends in product((points[0], points[-1]), repeat=len(self.uniforms) - 1):

                def noise(at: float, ends: tuple[float, ...] = ends, column: int = column) -> Noise:
                    return (*ends[:column], at, *ends[column:]), self.even

                parts = yield from search(points, (yield [*map(noise, points)]), guesses, RESOLUTION, noise)
                inside += [(low + high) / 2 for low, high, *_ in parts]
                self.decides[name] |= {_first_difference(*tokens) for _, _, *tokens in parts}
            apart = [high for low, high in pairwise([-1.0, *sorted(inside)]) if high - low > 2 * RESOLUTION]
            edges.append([0.0, *apart, 1.0])
        cells = list[Cell]()
        for sides in product(*map(pairwise, edges)):
            cells.append((yield from self.cell(sides, weights)))
        return cells

    def guesses(self, row: int) -> tuple[list[float], Tensor]:
        """Thresholds that exact rules have, and logarithms of the weights of their races (distributions, vocab)."""
        p, q = self.p[row], self.drafts.q[row]
        ratios = (p[:-1] / q).gather(1, self.drafts.tokens[row, :, None])
        left = torch.cat([p, (p[:-1] - q).clamp_min(0)])
        sums = left.cumsum(1) / left.sum(1, keepdim=True).clamp_min(SMALLEST)
        return torch.cat([ratios.flatten(), ratios.prod()[None], sums.flatten()]).sort()[0].tolist(), left.log()

    def cell(
        self, sides: tuple[tuple[float, float], ...], guessed: Tensor
    ) -> Generator[list[Noise], list[Tokens], Cell]:
        """What is emitted between these thresholds, and the weights of the race that decides it."""
        middle, winners = [sum(side) / 2 for side in sides], [*product(range(len(self.races)), range(self.vocab))]
        usual, *won = yield [
            (middle, self.even),
            *[(middle, self.raced(race, {token: FIRST})) for race, token in winners],
        ]
        other = {one: tokens for one, tokens in zip(winners, won, strict=True) if tokens != usual}
        races = {race for race, _ in other}
        if not races:
            return Cell(sides, -1, [usual], torch.ones(1))
        if len(races) > 1:
            raise ValueError("two races decide at once what a step emits")
        race = races.pop()
        self.decides[self.races[race]] |= {_first_difference(usual, tokens) for tokens in other.values()}
        emitted = [other.get((race, token), usual) for token in range(self.vocab)]
        reference, weights = emitted.index(usual), torch.zeros(self.vocab, dtype=torch.float64)
        weights[reference] = 1.0
        for _, token in other:

            def noise(at: float, token: int = token) -> Noise:
                two = {token: EVEN * exp(at / 2), reference: EVEN * exp(-at / 2)}
                return middle, self.raced(race, two, NEVER)

            ratios = sorted((guessed[:, token] - guessed[:, reference]).nan_to_num(NEVER).tolist())
            ends = [emitted[token], usual]
            ((low, high, *_),) = yield from search([-FARTHEST, FARTHEST], ends, ratios, WEIGHTS, noise)
            weights[token] = exp((low + high) / 2)
        return Cell(sides, race, emitted, weights / weights.sum())

    def raced(self, race: int, noise: Mapping[int, float], others: float = EVEN) -> Tensor:
        """Races that are even but for one, in which some tokens have this noise and the others another one."""
        races = self.even.clone()
        races[race] = torch.tensor([noise.get(token, others) for token in range(self.vocab)], dtype=torch.float64)
        return races

    def surprises(self, cells: dict[int, list[Cell]], draws: int, seed: int) -> int:
        """How many steps with random draft tokens and all noise random emit something else than predicted."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(len(self.p), (draws,), generator=generator).tolist()
        uniforms = torch.rand(draws, len(self.uniforms), generator=generator, dtype=torch.float64).tolist()
        races = -torch.rand(draws, *self.even.shape, generator=generator, dtype=torch.float64).log()
        noise, wrong = [*zip(uniforms, races, strict=True)], 0
        for row, (values, race), tokens in zip(rows, noise, self.ask(rows, noise), strict=True):
            cell = next(c for c in cells[row] if all(a <= x <= b for x, (a, b) in zip(values, c.sides, strict=True)))
            wrong += cell.emitted[int((race[cell.race] / cell.weights).argmin()) if cell.race >= 0 else 0] != tokens
        return wrong

    def compared(self, emitted: Emissions, resolution: float) -> tuple[float, float, Tokens, float]:
        """The first four fields of `Found`."""
        joint = completed({key: p for key, p in emitted.items() if key and -1 not in key}, self.target, self.length)
        off = (joint - joint_distribution(self.target, self.length)).abs().sum() + (1 - joint.sum()).clamp_min(0)
        found: dict[Tokens, float] = {(): 1.0}
        for prefix in [one for k in range(self.length) for one in product(range(self.vocab), repeat=k)]:
            after = joint[prefix].reshape(self.vocab, -1).sum(1)
            if after.sum() > VISITED:
                found[prefix] = float((after / after.sum() - self.target(prefix)).abs().sum() / 2)
        worst = max(found, key=lambda prefix: found[prefix])
        return float(off) / 2, resolution, worst, found[worst]


def search(
    points: Sequence[float], tokens: Sequence[Tokens], guesses: list[float], width: float,
    noise: Callable[[float], Noise],
) -> Generator[list[Noise], list[Tokens], list[Change]]:  # fmt: skip
    """The intervals no wider than `width` in which what is emitted changes, given `tokens` at some `points`."""
    parts = _changes(points, tokens)
    while any(looked := [_between(low, high, guesses, width) for low, high, *_ in parts]):
        answers = iter((yield [noise(at) for inner in looked for at in inner]))
        parts = [
            new
            for (low, high, one, other), inner in zip(parts, looked, strict=True)
            for new in _changes([low, *inner, high], [one, *islice(answers, len(inner)), other])
        ]
    return parts


def _between(low: float, high: float, guesses: list[float], width: float) -> list[float]:
    """Where to look in an interval: beside the middle one of the guesses in it, at its middle, or nowhere."""
    if high - low <= 1.01 * width:
        return []
    inside = guesses[bisect(guesses, low + width) : bisect(guesses, high - width)]
    guess = inside[len(inside) // 2] if inside else None
    return [(low + high) / 2] if guess is None else [guess - width / 2, guess + width / 2]


def _changes(points: Sequence[float], tokens: Sequence[Tokens]) -> list[Change]:
    pairs = zip(pairwise(points), pairwise(tokens), strict=True)
    return [(*side, *both) for side, both in pairs if both[0] != both[1]]


def won_together(one: Tensor, other: Tensor) -> Tensor:
    """The probability (vocab, vocab) that x wins with the weights `one` and y with `other`, the noise being the same.

    With r the ratio of the times at which they win, it is the integral of one[x] other[y] / s(r)^2 over the r from
    one[y] / other[y] to one[x] / other[x], where s(r) sums max(one, other r) over the tokens.

    >>> won_together(torch.tensor([0.5, 0.5]), torch.tensor([0.0, 1.0])).sum(1)
    tensor([0.5000, 0.5000])
    """
    other = other.clamp_min(SMALLEST)
    edges, order = (one / other).sort()
    sums = torch.maximum(one, other * edges[:, None]).sum(1)
    areas = torch.cat([torch.zeros_like(one[:1]), (edges.diff() / (sums[1:] * sums[:-1])).cumsum(0)])
    below = areas[order.argsort()]
    both = torch.maximum(one / one[:, None], other / other[:, None]).sum(1)
    return one[:, None] * other * (below[:, None] - below).clamp_min(0) + torch.diag(1 / both)


def _first_difference(one: Tokens, other: Tokens) -> int:
    return [*(a == b for a, b in zip(one, other, strict=False)), False].index(False)
