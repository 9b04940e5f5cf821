"""The joint distribution of a step with a drafter that samples from a table, enumerated."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specnb.distributions import Conditional
from specnb.drafters import ChainDrafter, Context, Drafter
from specnb.enumeration import completed, drafter_step_distribution, drafts_of, joint_distribution

VOCAB, GAMMA, PREFIX = 3, 2, (0,)


class TableDrafter(ChainDrafter):
    """Samples from `table` `(vocab, vocab)`, given the token before."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.vocab = table, table.shape[1]

    def distribution(self, context: Context, position: int) -> Tensor:
        return self.table[context.newest]


class Case(NamedTuple):
    """The drafter made of a table, and a remark."""

    drafter: Callable[[Tensor], Drafter]
    why: str


def deviation(case: Case, seed: int) -> tuple[float, float]:
    """The total variation of a step from the target, and the mean number of draft tokens, on one
    pair."""
    p, table = random_pair(seed)
    emitted = drafter_step_distribution(case.drafter(table), p, PREFIX, GAMMA)
    difference = completed(emitted, p, GAMMA + 1) - joint_distribution(p, GAMMA + 1)
    drafts = drafts_of(case.drafter(table), PREFIX, GAMMA)
    drafted = float(drafts.probability @ (drafts.tokens >= 0).sum(1).double())
    return float(difference.abs().sum()) / 2, drafted


def random_pair(seed: int) -> tuple[Conditional, Tensor]:
    """p, different in each context, and the drafter's table; no probability below 0.02."""

    @cache
    def p(context: tuple[int, ...]) -> Tensor:
        return _dense(np.random.default_rng([seed, 0, len(context), *context]))

    generator = np.random.default_rng([seed, 1])
    return p, torch.stack([_dense(generator) for _ in range(VOCAB)])


def _dense(generator: np.random.Generator) -> Tensor:
    return torch.from_numpy(0.06 / VOCAB + 0.94 * generator.dirichlet(np.ones(VOCAB)))
