"""Drafters that sample from tables (n-grams counted in a text, the uniform distribution), and a mixture of two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.arguments import require_whole, shown
from specnb.distributions import Sampling, standardise_probs
from specnb.drafters import ChainDrafter, Context
from specnb.rules import Outcome

DISCOUNT = 0.75  # subtracted from the counts of each order; the freed probability goes to the order below
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Order:
    """Counts after each context of one length: context i has the entries `starts[i]` to `starts[i + 1]`."""

    contexts: Ints
    starts: Ints
    tokens: Ints
    counts: Ints

    def rows(self, contexts: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        rows = np.searchsorted(self.contexts, contexts).clip(max=len(self.contexts) - 1)
        return rows, self.contexts[rows] == contexts


class NgramModel:
    """The distribution of a token given the `order - 1` tokens before it, by interpolated Kneser-Ney counts.

    Parameters
    ----------
    tokens
        Token numbers of a text.
    order
        1 for unigrams, 2 for bigrams, and so on.

    Examples
    --------
    >>> NgramModel(np.array([0, 1, 0, 0]), order=1, vocab=2).probs(np.zeros((1, 0), dtype=np.int64)).round(3)
    array([[0.75, 0.25]])
    """

    def __init__(self, tokens: Ints, order: int, vocab: int) -> None:
        most = int(62.9 / np.log2(vocab))  # a gram is one number of 63 bits
        if not 1 <= order <= most:
            raise ValueError(f"order is {order}; with {vocab} tokens it can be 1 to {most}")
        self.order, self.vocab = order, vocab
        self._require(tokens, least=0)
        self.orders = [self._count(tokens, n) for n in range(1, order + 1)]

    def _count(self, tokens: Ints, n: int) -> _Order:
        width = min(n + 1, self.order)
        grams = sum(tokens[i : len(tokens) - width + 1 + i] * self.vocab ** (width - 1 - i) for i in range(width))
        grams, counts = np.unique(grams, return_counts=True)
        if n < self.order:
            grams, counts = np.unique(grams % self.vocab**n, return_counts=True)
        contexts, starts = np.unique(grams // self.vocab, return_index=True)
        return _Order(contexts, np.append(starts, len(grams)), grams % self.vocab, counts)

    def probs(self, contexts: Ints) -> NDArray[np.float64]:
        """The distributions `(batch, vocab)` after `contexts` `(batch, order - 1)`, newest token last;
        -1 for no token."""
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


class NgramDrafter(ChainDrafter):
    """A chain of tokens sampled from an n-gram `model`, whose tables lie on the host: on a GPU each token waits.

    >>> model = NgramModel(np.array([0, 1, 0, 1, 0, 2, 0]), order=2, vocab=3)
    >>> context = Context(torch.tensor([[0, 1, 0]]), torch.tensor([3]))
    >>> NgramDrafter(model).propose(context, torch.tensor([[0.5, 0.5]])).draft_tokens
    tensor([[1, 0]])
    """

    def __init__(self, model: NgramModel, sampling: Sampling = Sampling()) -> None:
        self.model, self.sampling, self.vocab = model, sampling, model.vocab

    def distribution(self, context: Context, position: int) -> Tensor:
        tokens, lengths = context.tokens, context.lengths
        back = self.model.order - 1
        slots = lengths[:, None] - back + torch.arange(back, device=lengths.device)
        recent = tokens.gather(1, slots.clamp_min(0)).where(slots >= 0, -1).cpu().numpy()
        return standardise_probs(torch.from_numpy(self.model.probs(recent)), self.sampling).to(tokens.device)


class UniformDrafter(ChainDrafter):
    """Samples each draft token uniformly; its acceptance probability is sum min(p, 1/vocab)."""

    def __init__(self, vocab: int) -> None:
        require_whole(vocab=(vocab, 1))
        self.vocab = vocab

    def distribution(self, context: Context, position: int) -> Tensor:
        shape, device = (len(context.lengths), self.vocab), context.lengths.device
        return torch.full(shape, 1 / self.vocab, device=device, dtype=torch.float32)


class MixtureDrafter(ChainDrafter):
    """Samples from `weight` x first + (1 - `weight`) x second, or from one of them if the other proposes nothing.

    Examples
    --------
    >>> from specnb import PromptLookupDrafter
    >>> drafter = MixtureDrafter(PromptLookupDrafter(vocab=2, shortest=1), UniformDrafter(2), weight=0.5)
    >>> drafter.distribution(Context(torch.tensor([[0, 1, 0], [0, 0, 0]]), torch.tensor([3, 1])), 0)
    tensor([[0.2500, 0.7500],
            [0.5000, 0.5000]])
    """

    def __init__(self, first: ChainDrafter, second: ChainDrafter, weight: float = 1.0) -> None:
        require_part("first", first)
        require_part("second", second)
        require_number(most=1.0, weight=weight)
        self.first, self.second, self.weight = first, second, weight
        self.vocab = first.vocab
        self.draft_model = second.draft_model or first.draft_model
        self.hidden_layers = tuple(first.hidden_layers or second.hidden_layers)
        self.can_refill = first.can_refill and second.can_refill
        self.capturable = first.capturable and second.capturable

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        self.first.start(context, rows)
        self.second.start(context, rows)

    def distribution(self, context: Context, position: int) -> Tensor:
        first, second = (drafter.distribution(context, position) for drafter in (self.first, self.second))
        # A row proposes nothing if its sum is 0; NaN is a proposal.
        has_first, has_second = (~(q.sum(dim=-1, keepdim=True) <= 0) for q in (first, second))
        mixture = self.weight * first + (1 - self.weight) * second
        return mixture.where(has_first & has_second, first.where(has_first, second))

    def update(self, context: Context, outcome: Outcome) -> None:
        self.first.update(context, outcome)
        self.second.update(context, outcome)


def require_number(most: float, **numbers: float) -> None:
    for name, value in numbers.items():
        if not 0 <= value <= most:
            raise ValueError(f"{name} is {value!r}; it must lie in [0, {most:g}]")


def require_part(name: str, drafter: Any) -> None:
    if not isinstance(drafter, ChainDrafter) or drafter.parents is not None:
        raise TypeError(
            f"{name} is {shown(drafter)}; it must be a ChainDrafter of chains, such as ModelDrafter(model, sampling)"
        )
