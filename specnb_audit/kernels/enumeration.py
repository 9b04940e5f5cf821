"""The distribution of what one step emits, found by asking the sampler with scripted random numbers.

Random numbers are of two kinds. A *uniform* is compared with thresholds; a *race* is a vector of standard exponentials
E, won by the token with the smallest E / weight (Gumbel noise and `torch.multinomial` are races). Neither thresholds
nor weights are assumed: where the emitted tokens change with a uniform is searched by halving intervals, and a token's
weight is the noise at which it stops to win against another. It is assumed that all thresholds together form a grid of
cells, and that one race decides within a cell. Steps with all noise random are compared with what follows from that.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise, product
from math import exp, prod
from typing import NamedTuple

import torch
from torch import Tensor

from specnb.distributions import Conditional
from specnb.enumeration import Emissions, completed, draft_trees, joint_distribution
from specnb.trees import chain, independent_children

RESOLUTION = 2.0**-20  # width of the interval that a threshold is known to be in
EDGE, PARTS = RESOLUTION / 2, 16  # the smallest uniform, and the intervals that are looked at before halving
FIRST, NEVER = 1e-9, 1e12  # noise with which a token wins, and with which it never does
FARTHEST, HALVINGS = 16.0, 25  # logarithm of the largest ratio of two weights, and halvings of the interval up to it
ROUNDING, VISITED = 1e-6, 1e-4  # of sums in float32; the smallest probability of a prefix that is compared alone

Tokens = tuple[int, ...]
Noise = tuple[Sequence[float], Tensor]  # the uniforms of a step, and its races (races, vocab)


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

    >>> def plain(steps):  # samples a token of the target, and drops the draft tokens
    ...     return torch.nn.functional.pad((steps.races[:, :1] / steps.p[:, :1]).argmin(-1), (0, 1), value=-1)
    >>> p, q = (lambda prefix, row=row: torch.tensor(row).double() for row in ([0.1, 0.9], [0.5, 0.5]))
    >>> Enumeration(plain, p, q, 1, [], ["token"]).found().verdict
    'exact'
    """

    def __init__(
        self, sampler: Callable[[Steps], Tensor], p: Conditional, q: Conditional, gamma: int, uniforms: list[str],
        races: list[str],
    ) -> None:  # fmt: skip
        self.sampler, self.target, self.uniforms, self.races = sampler, p, uniforms, races
        self.drafts = draft_trees(chain(gamma), q, independent_children)
        rows = [[p(tuple(row[:k])) for k in range(gamma + 1)] for row in self.drafts.tokens.tolist()]
        self.p = torch.stack([torch.stack(row) for row in rows])
        self.vocab, self.length = self.p.shape[2], gamma + 1
        self.even = torch.ones(len(races), self.vocab, dtype=torch.float64)
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

    def found(self, draws: int = 1000, seed: int = 1) -> Found:
        """What was found, with `draws` steps with random noise. Raises `ValueError` where two races decide at once."""
        walks = [self.walk() for _ in self.p]
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
                volume = chance * prod(high - low for low, high in cell.sides)
                for tokens, weight in zip(cell.emitted, cell.weights.tolist(), strict=True):
                    emitted[tokens] = emitted.get(tokens, 0.0) + volume * weight
        thresholds = max(len({side for cell in one for side in cell.sides}) for one in cells.values())
        resolution = thresholds * RESOLUTION + self.vocab * FARTHEST * 0.5 ** (HALVINGS - 1) + ROUNDING
        return Found(*self.compared(emitted, resolution), self.surprises(cells, draws, seed), draws, self.decides)

    def walk(self) -> Generator[list[Noise], list[Tokens], list[Cell]]:
        """Finds the cells of one row: yields noise, and is sent what is emitted with it."""
        points = [EDGE + at * (1 - 2 * EDGE) / PARTS for at in range(PARTS + 1)]
        edges = list[list[float]]()
        for column, name in enumerate(self.uniforms):
            inside = list[float]()
            for ends in product((points[0], points[-1]), repeat=len(self.uniforms) - 1):
                before, after = ends[:column], ends[column:]
                tokens = yield [((*before, point, *after), self.even) for point in points]
                parts = [*zip(pairwise(points), pairwise(tokens), strict=True)]
                while parts := [part for part in parts if part[1][0] != part[1][1]]:
                    if parts[0][0][1] - parts[0][0][0] <= RESOLUTION:
                        break
                    middles = [sum(side) / 2 for side, _ in parts]
                    tokens = yield [((*before, middle, *after), self.even) for middle in middles]
                    parts = [
                        half
                        for ((low, high), (one, other)), middle, now in zip(parts, middles, tokens, strict=True)
                        for half in (((low, middle), (one, now)), ((middle, high), (now, other)))
                    ]
                inside += [sum(side) / 2 for side, _ in parts]
                self.decides[name] |= {_first_difference(*tokens) for _, tokens in parts}
            apart = [high for low, high in pairwise([-1.0, *sorted(inside)]) if high - low > 2 * RESOLUTION]
            edges.append([0.0, *apart, 1.0])
        cells = list[Cell]()
        for sides in product(*map(pairwise, edges)):
            cells.append((yield from self.cell(sides)))
        return cells

    def cell(self, sides: tuple[tuple[float, float], ...]) -> Generator[list[Noise], list[Tokens], Cell]:
        """What is emitted between these thresholds, and the weights of the race that decides it."""
        middle, winners = [sum(side) / 2 for side in sides], [*product(range(len(self.races)), range(self.vocab))]
        usual, *won = yield [(middle, self.even), *[(middle, self.with_noise(*one, FIRST)) for one in winners]]
        other = {one: tokens for one, tokens in zip(winners, won, strict=True) if tokens != usual}
        races = {race for race, _ in other}
        if not races:
            return Cell(sides, -1, [usual], torch.ones(1))
        if len(races) > 1:
            raise ValueError("two races decide at once what a step emits")
        race = races.pop()
        self.decides[self.races[race]] |= {_first_difference(usual, tokens) for tokens in other.values()}
        emitted = [other.get((race, token), usual) for token in range(self.vocab)]
        reference = emitted.index(usual)
        ratios = {token: (-FARTHEST, FARTHEST) for _, token in other}
        for _ in range(HALVINGS):
            middles = {token: sum(side) / 2 for token, side in ratios.items()}
            noise = [self.with_noise(race, token, exp(at), reference) for token, at in middles.items()]
            tokens = yield [(middle, one) for one in noise]
            for (token, at), now in zip(middles.items(), tokens, strict=True):
                ratios[token] = (at, ratios[token][1]) if now == emitted[token] else (ratios[token][0], at)
        weights = torch.zeros(self.vocab, dtype=torch.float64)
        weights[[reference, *ratios]] = torch.tensor([1.0, *(exp(sum(side) / 2) for side in ratios.values())]).double()
        return Cell(sides, race, emitted, weights / weights.sum())

    def with_noise(self, race: int, token: int, noise: float, against: int | None = None) -> Tensor:
        """Races that are even but for one token of one; with `against`, no other token of that race can win."""
        races = self.even.clone()
        if against is not None:
            races[race] = torch.where(torch.arange(self.vocab) == against, 1.0, NEVER)
        races[race, token] = noise
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


def _first_difference(one: Tokens, other: Tokens) -> int:
    return [*(a == b for a, b in zip(one, other, strict=False)), False].index(False)
