"""Random drafts: every token is equally probable (section 3.6)."""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.arguments import require_whole
from specnb.drafting.base import Context
from specnb.drafting.chain import ChainDrafter


class UniformDrafter(ChainDrafter):
    """Each draft token is sampled uniformly from the vocabulary. Its acceptance probability is sum min(p, 1/vocab).

    Raises `ValueError` unless `vocab` is a whole number from 1.

    >>> UniformDrafter(4).distribution(Context(torch.tensor([[1]]), torch.tensor([1])), 0)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def __init__(self, vocab: int) -> None:
        require_whole(vocab=(vocab, 1))
        self.vocab = vocab

    def distribution(self, context: Context, position: int) -> Tensor:
        """See `ChainDrafter.distribution`."""
        return torch.full((len(context.lengths), self.vocab), 1 / self.vocab, device=context.lengths.device)
