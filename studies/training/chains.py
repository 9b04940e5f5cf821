"""Drafts of a head in training: after every token of a text, or every few, the draft tokens that
follow it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

from specnb.cache import additive_mask
from specnb.fast import shared_copy
from specnb.heads import Eagle3Head, LayeredHead, NextTokenHead


def drafted(every: int, depths: int) -> list[slice]:
    """The positions of each draft token, depth by depth, of drafts after every `every`th token from
    the second on.

    >>> drafted(4, 4)
    [slice(1, None, 4), slice(2, None, 4), slice(3, None, 4), slice(4, None, 4)]
    """
    return [slice(depth, None, every) for depth in range(1, depths + 1)]


class Seen:
    """The keys and values of a text and of the drafts along it, in place of a cache.

    The first entry is all of the text; each later one is one more token of every draft. A token of
    the text sees the text up to itself but its first token, and a draft token the text up to where
    its draft began and the tokens of its own draft.
    """

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        self.kept.append((key, value))
        keys, values = zip(*self.kept, strict=True)
        return torch.cat(keys, dim=2), torch.cat(values, dim=2)

    def mask(self, slots: Tensor, dtype: torch.dtype) -> Tensor:
        """For the next entry, of tokens at `slots` `(batch, n)`."""
        depth, n = len(self.kept), slots.shape[1]
        text = torch.arange(self.kept[0][0].shape[2] if depth else n)
        visible = (text <= slots[:1, :, None] - depth) & ((text > 0) | (slots[:1, :, None] == 0))
        before = [each[None] for each in self.before(n)]
        own = [torch.eye(n, dtype=torch.bool)[None]] if depth else []
        return additive_mask(torch.cat([visible, *before, *own], dim=2), dtype)

    def before(self, n: int) -> list[Tensor]:
        """Which tokens of each earlier entry but the text are of the drafts of the `n` next ones."""
        return [torch.eye(n, key.shape[2], dtype=torch.bool) for key, _ in self.kept[1:]]


class Branches(Seen):
    """`Seen` of trees: before an entry, `parents` `(n,)` says which token of the entry before it each
    of its tokens follows."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[Tensor] = []
        self.parents = torch.zeros(0, dtype=torch.int64)

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> tuple[Tensor, Tensor]:
        if self.kept:
            self.links.append(self.parents)
        return super().update(key, value, layer)

    def before(self, n: int) -> list[Tensor]:
        at, found = torch.arange(n), list[Tensor]()
        links = [*self.links, self.parents][1:]  # those of the first entry are places of the text
        for link, (key, _) in zip(links[::-1], self.kept[:0:-1], strict=True):
            at = link[at]
            found.append(one_hot(at, key.shape[2]).bool())
        return found[::-1]


class _Trained:
    """A head whose layers read `Seen`."""

    def passed(self: Any, embedded: Tensor, slots: Tensor, cache: Any) -> dict[str, Any]:
        return {
            "attention_mask": cache.mask(slots, embedded.dtype),
            "position_embeddings": self.rotary_emb(embedded, slots),
            "position_ids": slots,
            "past_key_values": cache,
        }


class TrainedEagle3(_Trained, Eagle3Head):
    pass


class TrainedNextToken(_Trained, NextTokenHead):
    pass


def as_trained(head: LayeredHead) -> Any:
    """The head, with the same weights, as `Chains` runs it."""
    made: Any = shared_copy(head)
    made.__class__ = TrainedEagle3 if isinstance(head, Eagle3Head) else TrainedNextToken
    return made


class Chains(nn.Module):
    """The states of `head`'s draft tokens along texts, `depths` after every `every`th token.

    Draft token k of a draft follows the k - 1 before it, which here are those of the text, with the
    head's own states in place of the target's.
    """

    def __init__(self, head: LayeredHead, embedding: nn.Module, depths: int) -> None:
        super().__init__()
        assert head.cached == 1, "`Seen` keeps what one layer reads"
        self.head: Any = head
        self.frozen, self.depths = (embedding,), depths

    def forward(self, tokens: Tensor, states: Tensor, every: int = 1) -> list[tuple[Tensor, slice]]:
        """What the output head reads, `(batch, n, width)`, for the tokens that follow the tokens
        `at` of each row, depth by depth; `states` `(batch, length, layers * width)` are the
        target's at `tokens`."""
        head, seen = self.head, Seen()
        embedded = self.frozen[0](tokens)
        slots = torch.arange(tokens.shape[1]).expand_as(tokens)
        # A token enters with the states of the token before it; the first token has none.
        state = pad(head.combined(states[:, :-1]), (0, 0, 1, 0))
        state = head.after(state, embedded, slots, seen, 0)[:, 1::every]
        found = []
        for depth, at in enumerate(drafted(every, self.depths)):
            if depth:
                n = slots[:, at].shape[1]
                state = head.after(state[:, :n], embedded[:, at], slots[:, at], seen, 0)
            found.append((head.features(state), at))
        return found
