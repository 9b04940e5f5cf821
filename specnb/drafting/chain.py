"""Drafters that are a next-token distribution: each draft token is sampled given the sequence and those before it.

Such a drafter writes `distribution`, and `ChainDrafter.propose` samples from it. Mixtures and stopping rules combine
these distributions, so what is reported is by construction what was sampled from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.drafting.base import Context, Drafter, Proposal
from specnb.sampling.distributions import sample


class ChainDrafter(Drafter):
    """Samples each draft token from `distribution`. A row stops where that is zero; nothing is proposed after it.

    On the CPU drafting ends as soon as all rows have stopped; on another device it goes on, because the host would
    have to wait to know.

    >>> class Cycle(ChainDrafter):
    ...     vocab = 3
    ...     def distribution(self, context, position):
    ...         return torch.nn.functional.one_hot((context.newest + 1) % 3, 3).float()
    >>> Cycle().propose(Context(torch.tensor([[0, 1, 0, 0, 0]]), torch.tensor([2])), torch.rand(1, 3)).draft_tokens
    tensor([[2, 0, 1]])
    """

    def distribution(self, context: Context, position: int) -> Tensor:
        """`(rows, vocab)`: the distribution of the next token; 0 in rows in which nothing is to be proposed.

        `context` has the sequences with the first `position` draft tokens of the step, and the hidden states that
        there were before the step. Decided by these alone, so before the token is sampled (contract 10 of the design).
        """
        raise NotImplementedError(f"{type(self).__name__} has no distribution(context, position)")

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        padding = context.tokens.new_zeros(len(uniforms), uniforms.shape[1])
        # Behind a row's length there may be -1, of draft tokens that were not proposed; slots hold valid tokens here.
        tokens, lengths = torch.cat([context.tokens.clamp_min(0), padding], dim=1), context.lengths
        going = torch.ones_like(lengths, dtype=torch.bool)
        draft_tokens, distributions = [], []
        for position, uniform in enumerate(uniforms.unbind(dim=1)):
            q = self.distribution(Context(tokens, lengths, context.hidden_states), position)
            going = going & ~(q.sum(dim=-1) <= 0)  # NaN goes on, to the check of the step
            if not going.is_cuda and not going.any():
                break
            q = q.where(going[:, None], 0.0)
            distributions.append(q)
            draft_tokens.append(sample(q, uniform).where(going, -1))
            tokens.scatter_(1, lengths[:, None], draft_tokens[-1].clamp_min(0)[:, None])
            lengths = lengths + going
        return padded(draft_tokens, distributions, uniforms, self.vocab)


def padded(draft_tokens: list[Tensor], distributions: list[Tensor], uniforms: Tensor, vocab: int) -> Proposal:
    """The proposal of as many tokens as `uniforms` `(rows, gamma)`: the given ones, then -1 with q = 0.

    >>> padded([], [], torch.rand(1, 2), vocab=3).draft_tokens
    tensor([[-1, -1]])
    """
    rows, gamma = uniforms.shape
    missing = gamma - len(draft_tokens)
    nothing = torch.full((rows,), -1, dtype=torch.int64, device=uniforms.device)
    zero = (distributions[0] if distributions else uniforms.new_zeros(rows, vocab, dtype=torch.float32)) * 0.0
    return Proposal(
        torch.stack([*draft_tokens, *[nothing] * missing], dim=1),
        torch.stack([*distributions, *[zero] * missing], dim=1),
    )
