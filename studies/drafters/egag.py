"""EGAG: the draft length of a step, from the normalised entropy of the draft's distribution at its
beginning.

The implementation document (section 7) describes it: the entropy of the drafter's logits sets
gamma, between bounds. What it leaves open is chosen here: a straight line between the bounds, and
an exponential average.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specnb.drafters import ChainDrafter, Context
from studies.drafters.length import ShortenedDrafter


class EntropyGuidedDrafter(ShortenedDrafter):
    """Drafts `least` to `most` tokens a step: fewer, the higher the averaged entropy of q over
    log(vocabulary).

    The length of a step is settled before its first draft token is sampled, so the step stays
    exact. A row starts anew with its prompt. `history` has the averaged entropies `(rows,)` and the
    lengths `(rows,)` of every step.

    >>> from specnb.ngram import UniformDrafter
    >>> drafter = EntropyGuidedDrafter(UniformDrafter(4), least=1, most=3)
    >>> context = Context(torch.tensor([[1, 0, 0, 0]]), torch.tensor([1]))
    >>> drafter.start(context)
    >>> drafter.propose(context, torch.full((1, 3), 0.9)).draft_tokens
    tensor([[3]])
    >>> entropy, length = drafter.history[0]
    >>> round(float(entropy), 6), int(length)
    (1.0, 1)
    """

    def __init__(self, drafter: ChainDrafter, least: int = 1, most: int = 8, newest: float = 0.5) -> None:
        super().__init__(drafter)
        self.every_step = True
        self.least, self.most, self.newest = least, most, newest
        self.history: list[tuple[Tensor, Tensor]] = []

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        super().start(context, rows)
        if rows is None:
            self.average = context.lengths.new_full((len(context.lengths),), math.nan, dtype=torch.float64)
        else:
            self.average[rows] = math.nan

    def distribution(self, context: Context, position: int) -> Tensor:
        q = self.drafter.distribution(context, position)
        if position == 0:
            entropy = -torch.xlogy(q, q).sum(dim=-1).double() / math.log(q.shape[-1])
            averaged = self.newest * entropy + (1 - self.newest) * self.average
            self.average = averaged.where(self.average.isfinite(), entropy)
            length = self.most - (self.most - self.least) * self.average
            self.limit = length.round().long().clamp(self.least, self.most)
            self.history.append((self.average, self.limit))
        return q.masked_fill((position >= self.limit)[:, None], 0.0)
