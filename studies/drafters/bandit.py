"""A draft length chosen for each step by a bandit, from the acceptance of earlier steps and a given
cost ratio.

`generate(gamma="auto")` forgets old steps, and can choose not to draft; notebooks compare both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specnb.drafters import ChainDrafter, Context, Proposal
from specnb.rules import Outcome
from studies.drafters.length import ShortenedDrafter


class BanditDrafter(ShortenedDrafter):
    """Chooses the number of draft tokens of each step among `lengths`, by upper confidence bounds
    (UCB1), in each row.

    The reward of a step is its number of tokens over its time, (accepted + 1) / (1 + n
    `cost_ratio`), divided by its largest value. The choice depends on earlier steps only, so the
    step stays exact. A row starts anew with its prompt: what it gets must not depend on other rows.
    `exploration` scales the confidence term. It counts every step, so nothing else may choose how
    many tokens are drafted: `gamma="auto"` is a fixed number for it.

    >>> from specnb.ngram import UniformDrafter
    >>> drafter = BanditDrafter(UniformDrafter(4), lengths=(1, 3), cost_ratio=0.1)
    >>> context = Context(torch.tensor([[1, 0, 0, 0]]), torch.tensor([1]))
    >>> drafter.start(context)
    >>> drafter.propose(context, torch.full((1, 3), 0.9)).draft_tokens
    tensor([[3]])
    """

    def __init__(
        self, drafter: ChainDrafter, lengths: tuple[int, ...], cost_ratio: float, exploration: float = 0.3
    ) -> None:
        super().__init__(drafter)
        self.every_step = True
        self.lengths, self.cost_ratio, self.exploration = lengths, cost_ratio, exploration
        self.largest_reward = max((n + 1) / (1 + n * cost_ratio) for n in lengths)

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        super().start(context, rows)
        if rows is None:
            shape, device = (len(context.lengths), len(self.lengths)), context.lengths.device
            self.arms = torch.tensor(self.lengths, device=device)
            self.pulls = torch.zeros(shape, dtype=torch.float64, device=device)
            self.rewards = torch.zeros_like(self.pulls)
        else:
            self.pulls[rows], self.rewards[rows] = 0.0, 0.0

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        self._choose()
        # Without this the drafter would be evaluated once more to learn that all rows have stopped.
        longest = min(int(self.limit.max()), uniforms.shape[1]) if context.readable else uniforms.shape[1]
        return super().propose(context, uniforms[:, :longest])

    def distribution(self, context: Context, position: int) -> Tensor:
        if position == 0:
            self._choose()
        # Evaluated after all rows have stopped too: in a mixture, drafting goes on, and a model
        # must see every token.
        return self.drafter.distribution(context, position).masked_fill((position >= self.limit)[:, None], 0.0)

    def _choose(self) -> None:
        """The number of draft tokens of this step, in each row."""
        total = self.pulls.sum(dim=1, keepdim=True).clamp_min(1)
        bound = self.rewards / self.pulls + self.exploration * (2 * total.log() / self.pulls).sqrt()
        self.arm = bound.where(self.pulls > 0, math.inf).argmax(dim=1)
        self.limit = self.arms[self.arm]

    def update(self, context: Context, outcome: Outcome) -> None:
        reward = (outcome.accepted + 1) / (1 + self.limit * self.cost_ratio) / self.largest_reward
        rows = torch.arange(len(self.arm), device=self.arm.device)
        self.pulls[rows, self.arm] += 1
        self.rewards[rows, self.arm] += reward.double()
        super().update(context, outcome)
