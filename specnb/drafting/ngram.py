"""N-gram models counted from tokens: drafters of negligible cost (section 3.6).

Interpolated Kneser-Ney smoothing: each order subtracts a discount from its counts and gives the freed probability to
the order below, down to the uniform distribution. So each distribution sums to one and gives every token a chance. With
a discount of 0 nothing is freed: the model backs off to the longest context that was seen, and reports its frequencies.

Prompt lookup: copy what followed the longest earlier occurrence of the newest tokens (section 3.6).

Saxena's prompt lookup decoding, and `prompt_lookup_num_tokens` of transformers. No model and no training: tensor
operations on the sequence alone, of rows x slots x longest comparisons for each draft token, on any device.

Copying from given documents: a suffix automaton over a file to edit, a retrieved passage, or earlier outputs.

The automaton has a state for each set of strings that end at the same places in the documents, at most two states for
each token. It lies on the host, and so does the search: `longest` dictionary look-ups for each row and draft token, and
on a CUDA device one copy each way, for which the step waits.

Random drafts: every token is equally probable (section 3.6).
"""

from __future__ import annotations

import operator
import zipfile
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.arguments import require_number, require_whole, shown, whole
from specnb.distributions import Sampling, standardise_probs
from specnb.drafting.base import ChainDrafter, Context, require_lengths, whole_tokens

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


_PARTS = ("contexts", "starts", "tokens", "counts")


class NgramModel:
    """The distribution of a token given the `order - 1` tokens before it, counted from `tokens`.

    `order` 1 is the unigram, 2 the bigram. `discount` is in [0, 1]; 0 is backing off without smoothing.

    >>> NgramModel(np.array([0, 1, 0, 0]), order=1, vocab=2).probs(np.zeros((1, 0), dtype=np.int64)).round(3)
    array([[0.75, 0.25]])

    Raises `TypeError` for tokens that are no list of whole numbers; `ValueError` for order < 1, fewer than 2 tokens in
    the vocabulary, tokens outside the vocabulary, too few tokens, a discount outside [0, 1], and a
    vocabulary and order whose n-grams do not fit into 63 bits.
    """

    def __init__(self, tokens: Ints, order: int, vocab: int, discount: float = DISCOUNT) -> None:
        tokens = whole_tokens("tokens", tokens)
        _require_settings(order, vocab, discount)
        if len(tokens) < order:
            raise ValueError(f"{len(tokens)} tokens are too few to count {order}-grams")
        self.order, self.vocab, self.discount = order, vocab, discount
        self._require(tokens, least=0)
        self.orders = [self._count(tokens, n) for n in range(1, order + 1)]

    def save(self, path: str | Path) -> None:
        """Writes the table to `path`, a file that `load` reads; it holds arrays of numbers only."""
        arrays = {f"{n}_{name}": getattr(order, name) for n, order in enumerate(self.orders) for name in _PARTS}
        settings = {"order": self.order, "vocab": self.vocab, "discount": self.discount}
        with Path(path).open("wb") as file:
            np.savez_compressed(file, **arrays, **settings)  # type: ignore[arg-type]  # its stub takes a bool here

    @classmethod
    def load(cls, path: str | Path) -> NgramModel:
        """The model that `save` wrote to `path`. Nothing in the file is executed.

        Raises `FileNotFoundError`, and `ValueError` for a file that `save` has not written or that is damaged.

        >>> import tempfile
        >>> model = NgramModel(np.array([0, 1, 0, 0]), order=1, vocab=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save(Path(folder) / "table.npz")
        ...     NgramModel.load(Path(folder) / "table.npz").probs(np.zeros((1, 0), dtype=np.int64)).round(3)
        array([[0.75, 0.25]])
        """
        try:
            # Opened here: numpy leaves a damaged file open.
            with Path(path).open("rb") as opened, np.load(opened, allow_pickle=False) as file:
                own = {name: file[name] for name in file.files}
            model = cls.__new__(cls)
            model.order, model.vocab = (operator.index(own[name][()]) for name in ("order", "vocab"))
            model.discount = float(own["discount"])
            _require_settings(model.order, model.vocab, model.discount)
            parts = [[whole_tokens(name, own[f"{n}_{name}"]) for name in _PARTS] for n in range(model.order)]
            model.orders = [_Order(*own) for own in parts]
        except FileNotFoundError:
            raise
        except (OSError, EOFError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} is no n-gram table ({error!r}); write it again with NgramModel.save") from error
        model._require_consistent(path)
        return model

    def _require_consistent(self, path: str | Path) -> None:
        """Raises `ValueError` for a table in which an entry points outside of it, is out of order or comes twice."""
        for known, order in enumerate(self.orders):
            right = (
                len(order.contexts) > 0
                and 0 <= order.contexts[0] <= order.contexts[-1] < self.vocab**known
                and (np.diff(order.contexts) > 0).all()
                and len(order.starts) == len(order.contexts) + 1
                and order.starts[0] == 0
                and (np.diff(order.starts) > 0).all()
                and order.starts[-1] == len(order.tokens) == len(order.counts)
                and order.tokens.min() >= 0
                and order.tokens.max() < self.vocab
                and order.counts.min() > 0
                and (np.delete(np.diff(order.tokens), order.starts[1:-1] - 1) > 0).all()
            )
            if not right:
                raise ValueError(f"the n-gram table in {path} contradicts itself; write it again with NgramModel.save")

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
        probs = below * (self.discount * sizes / totals)[:, None]
        probs[which, order.tokens[entries]] += (counts - self.discount) / totals[which]
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


