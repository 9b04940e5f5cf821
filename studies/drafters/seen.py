"""Which tokens of each row the cache of a draft model holds.

The entries of a cache serve every sequence that begins with the same tokens, whoever chose them. So
what a drafter evaluated is compared with the sequence, and nobody tells it which of its tokens were
accepted, which tokens another drafter proposed, and which steps were made without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST = 2
"""Newest tokens of a row that a step evaluates at least. After full acceptance the last draft token
and the bonus token are not in the cache; otherwise only one is missing. Two serve both cases with
one shape."""


class SeenTokens:
    """The tokens `(rows, slots)` that a cache of so many `slots` holds, from the first on; -1 where
    it holds none.

    >>> seen = SeenTokens(slots=5, device=torch.device("cpu"))
    >>> seen.hold(torch.tensor([[5, 6, 7, 8, 0]]), torch.tensor([4]))
    >>> seen.unseen(torch.tensor([[5, 9, 9, 9, 0]]), torch.tensor([4]))  # the entries of 6, 7 and 8 serve no more
    3
    """

    tokens: Tensor

    def __init__(self, slots: int, device: torch.device) -> None:
        self.slots = torch.arange(slots, device=device)

    def hold(self, tokens: Tensor, counts: Tensor, rows: Tensor | None = None) -> None:
        """The cache holds the first `counts` `(rows,)` of `tokens` `(rows, n)` from now on; or so
        in `rows` `(n,)`."""
        if rows is None:
            self.tokens = self._first(tokens, counts)
        else:
            self.tokens[rows] = self._first(tokens[rows], counts[rows])

    def unseen(self, tokens: Tensor, lengths: Tensor) -> int:
        """The most tokens that the cache lacks in a row of `lengths` `(rows,)`, from `LEAST`. The
        host reads it."""
        slots = self.slots[: tokens.shape[1]]
        same = self.tokens[:, : len(slots)] == tokens[:, : len(slots)]
        return max(LEAST, int((lengths - same.cumprod(dim=1).sum(dim=1)).max()))

    def _first(self, tokens: Tensor, counts: Tensor) -> Tensor:
        return tokens[:, : len(self.slots)].where(self.slots < counts[:, None], -1)
