"""Drafters of negligible cost, which predict from counted tokens (section 3.6).

    NgramDrafter         samples from an n-gram model of other text
    PromptLookupDrafter  copies what followed the newest tokens earlier in the same sequence
    UniformDrafter       every token is equally probable

The tables of the n-gram model lie on the host: on a CUDA device a step waits for a copy of the
newest tokens to the host and of a distribution back, for each draft token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from specnb.distributions import Sampling, one_hot, standardise_probs
from specnb.drafters import ChainDrafter, Context, Proposal, nothing
from specnb.number_checks import require_number, require_whole, shown, whole

DISCOUNT = 0.75
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Order:
    """Counts after each context of one length: context i owns entries `starts[i]` to
    `starts[i + 1]`."""

    contexts: Ints
    starts: Ints
    tokens: Ints
    counts: Ints

    def rows(self, contexts: Ints) -> tuple[Ints, NDArray[np.bool_]]:
        """The row of each context, and whether it was ever seen."""
        rows = np.searchsorted(self.contexts, contexts).clip(max=len(self.contexts) - 1)
        return rows, self.contexts[rows] == contexts


class NgramModel:
    """The distribution of a token given the `order - 1` tokens before it, counted from `tokens`.

    Interpolated Kneser-Ney smoothing: each order subtracts `discount` from its counts and gives the
    freed probability to the order below, down to the uniform distribution, so that every token has
    a chance. With a discount of 0 nothing is freed: the model backs off to the longest context that
    was seen, and reports its frequencies. `order` 1 is the unigram, 2 the bigram.

    Raises `TypeError` for tokens that are no list of whole numbers; `ValueError` for order < 1,
    fewer than 2 tokens in the vocabulary, tokens outside the vocabulary, too few tokens, a discount
    outside [0, 1], and a vocabulary and order whose n-grams do not fit into 63 bits.

    >>> NgramModel(np.array([0, 1, 0, 0]), order=1, vocab=2).probs(np.zeros((1, 0), dtype=np.int64)).round(3)
    array([[0.75, 0.25]])
    """

    def __init__(self, tokens: Ints, order: int, vocab: int, discount: float = DISCOUNT) -> None:
        tokens = whole_tokens("tokens", tokens)
        require_whole(vocab=(vocab, 2))
        most = int(62.9 / np.log2(vocab))
        if not 1 <= (whole(order) or 0) <= most:
            raise ValueError(f"order is {shown(order)}; with {vocab} tokens it can be 1 to {most}")
        require_number(most=1.0, discount=discount)
        if len(tokens) < order:
            raise ValueError(f"{len(tokens)} tokens are too few to count {order}-grams")
        self.order, self.vocab, self.discount = order, vocab, discount
        self._require(tokens, least=0)
        self.orders = [self._count(tokens, n) for n in range(1, order + 1)]

    def _count(self, tokens: Ints, n: int) -> _Order:
        """Raw counts at the highest order; below it, in how many different contexts an n-gram was
        seen."""
        width = min(n + 1, self.order)
        grams = sum(tokens[i : len(tokens) - width + 1 + i] * self.vocab ** (width - 1 - i) for i in range(width))
        grams, counts = np.unique(grams, return_counts=True)
        if n < self.order:
            grams, counts = np.unique(grams % self.vocab**n, return_counts=True)
        contexts, starts = np.unique(grams // self.vocab, return_index=True)
        return _Order(contexts, np.append(starts, len(grams)), grams % self.vocab, counts)

    def probs(self, contexts: Ints) -> NDArray[np.float64]:
        """The distributions `(batch, vocab)` after `contexts` `(batch, order - 1)`, the newest
        token last.

        -1 stands for "nothing there yet": orders that would need it are left out. Raises
        `ValueError` for tokens outside the vocabulary.
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
        probs = below * (self.discount * sizes / totals)[:, None]
        probs[which, order.tokens[entries]] += (counts - self.discount) / totals[which]
        return probs

    def _require(self, tokens: Ints, least: int) -> None:
        if tokens.size and (tokens.min() < least or tokens.max() >= self.vocab):
            reach = f"they reach from {tokens.min()} to {tokens.max()}"
            raise ValueError(f"tokens must lie in {least} to {self.vocab - 1}; {reach}")


