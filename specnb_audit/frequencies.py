"""How often each token came, and how often it should have come: bets on tokens that are biased everywhere.

A logit bias, a banned token or a suppressed end token changes the probability of single tokens by the same factor
wherever they are possible. Which tokens, nobody says; the rows before show it.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]

DEVIATING = (2.0, 3.0)
"""A token is bet on if its frequency deviates by more than this many standard deviations; one bet for each."""


class Frequencies:
    """Counts over all sequences so far.

    >>> p, tokens = torch.tensor([[0.5, 0.5]]).expand(40, -1), torch.zeros(40, dtype=torch.int64)
    >>> frequencies = Frequencies()
    >>> frequencies.bets(p, tokens)[0][:, 0].tolist()  # nothing is known yet
    [1.0, 1.0]
    >>> frequencies.begin()
    >>> frequencies.bets(p, tokens)[0][:, 0].round(2).tolist()
    [1.95, 1.95]
    """

    def __init__(self) -> None:
        self.counts: Tensor | None = None  # (2, vocab): seen and expected
        self.factors: Tensor | None = None  # (vocab, bets)

    def begin(self) -> None:
        """Begins a new sequence, from which on the tokens so far count."""
        if self.counts is not None:
            self.factors = self._factors(*self.counts)

    def bets(self, p: Tensor, tokens: Tensor) -> tuple[Array, Array]:
        """r(x)/p(x) `(bets, n)` at `tokens` `(n,)` under `p` `(n, vocab)`, and the deviations of r > p `(bets, n)`.

        They depend on the sequences before alone.
        """
        vocab = p.shape[-1]
        if self.counts is None:
            self.counts = torch.zeros(2, vocab, dtype=torch.float64, device=p.device)
        self.counts += torch.stack([torch.bincount(tokens, minlength=vocab), p.sum(dim=0, dtype=torch.float64)])
        if self.factors is None:
            return np.ones((len(DEVIATING), len(tokens))), np.zeros((len(DEVIATING), len(tokens)))
        factors = self.factors.to(p.dtype)
        likelier = (factors > 1).to(p.dtype)
        ratios, deviations = factors[tokens] / (p @ factors), likelier[tokens] - p @ likelier
        return ratios.T.double().numpy(force=True), deviations.T.double().numpy(force=True)

    @staticmethod
    def _factors(seen: Tensor, expected: Tensor) -> Tensor:
        """Seen over expected `(vocab, bets)` for the tokens that deviate, and 1 for the others.

        One is added to both counts, so that no token is taken to be impossible.
        """
        deviation = (seen - expected).abs() / (expected + 1).sqrt()
        factor = (seen + 1) / (expected + 1)
        return torch.stack([factor.where(deviation > limit, 1.0) for limit in DEVIATING], dim=-1)
