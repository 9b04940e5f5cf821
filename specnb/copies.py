"""Copies: what followed an earlier occurrence of the newest tokens, at negligible cost (section 3.6)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from specnb.arguments import require_whole
from specnb.drafters import ChainDrafter, Context, Proposal, nothing, padded

PER_MATCH = 3  # tokens copied for each token that agrees: after a longer match more are accepted


class PromptLookupDrafter(ChainDrafter):
    """Proposes what followed an earlier occurrence of the row's newest tokens; q is one-hot.

    Parameters
    ----------
    longest, shortest
        The place that is copied from agrees with the newest tokens over the longest stretch, within
        these bounds; among equals it is the latest. `shortest` 2 or 3 is better if draft tokens
        cost much.

    Notes
    -----
    Prompt lookup decoding (Saxena), with at most `PER_MATCH` tokens for each one that agrees.

    Examples
    --------
    >>> drafter = PromptLookupDrafter(vocab=9, longest=2)
    >>> context = Context(torch.tensor([[5, 6, 7, 8, 5, 6, 0, 0, 0]]), torch.tensor([6]))
    >>> drafter.propose(context, torch.rand(1, 8)).draft_tokens
    tensor([[7, 8, 5, 6, 7, 8]])
    """

    capturable = True  # it keeps nothing
    gamma = 10

    def __init__(self, vocab: int, longest: int = 8, shortest: int = 1) -> None:
        require_whole(vocab=(vocab, 1), shortest=(shortest, 1), longest=(longest, shortest))
        self.vocab, self.longest, self.shortest = vocab, longest, shortest

    def lengths(self, gamma: int) -> tuple[int, ...]:
        return (0, min(PER_MATCH * self.shortest, gamma))

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        tokens, lengths = context.tokens, context.lengths
        places, matched = self.matches(context)
        most, width = PER_MATCH * matched, uniforms.shape[1]
        if tokens.device.type == "cpu":
            width = min(width, int(most.max()))
        if width == 0:
            return nothing(lengths, self.vocab)
        offsets = torch.arange(width, device=tokens.device)
        copied = tokens.gather(1, places[:, None] + offsets % (lengths - places)[:, None])
        proposed = offsets < most[:, None]
        q = torch.zeros(*copied.shape, self.vocab, device=tokens.device, dtype=torch.float32)
        return Proposal(copied.where(proposed, -1), q.scatter_(2, copied[..., None], proposed[..., None].float()))

    def along(self, context: Context, tokens: Tensor) -> Tensor:
        return padded(*self.propose(context, tokens), tokens.shape[1]).q  # whatever is sampled, the copy goes on

    def matches(self, context: Context) -> tuple[Tensor, Tensor]:
        """The slot from which each row copies, and how many tokens before it agree, or 0."""
        slots = context.tokens.shape[1]
        matches = match_lengths(context.tokens, context.lengths, self.longest)
        best = (matches * slots + torch.arange(slots, device=matches.device)).amax(dim=1)
        places, matched = best % slots, best // slots
        enough = matched >= self.shortest
        return places * enough, matched * enough

    def distribution(self, context: Context, position: int) -> Tensor:
        no_uniforms = context.lengths.new_zeros(len(context.lengths), 1)  # one token is asked for
        return padded(*self.propose(context, no_uniforms), 1).q[:, 0]


def match_lengths(tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """How many tokens before each slot agree with the newest of the row `(rows, slots)`; 0 from its length on.

    >>> match_lengths(torch.tensor([[1, 2, 3, 1, 2]]), torch.tensor([5]), longest=4)
    tensor([[0, 0, 2, 0, 0]])
    """
    longest = min(longest, tokens.shape[1])
    # At each slot begin the `longest` tokens before it.
    after = pad(tokens, (longest, 0), value=-1)
    newest = after.gather(1, lengths[:, None] + torch.arange(longest, device=tokens.device))[:, None]
    agree = (after.unfold(1, longest, 1)[:, :-1] == newest) & (newest >= 0)
    matched = agree.flip(-1).cumprod(dim=-1).sum(dim=-1)
    return matched.where(torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None], 0)