class NgramDrafter(ChainDrafter):
    """A chain of tokens sampled from an n-gram `model`, as `sampling` says.

    Raises `TypeError` for a model that is no `NgramModel`.

    >>> model = NgramModel(np.array([0, 1, 0, 1, 0, 2, 0]), order=2, vocab=3)
    >>> context = Context(torch.tensor([[0, 1, 0]]), torch.tensor([3]))
    >>> NgramDrafter(model).propose(context, torch.tensor([[0.5, 0.5]])).draft_tokens
    tensor([[1, 0]])
    """

    def __init__(self, model: NgramModel, sampling: Sampling = Sampling()) -> None:
        if not isinstance(model, NgramModel):
            raise TypeError(f"model is a {type(model).__name__}; it must be an NgramModel")
        self.model, self.sampling, self.vocab = model, sampling, model.vocab

    def distribution(self, context: Context, position: int) -> Tensor:
        tokens, lengths = context.tokens, context.lengths
        back = self.model.order - 1
        slots = lengths[:, None] - back + torch.arange(back, device=lengths.device)
        recent = tokens.gather(1, slots.clamp_min(0)).where(slots >= 0, -1).cpu().numpy()
        return standardise_probs(torch.from_numpy(self.model.probs(recent)), self.sampling).to(tokens.device)


CHOICES = ("recent", "frequent", "proportional")
PER_MATCH = 3
"""Tokens that are copied for each token that agrees: the longer a match is, the more of what
follows is accepted."""


class PromptLookupDrafter(ChainDrafter):
    """Proposes what followed earlier occurrences of the row's newest tokens, in prompt and
    completion.

    Saxena's prompt lookup decoding, and `prompt_lookup_num_tokens` of transformers. No model and no
    training.

    Of the earlier places those count whose preceding tokens agree with the newest ones over the
    longest stretch, at most `longest` tokens and at least `shortest`; nothing is proposed if there
    is none. `choose` says which of their continuations is taken: "recent" the last one, "frequent"
    the most frequent one (the lowest token among equals), or "proportional", sampled as often as
    each occurs. The first two are deterministic, so q is one-hot; the third reports the
    frequencies.

    "recent" looks for the place once a step and copies from there, at most `PER_MATCH` tokens for
    each one that agrees; beyond the end of the sequence the copy goes on with its own first token,
    so a repetition continues. A place whose copy was rejected is not the next one: there the newest
    token is another. "frequent" and "proportional" match anew at each draft token, the earlier ones
    included, and so do mixtures and stopping rules. A single equal token says little about what
    follows (15 to 20% of such copies are accepted on the real model): in a mixture with another
    drafter, and where draft tokens cost much, `shortest` 2 or 3 is better.

    Raises `ValueError` for lengths that are not 1 <= shortest <= longest and another `choose`.

    >>> drafter = PromptLookupDrafter(vocab=9, longest=2)
    >>> context = Context(torch.tensor([[5, 6, 7, 8, 5, 6, 0, 0, 0]]), torch.tensor([6]))
    >>> drafter.propose(context, torch.rand(1, 8)).draft_tokens
    tensor([[7, 8, 5, 6, 7, 8]])
    """

    capturable = True  # it keeps nothing

    def __init__(self, vocab: int, longest: int = 8, shortest: int = 1, choose: str = "recent") -> None:
        require_lengths(vocab, shortest, longest)
        if choose not in CHOICES:
            raise ValueError(f"choose is {choose!r}; it must be one of {', '.join(CHOICES)}")
        self.vocab, self.longest, self.shortest, self.choose = vocab, longest, shortest, choose

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        if self.choose != "recent":
            return super().propose(context, uniforms)
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

    def matched(self, context: Context) -> Ints | None:
        return self.matches(context)[1].numpy() if self.choose == "recent" and context.readable else None

    def matches(self, context: Context) -> tuple[Tensor, Tensor]:
        """The slot from which each row copies, and how many tokens before it agree; 0 and 0 if less
        than `shortest`."""
        tokens, lengths = context.tokens, context.lengths
        if tokens.device.type == "cpu":
            rows = zip(tokens.numpy(), lengths.tolist(), strict=True)
            found = torch.tensor([latest_match(row[:length], self.longest) for row, length in rows])
            places, matched = found[:, 0], found[:, 1]
        else:
            slots = tokens.shape[1]
            lengths_of_all = match_lengths(tokens, lengths, self.longest)
            best = (lengths_of_all * slots + torch.arange(slots, device=tokens.device)).amax(dim=1)
            places, matched = best % slots, best // slots
        enough = matched >= self.shortest
        return places * enough, matched * enough

    def distribution(self, context: Context, position: int) -> Tensor:
        tokens, lengths = context.tokens, context.lengths
        if self.choose == "recent":
            places, matched = self.matches(context)
            q = torch.zeros(len(tokens), self.vocab, device=tokens.device, dtype=torch.float32)
            return q.scatter_(1, tokens.gather(1, places[:, None]), (matched > 0).float()[:, None])
        lengths_of_all = match_lengths(tokens, lengths, self.longest)
        best = lengths_of_all.amax(dim=1, keepdim=True)
        chosen = (lengths_of_all == best) & (lengths_of_all >= self.shortest)
        counts = torch.zeros(len(tokens), self.vocab, device=tokens.device, dtype=torch.float32)
        return copied(counts.scatter_add_(1, tokens, chosen.float()), self.choose == "proportional")


