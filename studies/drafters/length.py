"""Adaptive length: drafts that end before gamma tokens, decided before the next token is sampled.

A stopping rule reads the distribution that the next draft token would be sampled from, and the
probabilities of the draft tokens that are kept. It does not read the token itself, so the step
stays exact (`studies.drafters.stopping_rules` enumerates it, and what goes wrong otherwise). A rule
is a value, a frozen dataclass, and a pure function:

    q            (rows, vocab)     the distribution of the next draft token
    token_probs  (rows, position)  the probability under q of each draft token so far
    returns      (rows,) bool      whether to stop

To read q of the next token costs a pass of the draft model, also where the rule then stops.
`CalibratedDrafter` reads only draft tokens that are kept, and saves that pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specnb.arguments import require_whole
from specnb.drafters import ChainDrafter, Context, require_part
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

    AdaEDL (2410.18351) uses this expression as a lower bound of the acceptance probability.

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

    last: Tensor
    token_probs: Tensor

    def __init__(self, drafter: ChainDrafter) -> None:
        require_part("drafter", drafter)
        self.drafter = drafter
        self.vocab, self.draft_model, self.hidden_layers = drafter.vocab, drafter.draft_model, drafter.hidden_layers
        self.can_refill = drafter.can_refill

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.drafter.start(context, rows)

    def kept(self, context: Context, position: int) -> Tensor:
        """The probabilities `(rows, position)` under q of the draft tokens so far, for a subclass
        that keeps them as `token_probs`, and as `last` the q that the newest was sampled from.

        Asked in `distribution` and not in `propose`, which nobody calls if this drafter is part of
        another.
        """
        if position == 0:
            return context.lengths.new_zeros(len(context.lengths), 0, dtype=torch.float64)
        newest = self.last.gather(1, context.newest[:, None])
        return torch.cat([self.token_probs, newest.double()], dim=1)

    def update(self, context: Context, outcome: Outcome) -> None:
        self.drafter.update(context, outcome)


class StoppingDrafter(ShortenedDrafter):
    """The draft tokens of `drafter` until `stop` says so in a row; the first one is always proposed
    if `at_least` is 1.

    On the CPU the draft tokens that all rows of the batch have saved cost no forward pass, and are
    not verified.

    Raises `ValueError` for an `at_least` that is no whole number from 0, `TypeError` for a drafter
    that is no `ChainDrafter` and a `stop` that cannot be called.

    >>> from specnb.ngram import UniformDrafter
    >>> drafter = StoppingDrafter(UniformDrafter(4), LowConfidence(0.5), at_least=1)
    >>> context = Context(torch.tensor([[1, 0, 0, 0]]), torch.tensor([1]))
    >>> drafter.propose(context, torch.full((1, 3), 0.9)).draft_tokens
    tensor([[3]])
    """

    def __init__(self, drafter: ChainDrafter, stop: StoppingRule, at_least: int = 0) -> None:
        super().__init__(drafter)
        require_whole(at_least=(at_least, 0))
        if not callable(stop):
            raise TypeError(f"stop is {stop!r}; it must be a stopping rule, such as LowConfidence(0.4)")
        self.stop, self.at_least = stop, at_least

    def distribution(self, context: Context, position: int) -> Tensor:
        q = self.drafter.distribution(context, position)
        self.token_probs, self.last = self.kept(context, position), q
        if position < self.at_least:
            return q
        return q.masked_fill(self.stop(q, self.token_probs)[:, None], 0.0)


@dataclass(frozen=True)
class Calibration:
    """How often draft tokens are accepted, by their own probability under q: `accepted` `(bins,)`
    between the `edges` `(bins - 1,)`; `mean` of all.

    >>> Calibration(torch.tensor([0.5]), torch.tensor([0.3, 0.9]), 0.6).of(torch.tensor([0.2, 0.8]))
    tensor([0.3000, 0.9000])
    """

    edges: Tensor
    accepted: Tensor
    mean: float

    def of(self, token_probs: Tensor) -> Tensor:
        """The estimated acceptance of draft tokens with these probabilities."""
        return self.accepted[torch.bucketize(token_probs, self.edges)]

    def next(self, token_probs: Tensor) -> Tensor:
        """The estimated probability `(rows, n)` that the token after each draft token of
        `token_probs` `(rows, n)` is reached and accepted."""
        return self.of(token_probs).cumprod(dim=1) * self.mean


def calibrate(token_probs: Tensor, accepted: Tensor, bins: int = 12) -> Calibration:
    """The calibration from steps with `accepted` `(steps,)` of their draft tokens, whose
    probabilities are `token_probs` `(steps, gamma)`. Tokens after a rejected one do not count."""
    position = torch.arange(token_probs.shape[1])
    tested = position <= accepted[:, None]
    probs, kept = token_probs[tested], (position < accepted[:, None])[tested].double()
    edges = probs.quantile(torch.linspace(0, 1, bins + 1, dtype=probs.dtype)[1:-1])
    at = torch.bucketize(probs, edges)
    sums, counts = (
        torch.zeros(bins, dtype=kept.dtype).index_add(0, at, each) for each in (kept, torch.ones_like(kept))
    )
    return Calibration(edges, sums / counts.clamp_min(1), float(kept.mean()))


def worth(calibration: Calibration, token_probs: Tensor, least: float) -> Tensor:
    """How many of the draft tokens `(steps, gamma)` are worth their pass, `(steps,)`: those that are
    reached and accepted with an estimated probability above `least`, the first in any case.

    >>> calibration = Calibration(torch.tensor([0.5]), torch.tensor([0.3, 0.9]), 0.6)
    >>> worth(calibration, torch.tensor([[0.8, 0.8, 0.2, 0.8], [0.2, 0.8, 0.8, 0.8]]), 0.2)
    tensor([3, 1])
    """
    return 1 + (calibration.next(token_probs)[:, :-1] > least).long().cumprod(dim=1).sum(dim=1)


class CalibratedDrafter(ShortenedDrafter):
    """Drafts on while the next draft token is reached and accepted with an estimated probability
    above `least`.

    The estimate is the product of what `calibration` says of the draft tokens so far, and its mean
    for the next. A token is worth its pass if that exceeds c times the speed in tokens per target
    pass: `least`. Decided by draft tokens that are kept in any case, so the step stays exact.
    """

    def __init__(self, drafter: ChainDrafter, calibration: Calibration, least: float) -> None:
        super().__init__(drafter)
        self.calibration, self.least = calibration, least

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        super().start(context, rows)
        edges, accepted = (
            each.to(context.tokens.device) for each in (self.calibration.edges, self.calibration.accepted)
        )
        self.calibration = replace(self.calibration, edges=edges, accepted=accepted)

    def distribution(self, context: Context, position: int) -> Tensor:
        self.token_probs = self.kept(context, position)
        if position == 0:
            self.last = self.drafter.distribution(context, 0)
            return self.last
        going = self.calibration.next(self.token_probs)[:, -1] > self.least
        if going.device.type == "cpu" and not going.any():
            return torch.zeros_like(self.last)
        self.last = self.drafter.distribution(context, position)
        return self.last.masked_fill(~going[:, None], 0.0)
