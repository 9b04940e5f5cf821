"""Laws seen through a few cells: the likeliest tokens one by one, all others in two lumps.

A bet against p may look at the token through any cells it likes, as long as they are chosen before the
token is seen: its expected factor under p stays 1. So a vocabulary of any size costs the same few
hundred numbers a position.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

HEAD = 128
"""Tokens with a cell of their own: the likeliest under any of the laws that a position has."""


class View(NamedTuple):
    """The laws of n positions on C cells, `(n, C)`, in the dtype they came in, and where the emitted tokens lie.

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

    def at_token(self, law: Tensor) -> Tensor:
        """`law` `(n, C)` at the cell of the emitted token, `(n,)`."""
        return law.gather(-1, self.cell[:, None])[:, 0]


def view(
    tokens: Tensor,
    p: Tensor,
    before: Tensor,
    q: Tensor | None = None,
    raw: Tensor | None = None,
    previous: int = 0,
    head: int = HEAD,
) -> View:
    """The view of laws `(n, vocab)` and the `tokens` `(n,)` that were emitted there, one after the other.

    Which tokens get a cell depends on the laws alone. `previous` is the token before the first.
    """
    score = torch.maximum(p, before)
    for law in (q, raw):
        score = score if law is None else torch.maximum(score, law)
    ids = score.topk(min(head, p.shape[-1]), dim=-1, sorted=False).indices
    up = (before if q is None else q) > p
    lumps = up.to(p.dtype)
    return View(
        p=_lumped(p, ids, lumps),
        q=None if q is None else _lumped(q, ids, lumps),
        raw=None if raw is None else _lumped(raw, ids, lumps),
        before=_lumped(before, ids, lumps),
        sizes=_sizes(up, ids),
        ids=ids,
        cell=_cell(ids, up, tokens),
        previous=_cell(ids, up, torch.cat([tokens.new_tensor([previous]), tokens[:-1]])),
    )


def _cell(ids: Tensor, up: Tensor, tokens: Tensor) -> Tensor:
    match = ids == tokens[:, None]
    lump = ids.shape[-1] + (~up.gather(-1, tokens[:, None])[:, 0]).long()
    return torch.where(match.any(dim=-1), match.to(torch.uint8).argmax(dim=-1), lump)


def _lumped(law: Tensor, ids: Tensor, up: Tensor) -> Tensor:
    rest = law.scatter(-1, ids, 0.0)
    # Both lumps are summed, neither is a difference: a lump with a possible token in it has mass.
    lumps = torch.stack([torch.linalg.vecdot(rest, up), torch.linalg.vecdot(rest, 1 - up)], dim=-1)
    cells = torch.cat([law.gather(-1, ids), lumps], dim=-1)
    return cells / cells.sum(dim=-1, keepdim=True)


def _sizes(up: Tensor, ids: Tensor) -> Tensor:
    in_head = up.gather(-1, ids).sum(dim=-1)
    higher = up.sum(dim=-1) - in_head
    lower = up.shape[-1] - ids.shape[-1] - higher
    return torch.cat([torch.ones_like(ids), torch.stack([higher, lower], dim=-1)], dim=-1)
