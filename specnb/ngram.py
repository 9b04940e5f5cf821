"""Drafters of negligible cost, which predict from counted tokens (section 3.6)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from specnb.arguments import require_whole, shown, whole
from specnb.distributions import Sampling, standardise_probs
from specnb.drafters import ChainDrafter, Context, Proposal, nothing, padded

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
        tokens = whole_tokens("tokens", tokens)
        require_whole(vocab=(vocab, 2))
        most = int(62.9 / np.log2(vocab))
        if not 1 <= (whole(order) or 0) <= most:
            raise ValueError(f"order is {shown(order)}; with {vocab} tokens it can be 1 to {most}")
        if len(tokens) < order:
            raise ValueError(f"{len(tokens)} tokens are too few to count {order}-grams")
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
    Prompt lookup decoding (Saxena). At most `PER_MATCH` tokens are copied for each one that agrees;
    beyond the end of the sequence the copy begins anew.

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

    def matches(self, context: Context) -> tuple[Tensor, Tensor]:
        """The slot from which each row copies, and how many tokens before it agree; 0 if fewer than `shortest`."""
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


class UniformDrafter(ChainDrafter):
    """Samples each draft token uniformly; its acceptance probability is sum min(p, 1/vocab)."""

    def __init__(self, vocab: int) -> None:
        require_whole(vocab=(vocab, 1))
        self.vocab = vocab

    def distribution(self, context: Context, position: int) -> Tensor:
        shape, device = (len(context.lengths), self.vocab), context.lengths.device
        return torch.full(shape, 1 / self.vocab, device=device, dtype=torch.float32)


def whole_tokens(name: str, tokens: Any) -> Ints:
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size > 0 and array.dtype.kind not in "iu"):
        raise TypeError(
            f"{name} is {shown(tokens)}; it must be a list of whole numbers: encode a text with the target's tokenizer"
        )
    return array.astype(np.int64)
