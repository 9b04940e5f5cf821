"""Distributions seen through a few cells: the likeliest tokens one by one, all others in two lumps.

A bet against p may look at the token through any cells it likes, as long as they are chosen before the
token is seen: its expected factor under p stays 1. So a vocabulary of any size costs the same few
hundred numbers a position.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

HEAD = 128
"""Tokens with a cell of their own: the likeliest under any of the distributions that a position has."""


class CondensedView(NamedTuple):
    """The distributions of n positions on C cells, `(n, C)`, in the dtype they came in, and where the emitted tokens lie;
    all on the CPU, since what comes of them is small.

    p       what the target says
    q       what the draft says, or None
    raw     what the draft says before it is standardised, or None
    before  p of the position before
    sizes   how many tokens a cell holds
    ids     (n, C - 2) the token of each cell; the last two cells are lumps, of the tokens that q (or
            `before`, without q) finds likelier than p does, and of those it does not
    cell      (n,) the cell of the token that was emitted
    previous  (n,) the cell of the token before it
    """

    p: Tensor
    q: Tensor | None
    raw: Tensor | None
    before: Tensor
    sizes: Tensor
    ids: Tensor
    cell: Tensor
    previous: Tensor

    def at_token(self, probs: Tensor) -> Tensor:
        """`distribution` `(..., n, C)` at the cell of the emitted token, `(..., n)`."""
        return probs.gather(-1, self.cell[:, None].expand(*probs.shape[:-1], 1))[..., 0]


def condense(
    tokens: Tensor,
    p: Tensor,
    before: Tensor,
    q: Tensor | None = None,
    raw: Tensor | None = None,
    previous: int = 0,
    head: int = HEAD,
) -> CondensedView:
    """The view of distributions `(n, vocab)` and the `tokens` `(n,)` that were emitted there, one after the other.

    Which tokens get a cell depends on the distributions alone. `previous` is the token before the first.
    """
    score = torch.maximum(p, before)
    for probs in (q, raw):
        score = score if probs is None else torch.maximum(score, probs)
    ids = top_tokens(score, min(head, p.shape[-1]))
    up = greater_mask(before if q is None else q, p)
    # Both lumps are summed, neither is a difference: a lump with a possible token in it has mass.
    lumps = (up.scatter(-1, ids, 0.0), (1 - up).scatter(-1, ids, 0.0))

    def on_cells(probs: Tensor) -> Tensor:
        rest = torch.stack([torch.linalg.vecdot(probs, lump) for lump in lumps], dim=-1)
        cells = torch.cat([probs.gather(-1, ids), rest], dim=-1)
        return (cells / cells.sum(dim=-1, keepdim=True)).cpu()

    held = [lump.sum(dim=-1).to(ids.dtype) for lump in lumps]
    last = torch.cat([tokens.new_tensor([previous]), tokens[:-1]])
    return CondensedView(
        p=on_cells(p),
        q=None if q is None else on_cells(q),
        raw=None if raw is None else on_cells(raw),
        before=on_cells(before),
        sizes=torch.cat([torch.ones_like(ids), torch.stack(held, dim=-1)], dim=-1).cpu(),
        ids=ids.cpu(),
        cell=_cell(ids, up, tokens).cpu(),
        previous=_cell(ids, up, last).cpu(),
    )


def top_tokens(score: Tensor, count: int) -> Tensor:
    """The `count` tokens with the largest `score` `(n, vocab)`, in the order of their ids `(n, count)`."""
    if score.device.type != "cpu":
        return score.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    found = np.argpartition(score.numpy(force=True), -count, axis=-1)[:, -count:]  # torch takes five times as long
    return torch.from_numpy(np.sort(found, axis=-1))


def greater_mask(a: Tensor, b: Tensor) -> Tensor:
    """1 where a > b and 0 elsewhere, in the dtype of a: to multiply by, which is faster than to choose."""
    return torch.gt(a, b, out=a.new_empty(torch.broadcast_shapes(a.shape, b.shape)))


def _cell(ids: Tensor, up: Tensor, tokens: Tensor) -> Tensor:
    match = ids == tokens[:, None]
    lump = ids.shape[-1] + (up.gather(-1, tokens[:, None])[:, 0] == 0).long()
    return torch.where(match.any(dim=-1), match.to(torch.uint8).argmax(dim=-1), lump)
