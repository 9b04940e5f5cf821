"""N-gram models counted from tokens: drafters of negligible cost (section 3.6).

Interpolated Kneser-Ney smoothing: each order subtracts a discount from its counts and gives the freed probability to
the order below, down to the uniform distribution. So each distribution sums to one and gives every token a chance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.drafting.base import Context, Drafter, Proposal
from specnb.sampling.distributions import Sampling, sample, standardise_probs

DISCOUNT = 0.75
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Order:
    """Counts after each context of one length: context i owns entries `starts[i]` to `starts[i + 1]`."""

    contexts: Ints
    starts: Ints
    tokens: Ints
    counts: Ints

    @staticmethod
    def of(grams: Ints, counts: Ints, vocab: int) -> _Order:
        """From sorted n-grams, each one number in base `vocab`, and how often each was seen."""
        contexts, starts = np.unique(grams // vocab, return_index=True)
        return _Order(contexts, np.append(starts, len(grams)), grams % vocab, counts)

    def rows(self, contexts: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """The row of each context, and whether it was ever seen."""
        rows = np.searchsorted(self.contexts, contexts).clip(max=len(self.contexts) - 1)
        return rows, self.contexts[rows] == contexts


class NgramModel:
    """The distribution of a token given the `order - 1` tokens before it, counted from `tokens`.

    `order` 1 is the unigram, 2 the bigram.

    >>> NgramModel(np.array([0, 1, 0, 0]), order=1, vocab=2).probs(np.zeros((1, 0), dtype=np.int64)).round(3)
    array([[0.75, 0.25]])

    Raises `ValueError` for order < 1, tokens outside the
    vocabulary, too few tokens, and a vocabulary and order whose n-grams do not fit into 63 bits.
    """

    def __init__(self, tokens: Ints, order: int, vocab: int) -> None:
        tokens = np.asarray(tokens, dtype=np.int64)
        if order < 1 or order * np.log2(vocab) >= 63:
            raise ValueError(f"order is {order}; with {vocab} tokens it can be 1 to {int(62.9 / np.log2(vocab))}")
        if len(tokens) < order:
            raise ValueError(f"{len(tokens)} tokens are too few to count {order}-grams")
        self.order, self.vocab = order, vocab
        self._require(tokens, least=0)
        self.orders = [self._count(tokens, n) for n in range(1, order + 1)]

    def _count(self, tokens: Ints, n: int) -> _Order:
        """Raw counts at the highest order; below it, in how many different contexts an n-gram was seen."""
        width = min(n + 1, self.order)
        grams = sum(tokens[i : len(tokens) - width + 1 + i] * self.vocab ** (width - 1 - i) for i in range(width))
        grams, counts = np.unique(grams, return_counts=True)
        if n < self.order:
            grams, counts = np.unique(grams % self.vocab**n, return_counts=True)
        return _Order.of(grams, counts, self.vocab)

    def probs(self, contexts: Ints) -> NDArray[np.float64]:
        """The distributions `(batch, vocab)` after `contexts` `(batch, order - 1)`, the newest token last.

        -1 stands for "nothing there yet": orders that would need it are left out. Raises `ValueError` for
        tokens outside the vocabulary.
        """
        self._require(contexts, least=-1)
        probs = np.full((len(contexts), self.vocab), 1.0 / self.vocab)
        for n, order in enumerate(self.orders, start=1):
            recent = contexts[:, contexts.shape[1] - n + 1 :]
            codes = recent @ self.vocab ** np.arange(n - 2, -1, -1)
            rows, seen = order.rows(codes)
            seen &= (recent >= 0).all(axis=1)
            probs[seen] = self._interpolate(order, rows[seen], probs[seen])
        return probs

    def _interpolate(self, order: _Order, rows: Ints, below: NDArray[np.float64]) -> NDArray[np.float64]:
        first, sizes = order.starts[rows], order.starts[rows + 1] - order.starts[rows]
        which = np.repeat(np.arange(len(rows)), sizes)
        entries = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes) + first[which]
        counts = order.counts[entries]
        totals = np.bincount(which, counts, len(rows))
        probs = below * (DISCOUNT * sizes / totals)[:, None]
        probs[which, order.tokens[entries]] += (counts - DISCOUNT) / totals[which]
        return probs

    def _require(self, tokens: Ints, least: int) -> None:
        if tokens.size and (tokens.min() < least or tokens.max() >= self.vocab):
            reach = f"they reach from {tokens.min()} to {tokens.max()}"
            raise ValueError(f"tokens must lie in {least} to {self.vocab - 1}; {reach}")

    def bits(self, tokens: Ints, chunk: int = 2048) -> float:
        """Bits that the model needs for `tokens`, all of them, the first without any context."""
        tokens = np.asarray(tokens, dtype=np.int64)
        self._require(tokens, least=0)
        padded = np.concatenate([np.full(self.order - 1, -1), tokens])
        contexts = np.lib.stride_tricks.sliding_window_view(padded, self.order)[:, :-1]
        total = 0.0
        for at in range(0, len(tokens), chunk):
            distributions = self.probs(contexts[at : at + chunk])
            total -= np.log2(distributions[np.arange(len(distributions)), tokens[at : at + chunk]]).sum()
        return float(total)


class NgramDrafter(Drafter):
    """A chain of tokens sampled from an n-gram model, on the host: the table does not leave it.

    >>> model = NgramModel(np.array([0, 1, 0, 1, 0, 2, 0]), order=2, vocab=3)
    >>> context = Context(torch.tensor([[0, 1, 0]]), torch.tensor([3]))
    >>> proposal = NgramDrafter(model).propose(context, torch.tensor([[0.5, 0.5]]))
    >>> proposal.draft_tokens
    tensor([[1, 0]])
    """

    def __init__(self, model: NgramModel, sampling: Sampling = Sampling()) -> None:
        self.model = model
        self.sampling = sampling
        self.vocab = model.vocab

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        """See `Drafter.propose`."""
        tokens, lengths = context.tokens, context.lengths
        back = self.model.order - 1
        slots = lengths[:, None] - back + torch.arange(back, device=lengths.device)
        recent = tokens.gather(1, slots.clamp_min(0)).where(slots >= 0, -1).cpu().numpy()
        draft_tokens, distributions = [], []
        for uniform in uniforms.unbind(dim=1):
            probs = standardise_probs(torch.from_numpy(self.model.probs(recent)), self.sampling)
            distributions.append(probs.to(uniforms.device))
            draft_tokens.append(sample(distributions[-1], uniform))
            recent = np.concatenate([recent, draft_tokens[-1][:, None].cpu().numpy()], axis=1)[:, 1:]
        return Proposal(torch.stack(draft_tokens, dim=1), torch.stack(distributions, dim=1))
