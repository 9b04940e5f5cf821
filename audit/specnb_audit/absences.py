"""Bets that something never happens: a token never occurs, or no end token in the first positions.

Under p, the product of 1/(1 - p(v)) over the positions where v may come, set to 0 once v comes, is
a nonnegative martingale that starts at 1. So is a mixture of such products whose weights depend on
earlier tokens alone; `Absences.bets` are the factors by which two mixtures grow, so they are bets
like all others (`specnb_audit.evidence`).

The first mixture is over single tokens: for every `CHUNK` tokens of a sequence, those that have not
come are weighted by exp(how often they should have come), and "no bet" by the size of the
vocabulary. The second is over n in "no end token in the first n positions", with weights 1/(n (n +
1)).
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

POSITIONS = 512  # the largest n of "in the first n positions"; beyond it there is "anywhere"
CHUNK, CANDIDATES = 64, 256
LARGEST = 0.999
"""Larger probabilities count as this one: it makes a factor smaller, and keeps it finite."""

Array = NDArray[np.float64]


class Absences:
    """What has never occurred so far; `ends` are the end tokens."""

    def __init__(self, ends: Collection[int] = ()) -> None:
        self.ends = sorted(ends)
        # How often each token should have come, and minus infinity once it has; `(vocab,)`.
        self.expected: Tensor | None = None
        self.ids, self.weights = torch.empty(0, dtype=torch.long), torch.zeros(1)
        n = np.arange(1, POSITIONS + 1)
        # The last of them is for all positions.
        self.beginnings = -torch.from_numpy(np.log([*(n * (n + 1)), POSITIONS + 1]))

    def bets(self, p: Tensor, tokens: Tensor, offset: int) -> list[Array]:
        """The factors `(n,)` of each mixture at `tokens` `(n,)`, under p `(n, vocab)`; `offset`
        tokens of the sequence come before."""
        if self.expected is None:
            self.expected = p.new_zeros(p.shape[1], dtype=torch.float64)
        ratios, start = list[Array](), 0
        while start < len(tokens):
            stop = start + CHUNK - (offset + start) % CHUNK
            if (offset + start) % CHUNK == 0:
                weights, self.ids = self.expected.topk(min(CANDIDATES, p.shape[1]))
                self.weights = torch.nn.functional.pad(weights, (0, 1), value=np.log(p.shape[1]))
            ratios.append(self._on_tokens(p[start:stop], tokens[start:stop]))
            start = stop
        return [np.concatenate(ratios), *([self._on_ends(p, tokens, offset)] if self.ends else [])]

    def _on_tokens(self, p: Tensor, tokens: Tensor) -> Array:
        assert self.expected is not None
        came = tokens[:, None] == self.ids
        certain = p.gather(-1, tokens[:, None])[:, 0] == 1  # nothing was chosen
        gains = _gain(p[:, self.ids]).where(~came, -torch.inf).where(~certain[:, None], 0.0)
        mixture, self.weights = _grown(self.weights, torch.nn.functional.pad(gains, (0, 1)))
        self.expected += p[~certain].sum(dim=0)
        self.expected[tokens[~certain]] = -torch.inf
        return mixture

    def _on_ends(self, p: Tensor, tokens: Tensor, offset: int) -> Array:
        gain = _gain(p[:, self.ends].sum(dim=-1)).cpu()
        ended = torch.isin(tokens.cpu(), torch.tensor(self.ends))
        certain = (p.gather(-1, tokens[:, None]) == 1).cpu()
        place = torch.arange(offset, offset + len(tokens))[:, None]
        inside = ~certain & (place < torch.tensor([*range(1, POSITIONS + 1), torch.iinfo(torch.int64).max, 0]))
        gains = torch.where(inside, gain.where(~ended, -torch.inf)[:, None], 0.0)
        # No bet has as much weight as all others, so that there is one left when an end token came.
        nothing = self.beginnings.new_zeros(1)
        mixture, parts = _grown(torch.cat([self.beginnings, nothing]), gains)
        self.beginnings = parts[:-1]
        return mixture

    def words(self) -> str:
        assert self.expected is not None
        token, beginning = int(self.expected.argmax()), int(self.beginnings.argmax())
        if not self.ends or self.expected[token] >= self.beginnings[beginning]:
            return f"token {token} never occurs, as if it were banned"
        where = f" in the first {beginning + 1} positions, as min_tokens gives it" if beginning < POSITIONS else ""
        return f"an end token ({', '.join(map(str, self.ends))}) never occurs{where}"


def _gain(p: Tensor) -> Tensor:
    return -torch.log1p(-p.double().clamp_max(LARGEST))


def _grown(log: Tensor, gains: Tensor) -> tuple[Array, Tensor]:
    """The factors `(n,)` by which a mixture grows whose parts have the logarithms `log` `(K,)`, and
    these after the `gains` `(n, K)`."""
    parts = torch.cat([log[None], gains]).cumsum(dim=0)
    ratios: Array = torch.logsumexp(parts, dim=-1).diff().exp().numpy(force=True)
    return ratios, parts[-1].clone()
