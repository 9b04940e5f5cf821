"""Exact enumeration of speculative beam search: every tree that a drafter could propose, without
rounding.

Whether the result equals the target's own beam search depends on the drafter only through the tree.
So the function that the search calls is given every tree of a size, from every state of the
target's search. Probabilities are powers of 1/2 and scores are whole numbers of bits, so their sums
are exact in float64 and ties stay ties.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import torch
from beam_bugs import Rule
from torch import Tensor

from specnb.beam import Beams, BeamSettings, Path, advance, start, steps

Tree = tuple[tuple[Path, ...], ...]
"""Levels of paths; each path is a child of one in the level before."""


class DyadicLogProbs:
    """A random distribution over `vocab` tokens for each path, whose logarithms to base 2 are
    whole; a `LogProbs`."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.seed = vocab, seed
        self.bits = _sharp_and_flat(vocab)
        self.rows: dict[Path, Tensor] = {}

    def __call__(self, paths: Sequence[Path]) -> Tensor:
        return torch.stack([self._row(path) for path in paths])

    def keep(self, paths: Iterable[Path]) -> None:
        """All paths are kept."""

    def _row(self, path: Path) -> Tensor:
        if path not in self.rows:
            rng = np.random.default_rng([self.seed, len(path), *path])
            bits = self.bits[rng.integers(len(self.bits))]
            self.rows[path] = -torch.from_numpy(rng.permutation(bits)).double()
        return self.rows[path]


def _sharp_and_flat(vocab: int) -> list[list[int]]:
    """-log2 of the sharp distribution 1/2 1/4 1/8 ... and of the flattest one; each sums to 1 and
    has a tie."""
    bits = (vocab - 1).bit_length()
    short = 2**bits - vocab
    return [[*range(1, vocab), vocab - 1], [bits - 1] * short + [bits] * (vocab - short)]


def every_tree(state: Beams, vocab: int, width: int, gamma: int, settings: BeamSettings) -> Iterator[Tree]:
    """All trees below the running beams: in each of `gamma` levels, any `width` children of the
    level before."""
    levels = min(gamma, settings.max_new_tokens - 1 - len(state.paths[0]))
    yield from _grow((), state.paths, [token for token in range(vocab) if token not in settings.eos], width, levels)


def _grow(tree: Tree, last: tuple[Path, ...], tokens: list[int], width: int, levels: int) -> Iterator[Tree]:
    if levels == 0:
        yield tree
        return
    children = [(*path, token) for path in last for token in tokens]
    for level in combinations(children, min(width, len(children))):
        yield from _grow((*tree, level), level, tokens, width, levels - 1)


def trajectory(distributions: DyadicLogProbs, settings: BeamSettings) -> list[Beams]:
    """The states of the target's own beam search, from before its first level to its end."""
    return [start(), *(state for states in steps(distributions, settings) for state in states)]


class Enumeration(NamedTuple):
    """Counts over all states and trees.

    trees                  number of trees
    different              trees after which some state differed from the target's own search
    levels   (gamma + 1,)  trees after which the search was 1, ..., gamma + 1 levels further
    """

    trees: int
    different: int
    levels: np.ndarray


def enumerate_trees(
    distributions: DyadicLogProbs, settings: BeamSettings, width: int, gamma: int, rule: Rule = advance
) -> Enumeration:
    """Gives `rule` every tree from every state of the target's search and compares the states it
    returns."""
    states = trajectory(distributions, settings)
    levels = np.zeros(gamma + 1, dtype=np.int64)
    different = 0
    for at, state in enumerate(states[:-1]):
        for tree in every_tree(state, distributions.vocab, width, gamma, settings):
            paths = [*state.paths, *(path for level in tree for path in level)]
            reached = rule(state, dict(zip(paths, distributions(paths), strict=True)), settings)
            levels[len(reached) - 1] += 1
            expected = states[at + 1 : at + 1 + len(reached)]
            different += not (len(expected) == len(reached) and all(map(same, expected, reached)))
    return Enumeration(int(levels.sum()), different, levels)


def same(one: Beams, other: Beams) -> bool:
    """Whether two states are equal, their scores to the last bit."""
    return one[:1] + one[2:] == other[:1] + other[2:] and torch.equal(one.scores, other.scores)