def latest_match(row: Ints, longest: int) -> tuple[int, int]:
    """What `match_lengths` finds in `row` `(length,)`: the last slot of the greatest length, and
    that; 0, 0 for none.

    >>> latest_match(np.array([1, 2, 3, 1, 2]), longest=4)
    (2, 2)
    """
    newest = len(row) - 1
    ends = np.flatnonzero(row[:newest] == row[newest])
    if not len(ends):
        return 0, 0
    for length in range(1, longest):
        longer = ends[ends >= length]
        longer = longer[row[longer - length] == row[newest - length]]
        if not len(longer):
            return int(ends[-1]) + 1, length
        ends = longer
    return int(ends[-1]) + 1, longest


def copied(counts: Tensor, proportional: bool) -> Tensor:
    """q `(rows, vocab)` of continuations seen `counts` `(rows, vocab)` times: as often as each, or
    the most frequent.

    >>> copied(torch.tensor([[2.0, 1.0, 1.0], [0.0, 0.0, 0.0]]), proportional=True)
    tensor([[0.5000, 0.2500, 0.2500],
            [0.0000, 0.0000, 0.0000]])
    """
    total = counts.sum(dim=1, keepdim=True)
    if proportional:
        return counts / total.clamp_min(1)
    return one_hot(counts.argmax(dim=1), counts.shape[1]).where(total > 0, 0.0)


def match_lengths(tokens: Tensor, lengths: Tensor, longest: int) -> Tensor:
    """`(rows, slots)`: how many tokens right before each slot agree with the newest of the row,
    `longest` at most.

    0 from a row's length on. An occurrence ends before the newest token, so that a token follows
    it.

    >>> match_lengths(torch.tensor([[1, 2, 3, 1, 2]]), torch.tensor([5]), longest=4)
    tensor([[0, 0, 2, 0, 0]])
    """
    longest = min(longest, tokens.shape[1])
    # At each slot, the `longest` tokens before it begin.
    after = pad(tokens, (longest, 0), value=-1)
    newest = after.gather(1, lengths[:, None] + torch.arange(longest, device=tokens.device))[:, None]
    agree = (after.unfold(1, longest, 1)[:, :-1] == newest) & (newest >= 0)
    matched = agree.flip(-1).cumprod(dim=-1).sum(dim=-1)
    return matched.where(torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None], 0)


class UniformDrafter(ChainDrafter):
    """Each draft token is sampled uniformly from the vocabulary. Its acceptance probability is sum
    min(p, 1/vocab).

    Raises `ValueError` unless `vocab` is a whole number from 1.

    >>> UniformDrafter(4).distribution(Context(torch.tensor([[1]]), torch.tensor([1])), 0)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def __init__(self, vocab: int) -> None:
        require_whole(vocab=(vocab, 1))
        self.vocab = vocab

    def distribution(self, context: Context, position: int) -> Tensor:
        shape, device = (len(context.lengths), self.vocab), context.lengths.device
        return torch.full(shape, 1 / self.vocab, device=device, dtype=torch.float32)


def whole_tokens(name: str, tokens: Any) -> Ints:
    """`tokens`, a list, array or tensor of token numbers, as an array `(tokens,)`. Raises
    `TypeError` for others.

    >>> whole_tokens("tokens", [3, 1])
    array([3, 1])
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or (array.size > 0 and array.dtype.kind not in "iu"):
        raise TypeError(
            f"{name} is {shown(tokens)}; it must be a list of whole numbers: encode a text with the target's tokenizer"
        )
    return array.astype(np.int64)


def require_lengths(vocab: int, shortest: int, longest: int) -> None:
    """Raises `ValueError` unless all are whole numbers with 1 <= `shortest` <= `longest`, and
    `vocab` at least 1."""
    require_whole(vocab=(vocab, 1), shortest=(shortest, 1), longest=(longest, 1))
    if not shortest <= longest:
        raise ValueError(f"shortest is {shortest} and longest {longest}; they must be 1 <= shortest <= longest")
