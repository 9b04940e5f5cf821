"""Draft lengths that adapt: a drafter that ends its draft before gamma tokens.

What decides is known before the next token is sampled, and a draft token that was sampled is kept,
so a step stays exact. Notebook 09 enumerates such rules, and one that is not exact, and derives the
rule of `StopDrafter`. Draft tokens are sampled as `sampling` says; what decides is the draft
model's own distribution, the softmax of its logits. So a length adapts at temperature 0, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specnb.distributions import Sampling, standardise_probs
from specnb.drafters import ChainDrafter, Context, Proposal
from specnb.rules import Outcome
from studies.drafters.tables import require_part


class ShortenedDrafter(ChainDrafter):
    """The draft tokens of `drafter`, sampled as `sampling` says, of which a subclass leaves out the
    last ones.

    `drafter` gives the softmax of its logits. Raises `ValueError` for one with a `sampling` of its
    own, and `TypeError` for one that is no `ChainDrafter`.
    """

    def __init__(self, drafter: ChainDrafter, sampling: Sampling = Sampling()) -> None:
        require_part("drafter", drafter)
        if getattr(drafter, "sampling", Sampling()) != Sampling():
            raise ValueError("drafter samples otherwise than from its logits; give `sampling` to the drafter around it")
        self.drafter, self.sampling = drafter, sampling
        self.vocab, self.draft_model, self.hidden_layers = drafter.vocab, drafter.draft_model, drafter.hidden_layers
        self.can_refill = drafter.can_refill

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.drafter.start(context, rows)
        self.alone = False

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        self.alone = True
        return super().propose(context, uniforms)

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        self.alone = True
        return ChainDrafter.along(self, context, tokens)

    def ends(self, going: Tensor) -> bool:
        """Whether no row goes on, so that no pass is needed. Within another drafter there may be
        more draft tokens, which the cache must have."""
        return self.alone and going.device.type == "cpu" and not going.any()

    def update(self, context: Context, outcome: Outcome) -> None:
        self.drafter.update(context, outcome)

    def processed(self, q: Tensor, going: Tensor) -> Tensor:
        """What is sampled from in the rows `going`, and 0 in the others and where q is 0."""
        ended = ~going | (q.sum(dim=-1) <= 0)
        return standardise_probs(q, self.sampling).masked_fill(ended[:, None], 0.0)


@dataclass(frozen=True)
class Calibration:
    """How often draft tokens are accepted, by their own probability: `accepted` `(bins,)` between
    the `edges` `(bins - 1,)`; `mean` of all.

    >>> Calibration(torch.tensor([0.5]), torch.tensor([0.3, 0.9]), 0.6).of(torch.tensor([0.2, 0.8]))
    tensor([0.3000, 0.9000])
    """

    edges: Tensor
    accepted: Tensor
    mean: float

    def of(self, probs: Tensor) -> Tensor:
        """The estimated acceptance of draft tokens with these probabilities."""
        return self.accepted[torch.bucketize(probs.contiguous(), self.edges)]

    def worth(self, probs: Tensor, least: float) -> Tensor:
        """How many of the draft tokens with the probabilities `(steps, gamma)` `StopDrafter` makes.

        >>> calibration = Calibration(torch.tensor([0.5]), torch.tensor([0.3, 0.9]), 0.6)
        >>> calibration.worth(torch.tensor([[0.8, 0.8, 0.2, 0.8], [0.2, 0.8, 0.8, 0.8]]), 0.2)
        tensor([3, 1])
        """
        reached = self.of(probs[:, :-1]).cumprod(dim=1)
        return 1 + (reached * self.mean > least).long().cumprod(dim=1).sum(dim=1)


def calibrate(probs: Tensor, accepted: Tensor, bins: int = 12) -> Calibration:
    """The calibration from steps with `accepted` `(steps,)` of their draft tokens, whose
    probabilities are `probs` `(steps, gamma)`. Tokens after a rejected one do not count."""
    position = torch.arange(probs.shape[1])
    tested = position <= accepted[:, None]
    each, kept = probs[tested], (position < accepted[:, None])[tested].double()
    edges = each.quantile(torch.linspace(0, 1, bins + 1, dtype=each.dtype)[1:-1])
    at = torch.bucketize(each, edges)
    counts, sums = torch.bincount(at, minlength=bins), torch.bincount(at, kept, bins)
    return Calibration(edges, sums / counts.clamp_min(1), float(kept.mean()))


class StopDrafter(ShortenedDrafter):
    """Drafts on while the next token is reached and accepted with an estimated probability above
    `least`, which is c times the speed.

    The estimate is the product of what `calibration` says of the draft tokens so far, and its mean
    for the next one. It reads draft tokens that are kept, and needs no pass for a token that is
    then not drafted. The first token is drafted in any case.
    """

    q: Tensor

    def __init__(
        self, drafter: ChainDrafter, calibration: Calibration, least: float, sampling: Sampling = Sampling()
    ) -> None:
        super().__init__(drafter, sampling)
        self.calibration, self.least = calibration, least

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        super().start(context, rows)
        device = context.tokens.device
        edges, accepted = self.calibration.edges.to(device), self.calibration.accepted.to(device)
        self.calibration = replace(self.calibration, edges=edges, accepted=accepted)

    def distribution(self, context: Context, position: int) -> Tensor:
        if position == 0:
            self.reached = torch.ones(len(context.lengths), dtype=torch.float64, device=context.lengths.device)
            going = self.reached > 0
        else:
            newest = self.q.gather(1, context.newest[:, None])[:, 0]
            self.reached = self.reached * self.calibration.of(newest.double())
            going = self.reached * self.calibration.mean > self.least
            if self.ends(going):
                return torch.zeros_like(self.q)
        self.q = self.drafter.distribution(context, position)
        return self.processed(self.q, going)
