"""Mixtures: draft tokens sampled from a weighted mean of two distributions, which is also what is reported as q.

Copying where there is a match and a model otherwise is the mixture of a `PromptLookupDrafter` and a `ModelDrafter`; two
models make a static ensemble.
"""

from __future__ import annotations

from torch import Tensor

from specnb.arguments import require_number
from specnb.drafting.arguments import require_chain, require_equal_vocabularies, shared_hidden_layers
from specnb.drafting.base import Context
from specnb.drafting.chain import ChainDrafter
from specnb.sampling.tree_verification import TreeOutcome
from specnb.sampling.verification import Outcome


class MixtureDrafter(ChainDrafter):
    """Samples from `weight` x first + (1 - `weight`) x second where both propose, and from the one that does elsewhere.

    With `weight` 1 the second drafter is used only where the first proposes nothing. Both are evaluated at every draft
    token, so the cost is the sum of theirs; `FallbackDrafter` avoids that.

    Raises `ValueError` for a weight outside [0, 1], for different vocabularies and for drafters that read different
    hidden layers, `TypeError` for drafters that are no `ChainDrafter`.

    >>> import torch
    >>> from specnb.drafting.prompt_lookup import PromptLookupDrafter
    >>> from specnb.drafting.uniform import UniformDrafter
    >>> drafter = MixtureDrafter(PromptLookupDrafter(vocab=2), UniformDrafter(2), weight=0.5)
    >>> drafter.distribution(Context(torch.tensor([[0, 1, 0], [0, 0, 0]]), torch.tensor([3, 1])), 0)
    tensor([[0.2500, 0.7500],
            [0.5000, 0.5000]])
    """

    def __init__(self, first: ChainDrafter, second: ChainDrafter, weight: float = 1.0) -> None:
        require_chain("first", first)
        require_chain("second", second)
        require_number(most=1.0, weight=weight)
        require_equal_vocabularies(first, second)
        self.first, self.second, self.weight = first, second, weight
        self.vocab = first.vocab
        self.draft_model = second.draft_model or first.draft_model
        self.hidden_layers = shared_hidden_layers(first, second)
        self.can_refill = first.can_refill and second.can_refill

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """See `Drafter.start`."""
        self.first.start(context, rows)
        self.second.start(context, rows)

    def distribution(self, context: Context, position: int) -> Tensor:
        """See `ChainDrafter.distribution`."""
        one, other = (drafter.distribution(context, position) for drafter in (self.first, self.second))
        has_one, has_other = (~(q.sum(dim=-1, keepdim=True) <= 0) for q in (one, other))  # NaN is no empty row
        both = self.weight * one + (1 - self.weight) * other
        return both.where(has_one & has_other, one.where(has_one, other))

    def update(self, context: Context, outcome: Outcome | TreeOutcome) -> None:
        """See `Drafter.update`."""
        self.first.update(context, outcome)
        self.second.update(context, outcome)
