"""A template: copy this file to write a drafter of your own.

It proposes each token from a fixed table of next-token probabilities, given the token before. Replace the table by
whatever predicts tokens. Everything else is the contract: sample with the uniforms given, and return the very
distribution that was sampled from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.drafting.base import Context, Drafter, Proposal
from specnb.sampling.distributions import sample


class TemplateDrafter(Drafter):
    """Samples each draft token from the row of `table` `(vocab, vocab)` that belongs to the token before.

    >>> table = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.0, 0.5]])
    >>> context = Context(tokens=torch.tensor([[2, 0, 0]]), lengths=torch.tensor([2]))
    >>> TemplateDrafter(table).propose(context, torch.tensor([[0.3, 0.3, 0.3]])).draft_tokens
    tensor([[1, 2, 0]])
    """

    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.vocab = table.shape[-1]

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        token, tokens, distributions = context.newest, [], []
        for uniform in uniforms.unbind(dim=1):
            q = self.table[token]  # (rows, vocab): what this token is sampled from, and what is reported
            token = sample(q, uniform)
            tokens.append(token)
            distributions.append(q)
        return Proposal(torch.stack(tokens, dim=1), torch.stack(distributions, dim=1))