def _require_settings(order: int, vocab: int, discount: float) -> None:
    require_whole(vocab=(vocab, 2))
    most = int(62.9 / np.log2(vocab))
    if not 1 <= (whole(order) or 0) <= most:
        raise ValueError(f"order is {shown(order)}; with {vocab} tokens it can be 1 to {most}")
    require_number(most=1.0, discount=discount)


class NgramDrafter(ChainDrafter):
    """A chain of tokens sampled from an n-gram model, on the host: the table does not leave it.

    On a CUDA device each draft token costs a copy of the newest tokens to the host and of a distribution back, for
    which the step waits. Raises `TypeError` for a model that is no `NgramModel`.

    >>> model = NgramModel(np.array([0, 1, 0, 1, 0, 2, 0]), order=2, vocab=3)
    >>> context = Context(torch.tensor([[0, 1, 0]]), torch.tensor([3]))
    >>> proposal = NgramDrafter(model).propose(context, torch.tensor([[0.5, 0.5]]))
    >>> proposal.draft_tokens
    tensor([[1, 0]])
    """

    def __init__(self, model: NgramModel, sampling: Sampling = Sampling()) -> None:
        if not isinstance(model, NgramModel):
            raise TypeError(f"model is a {type(model).__name__}; it must be an NgramModel")
        self.model = model
        self.sampling = sampling
        self.vocab = model.vocab

    def distribution(self, context: Context, position: int) -> Tensor:
        """See `ChainDrafter.distribution`."""
        tokens, lengths = context.tokens, context.lengths
        back = self.model.order - 1
        slots = lengths[:, None] - back + torch.arange(back, device=lengths.device)
        recent = tokens.gather(1, slots.clamp_min(0)).where(slots >= 0, -1).cpu().numpy()
        return standardise_probs(torch.from_numpy(self.model.probs(recent)), self.sampling).to(tokens.device)


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


SEPARATOR = -1  # between documents; no sequence contains it


class SuffixAutomaton:
    """All substrings of `documents`, and how often each occurs.

    Raises `ValueError` if there are no tokens, `TypeError` for documents that are no lists of whole numbers.

    >>> automaton = SuffixAutomaton([[1, 2, 3], [1, 2, 4], [2, 4]])
    >>> automaton.continuations([7, 1, 2])
    (2, {3: 1, 4: 1})
    """

    def __init__(self, documents: Collection[Sequence[int]]) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.count = [-1], [0], [0]
        last = 0
        documents = listed_documents(documents)
        if not any(documents):
            raise ValueError("the documents have no tokens; give at least one document with a few tokens")
        for document in documents:
            for token in [*document, SEPARATOR]:
                last = self._append(token, last)
        for state in sorted(range(1, len(self.length)), key=lambda state: -self.length[state]):
            self.count[self.link[state]] += self.count[state]

    def _append(self, token: int, last: int) -> int:
        """Extends the automaton by one token (Blumer et al. 1985); returns the state of the whole string."""
        new = self._state({}, 0, self.length[last] + 1, 1)
        state = last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state < 0:
            return new
        target = self.next[state][token]
        if self.length[target] == self.length[state] + 1:
            self.link[new] = target
            return new
        copy = self._state(dict(self.next[target]), self.link[target], self.length[state] + 1, 0)
        while state >= 0 and self.next[state].get(token) == target:
            self.next[state][token] = copy
            state = self.link[state]
        self.link[target] = self.link[new] = copy
        return new

    def _state(self, following: dict[int, int], link: int, length: int, count: int) -> int:
        self.next.append(following)
        self.link.append(link)
        self.length.append(length)
        self.count.append(count)
        return len(self.length) - 1

    def continuations(self, recent: Sequence[int]) -> tuple[int, dict[int, int]]:
        """The longest suffix of `recent` that occurs with a token after it: its length, and how often each follows."""
        state = matched = 0
        for token in recent:
            while state > 0 and token not in self.next[state]:
                state = self.link[state]
                matched = self.length[state]
            if token in self.next[state]:
                state, matched = self.next[state][token], matched + 1
        while True:
            after = {token: self.count[to] for token, to in self.next[state].items() if token != SEPARATOR}
            if after or state == 0:
                return matched, after
            state = self.link[state]
            matched = self.length[state]


