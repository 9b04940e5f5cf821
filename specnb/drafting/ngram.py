"""N-gram models counted from tokens: drafters of negligible cost (section 3.6).

Interpolated Kneser-Ney smoothing: each order subtracts a discount from its counts and gives the freed probability to
the order below, down to the uniform distribution. So each distribution sums to one and gives every token a chance. With
a discount of 0 nothing is freed: the model backs off to the longest context that was seen, and reports its frequencies.
"""

from __future__ import annotations

import operator
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb.arguments import require_number, require_whole, shown, whole
from specnb.drafting.arguments import whole_tokens
from specnb.drafting.base import Context
from specnb.drafting.chain import ChainDrafter
from specnb.sampling.distributions import Sampling, standardise_probs

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
