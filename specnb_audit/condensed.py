"""Distributions condensed to a few cells: one cell per likely token, and two pooled cells for all other tokens.

A bet against p may use any partition of the vocabulary that is chosen before the token is seen: the expectation of its
factor under p stays 1. So every position costs the same few hundred numbers, whatever the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

LIKELY = 128
"""Tokens with a cell of their own: the likeliest under any of the distributions at a position."""


class CondensedDistributions(NamedTuple):
    """The distributions at n positions on C cells, `(n, C)`, in their dtype, and the cells of the emitted tokens.

    All on the CPU: what is computed from them is small.

    p              the target's distributions
    q              the draft's, or None
    raw            the draft's before standardisation, or None
    previous_p     p of the position before
    sizes          number of tokens in each cell
    ids            (n, C - 2) the token of each single-token cell; the last two cells are pooled: tokens that q (or
                   `previous_p`, without q) gives more probability than p does, and all others
    cell           (n,) the cell of the emitted token
    previous_cell  (n,) the cell of the token before it
    """

    p: Tensor
    q: Tensor | None
    raw: Tensor | None
    previous_p: Tensor
    sizes: Tensor
    ids: Tensor
    cell: Tensor
    previous_cell: Tensor

    def at_token(self, probs: Tensor) -> Tensor:
        """`probs` `(..., n, C)` at the cell of the emitted token, `(..., n)`."""
        return probs.gather(-1, self.cell[:, None].expand(*probs.shape[:-1], 1))[..., 0]


def condense_distributions(
    tokens: Tensor,
    p: Tensor,
    previous_p: Tensor,
    q: Tensor | None = None,
    raw: Tensor | None = None,
    previous_token: int = 0,
    likely: int = LIKELY,
) -> CondensedDistributions:
    """Distributions `(n, vocab)` and the consecutive `tokens` `(n,)` emitted there, on `likely` + 2 cells.

    Which tokens get a cell depends on the distributions alone. `previous_token` stands before the first of `tokens`.

    >>> p = torch.tensor([[0.5, 0.2, 0.2, 0.1]])
    >>> condense_distributions(torch.tensor([3]), p, p, likely=1).p.tolist()
    [[0.5, 0.0, 0.5]]
    """
    score = torch.maximum(p, previous_p)
    for probs in (q, raw):
        score = score if probs is None else torch.maximum(score, probs)
    ids = top_tokens(score, min(likely, p.shape[-1]))
    larger = greater_mask(previous_p if q is None else q, p)
    # Both pools are summed and neither is a difference, so that a pool with a possible token in it has mass.
    pools = (larger.scatter(-1, ids, 0.0), (1 - larger).scatter(-1, ids, 0.0))

    def on_cells(probs: Tensor) -> Tensor:
        pooled = torch.stack([torch.linalg.vecdot(probs, pool) for pool in pools], dim=-1)
        cells = torch.cat([probs.gather(-1, ids), pooled], dim=-1)
        return (cells / cells.sum(dim=-1, keepdim=True)).cpu()

    pool_sizes = [pool.sum(dim=-1).to(ids.dtype) for pool in pools]
    before = torch.cat([tokens.new_tensor([previous_token]), tokens[:-1]])
    return CondensedDistributions(
        p=on_cells(p),
        q=None if q is None else on_cells(q),
        raw=None if raw is None else on_cells(raw),
        previous_p=on_cells(previous_p),
        sizes=torch.cat([torch.ones_like(ids), torch.stack(pool_sizes, dim=-1)], dim=-1).cpu(),
        ids=ids.cpu(),
        cell=_cell(ids, larger, tokens).cpu(),
        previous_cell=_cell(ids, larger, before).cpu(),
    )


def top_tokens(score: Tensor, count: int) -> Tensor:
    """The `count` tokens with the largest `score` `(n, vocab)`, in the order of their ids `(n, count)`."""
    if score.device.type != "cpu":
        return score.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    found = np.argpartition(score.numpy(force=True), -count, axis=-1)[:, -count:]  # torch takes five times as long
    return torch.from_numpy(np.sort(found, axis=-1))


def greater_mask(a: Tensor, b: Tensor) -> Tensor:
    """1 where a > b and 0 elsewhere, in the dtype of a: multiplying by it is faster than `torch.where`."""
    return torch.gt(a, b, out=a.new_empty(torch.broadcast_shapes(a.shape, b.shape)))


def _cell(ids: Tensor, larger: Tensor, tokens: Tensor) -> Tensor:
    match = ids == tokens[:, None]
    pool = ids.shape[-1] + (larger.gather(-1, tokens[:, None])[:, 0] == 0).long()
    return torch.where(match.any(dim=-1), match.to(torch.uint8).argmax(dim=-1), pool)
