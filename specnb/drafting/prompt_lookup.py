"""Prompt lookup: copy what followed the longest earlier occurrence of the newest tokens (section 3.6).

Saxena's prompt lookup decoding, and `prompt_lookup_num_tokens` of transformers. No model and no training: tensor
operations on the sequence alone, of rows x slots x longest comparisons for each draft token, on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specnb.drafting.arguments import require_lengths
from specnb.drafting.base import Context
from specnb.drafting.chain import ChainDrafter

CHOICES = ("recent", "frequent", "proportional")


class PromptLookupDrafter(ChainDrafter):
    """Proposes what followed earlier occurrences of the row's newest tokens, in prompt and completion.

    Of the earlier places those count whose preceding tokens agree with the newest ones over the longest stretch, at
    most `longest` tokens and at least `shortest`; nothing is proposed if there is none. `choose` says which of their
    continuations is taken: "recent" the last one, "frequent" the most frequent one (the lowest token among equals), or
    "proportional", sampled as often as each occurs. The first two are deterministic, so q is one-hot; the third reports
    the frequencies.

    The match is looked for anew at each draft token, the earlier draft tokens included, so it also continues a
    repetition beyond the end of the sequence. Raises `ValueError` for lengths that are not 1 <= shortest <= longest,
    another `choose`, and a prompt of fewer than `shortest` + 1 tokens if `require_match_possible` is set.

    >>> drafter = PromptLookupDrafter(vocab=9, longest=2)
    >>> tokens = torch.tensor([[5, 6, 7, 8, 5, 6, 0, 0, 0]])
    >>> drafter.distribution(Context(tokens, torch.tensor([6])), 0).argmax(-1)
    tensor([7])
    """

    def __init__(
        self,
        vocab: int,
        longest: int = 8,
        shortest: int = 1,
        choose: str = "recent",
        require_match_possible: bool = False,
    ) -> None:
        require_lengths(vocab, shortest, longest)
        if choose not in CHOICES:
            raise ValueError(f"choose is {choose!r}; it must be one of {', '.join(CHOICES)}")
        self.vocab, self.longest, self.shortest, self.choose = vocab, longest, shortest, choose
        self.require_match_possible = require_match_possible

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        """Checks the prompts if that was asked for; nothing is kept from one sequence to the next."""
        if not self.require_match_possible:
            return
        lengths = context.lengths if rows is None else context.lengths[rows]
        least = int(lengths.min())
        if least < self.shortest + 1:
            raise ValueError(
                f"a prompt has {least} tokens, and a match of {self.shortest} tokens with one after it needs "
                f"{self.shortest + 1}; give a longer prompt, a smaller shortest, or require_match_possible=False"
            )

    def distribution(self, context: Context, position: int) -> Tensor:
        """See `ChainDrafter.distribution`."""
        tokens, lengths = context.tokens, context.lengths
        matched = match_lengths(tokens, lengths, self.longest)
        best = matched.amax(dim=1, keepdim=True)
        chosen = (matched == best) & (matched >= self.shortest)
        if self.choose == "recent":
            slots = torch.arange(tokens.shape[1], device=tokens.device)
            chosen = chosen & (slots == slots.where(chosen, -1).amax(dim=1, keepdim=True))
        counts = torch.zeros(len(tokens), self.vocab, device=tokens.device)
        counts = counts.scatter_add_(1, tokens, chosen.float())
        found = chosen.any(dim=1, keepdim=True)
        if self.choose != "proportional":
            counts = torch.nn.functional.one_hot(counts.argmax(dim=1), self.vocab).float()
        return (counts / counts.sum(dim=1, keepdim=True)).where(found, 0.0)


def match_lengths(tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """`(rows, slots)`: how many tokens right before each slot agree with the newest of the row, `longest` at most.

    0 from a row's length on. An occurrence ends before the newest token, so that a token follows it.

    >>> match_lengths(torch.tensor([[1, 2, 3, 1, 2]]), torch.tensor([5]), longest=4)
    tensor([[0, 0, 2, 0, 0]])
    """
    slots = torch.arange(tokens.shape[1], device=tokens.device)
    agree = ((slots >= 1) & (slots < lengths[:, None])).to(torch.int64)
    matched = torch.zeros_like(tokens)
    for back in range(1, longest + 1):
        newest = tokens.gather(1, (lengths - back).clamp_min(0)[:, None])
        earlier = tokens.roll(back, dims=1)  # at each slot, the token `back` slots before it
        agree = agree * ((earlier == newest) & (slots >= back) & (lengths[:, None] >= back))
        matched = matched + agree
    return matched
