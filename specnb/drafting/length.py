"""Adaptive length: drafts that end before gamma tokens, decided before the next token is sampled.

A stopping rule reads the distribution that the next draft token would be sampled from, and the probabilities of the
draft tokens that are kept. It does not read the token itself, so the step stays exact
(`studies.drafters.stopping_rules` enumerates it, and what goes wrong otherwise). A rule is a value, a frozen
dataclass, and a pure function:

    q            (rows, vocab)     the distribution of the next draft token
    token_probs  (rows, position)  the probability under q of each draft token so far
    returns      (rows,) bool      whether to stop
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specnb.drafting.base import ChainDrafter, Context, Proposal, padded, require_part
from specnb.number_checks import require_number, require_whole
from specnb.rules import Outcome

StoppingRule = Callable[[Tensor, Tensor], Tensor]
"""`(q, token_probs) -> stop`, see the module."""


@dataclass(frozen=True)
class LowConfidence:
    """Stop where the largest probability of q is below `threshold`.

    >>> LowConfidence(0.5)(torch.tensor([[0.4, 0.3, 0.3], [0.6, 0.4, 0.0]]), torch.ones(2, 0))
    tensor([ True, False])
    """

    threshold: float

    def __call__(self, q: Tensor, token_probs: Tensor) -> Tensor:
        return q.amax(dim=-1) < self.threshold


@dataclass(frozen=True)
class HighEntropy:
    """Stop where 1 - sqrt(`scale` H(q)), with the entropy H in nats, is below `threshold`.

    AdaEDL (2410.18351) uses this expression as a lower bound of the acceptance probability; section 6 of the paper
    mentions a length that depends on the entropy.

    >>> HighEntropy(0.5, 0.5)(torch.tensor([[0.5, 0.5], [1.0, 0.0]]), torch.ones(2, 0))
    tensor([ True, False])
    """

    scale: float = 0.2
    threshold: float = 0.4

    def __call__(self, q: Tensor, token_probs: Tensor) -> Tensor:
        entropy = -torch.xlogy(q, q).sum(dim=-1)
        return 1 - (self.scale * entropy).clamp_min(0).sqrt() < self.threshold


class ShortenedDrafter(ChainDrafter):
    """The draft tokens of another drafter, of which a subclass leaves out the last ones."""

    def __init__(self, drafter: ChainDrafter) -> None:
        require_part("drafter", drafter)
        self.drafter = drafter
        self.vocab, self.draft_model, self.hidden_layers = drafter.vocab, drafter.draft_model, drafter.hidden_layers
        self.can_refill = drafter.can_refill

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.drafter.start(context, rows)

    def update(self, context: Context, outcome: Outcome) -> None:
        self.drafter.update(context, outcome)


class StoppingDrafter(ShortenedDrafter):
    """The draft tokens of `drafter` until `stop` says so in a row; the first one is always proposed if `at_least` is 1.

    The draft tokens saved cost no draft forward pass when all rows of the batch have stopped (on the CPU); the target's
    forward pass is over gamma + 1 tokens in any case, because its shape is fixed.

    Raises `ValueError` for an `at_least` that is no whole number from 0, `TypeError` for a drafter that is no
    `ChainDrafter` and a `stop` that cannot be called.

    >>> from specnb.drafting.ngram import UniformDrafter
    >>> drafter = StoppingDrafter(UniformDrafter(4), LowConfidence(0.5), at_least=1)
    >>> context = Context(torch.tensor([[1, 0, 0, 0]]), torch.tensor([1]))
    >>> drafter.propose(context, torch.full((1, 3), 0.9)).draft_tokens
    tensor([[ 3, -1, -1]])
    """

    last: Tensor
    token_probs: Tensor

    def __init__(self, drafter: ChainDrafter, stop: StoppingRule, at_least: int = 0) -> None:
        super().__init__(drafter)
        require_whole(at_least=(at_least, 0))
        if not callable(stop):
            raise TypeError(f"stop is {stop!r}; it must be a stopping rule, such as LowConfidence(0.4)")
        self.stop, self.at_least = stop, at_least

    def distribution(self, context: Context, position: int) -> Tensor:
        q = self.drafter.distribution(context, position)
        if position == 0:  # not in `propose`, which nobody calls if this drafter is part of another
            self.token_probs = q.new_zeros(len(q), 0, dtype=torch.float64)
        else:
            newest = self.last.gather(1, context.newest[:, None])
            self.token_probs = torch.cat([self.token_probs, newest.double()], dim=1)
        self.last = q
        if position < self.at_least:
            return q
        return q.masked_fill(self.stop(q, self.token_probs)[:, None], 0.0)


class BanditDrafter(ShortenedDrafter):
    """Chooses the number of draft tokens of each step among `lengths`, by upper confidence bounds (UCB1), in each row.

    The reward of a step is its number of tokens over its time, (accepted + 1) / (1 + n `cost_ratio`), divided by its
    largest value. The choice depends on earlier steps only, so the step stays exact. A row starts anew with its prompt:
    what it gets must not depend on other rows. `exploration` scales the confidence term.

    Raises `ValueError` unless `lengths` are different whole numbers from 1, and `cost_ratio` and `exploration` numbers
    from 0; `TypeError` for a drafter that is no `ChainDrafter`.

    >>> from specnb.drafting.ngram import UniformDrafter
    >>> drafter = BanditDrafter(UniformDrafter(4), lengths=(1, 3), cost_ratio=0.1)
    >>> context = Context(torch.tensor([[1, 0, 0, 0]]), torch.tensor([1]))
    >>> drafter.start(context)
    >>> drafter.propose(context, torch.full((1, 3), 0.9)).draft_tokens
    tensor([[ 3, -1, -1]])
    """

    def __init__(
        self, drafter: ChainDrafter, lengths: tuple[int, ...], cost_ratio: float, exploration: float = 0.3
    ) -> None:
        super().__init__(drafter)
        if not lengths or len(set(lengths)) != len(lengths):
            raise ValueError(f"lengths are {lengths!r}; they must be different whole numbers from 1")
        require_whole(**{f"lengths[{i}]": (length, 1) for i, length in enumerate(lengths)})
        require_number(cost_ratio=cost_ratio, exploration=exploration)
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
        longest = uniforms.shape[1] if self.limit.is_cuda else min(int(self.limit.max()), uniforms.shape[1])
        return padded(*super().propose(context, uniforms[:, :longest]), uniforms.shape[1])

    def distribution(self, context: Context, position: int) -> Tensor:
        if position == 0:
            self._choose()
        # Evaluated after all rows have stopped too: in a mixture, drafting goes on, and a model must see every token.
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