def listed_documents(documents: Any) -> list[list[int]]:
    """Each of `documents` as a list of tokens. Raises `TypeError` for anything else, such as a text or a flat list.

    >>> listed_documents([torch.tensor([1, 2]), [3]])
    [[1, 2], [3]]
    """
    if isinstance(documents, str | bytes) or not isinstance(documents, Collection):
        raise TypeError(
            f"documents is a {type(documents).__name__}; it must be a list of documents, each a list of tokens"
        )
    return [whole_tokens(f"document {number}", document).tolist() for number, document in enumerate(documents)]


class SuffixDrafter(ChainDrafter):
    """Proposes what follows the longest suffix of the sequence in `documents`, which are the same for all rows.

    At least `shortest` of the newest tokens have to occur, and at most `longest` are looked at; otherwise nothing is
    proposed. `proportional` samples among the continuations as often as each occurs; otherwise the most frequent one is
    taken (the lowest token among equals) and q is one-hot.

    Raises `ValueError` for lengths that are not 1 <= shortest <= longest, documents without tokens, and tokens outside
    the vocabulary; `TypeError` for documents that are no lists of whole numbers.

    >>> drafter = SuffixDrafter([[4, 5, 6, 7]], vocab=9)
    >>> drafter.distribution(Context(torch.tensor([[1, 4, 5, 0]]), torch.tensor([3])), 0).argmax(-1)
    tensor([6])
    """

    def __init__(
        self,
        documents: Collection[Sequence[int]],
        vocab: int,
        longest: int = 32,
        shortest: int = 2,
        proportional: bool = False,
    ) -> None:
        require_lengths(vocab, shortest, longest)
        documents = listed_documents(documents)
        outside = [token for document in documents for token in document if not 0 <= token < vocab]
        if outside:
            raise ValueError(
                f"the documents have the token {outside[0]}; the vocabulary has the tokens 0 to {vocab - 1}. "
                "Encode them with the target's tokenizer"
            )
        self.automaton = SuffixAutomaton(documents)
        self.vocab, self.longest, self.shortest, self.proportional = vocab, longest, shortest, proportional

    def distribution(self, context: Context, position: int) -> Tensor:
        """See `ChainDrafter.distribution`."""
        tokens, lengths = context.tokens, context.lengths
        counts = torch.zeros(len(tokens), self.vocab)
        for row, (sequence, length) in enumerate(zip(tokens.tolist(), lengths.tolist(), strict=True)):
            matched, after = self.automaton.continuations(sequence[max(0, length - self.longest) : length])
            if matched < self.shortest:
                continue
            if not self.proportional:
                after = {max(after, key=lambda token: (after[token], -token)): 1}
            counts[row, list(after)] = torch.tensor(list(after.values()), dtype=torch.float32)
        return (counts / counts.sum(dim=1, keepdim=True).clamp_min(1)).to(tokens.device)


class UniformDrafter(ChainDrafter):
    """Each draft token is sampled uniformly from the vocabulary. Its acceptance probability is sum min(p, 1/vocab).

    Raises `ValueError` unless `vocab` is a whole number from 1.

    >>> UniformDrafter(4).distribution(Context(torch.tensor([[1]]), torch.tensor([1])), 0)
    tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """

    def __init__(self, vocab: int) -> None:
        require_whole(vocab=(vocab, 1))
        self.vocab = vocab

    def distribution(self, context: Context, position: int) -> Tensor:
        """See `ChainDrafter.distribution`."""
        return torch.full((len(context.lengths), self.vocab), 1 / self.vocab, device=context.lengths.device)
