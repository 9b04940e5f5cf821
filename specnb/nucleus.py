"""Top-p: the smallest set of most probable tokens whose mass reaches it; a CPU sorts no large
vocabulary for it.

Mass is counted in whole units of 2^-61. Sums of whole numbers are exact, so the set does not depend
on the order in which a device adds, nor on which of the two ways below finds it. Parts of a unit
are not counted: float32 probabilities from 2^-38 on, and float64 ones from 2^-9 on, have none.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

UNITS = 2.0**61
"""Units in a mass of 1; the sum of a distribution, which rounding may take above 1, still fits into
63 bits."""
SMALL = 1024
"""Vocabularies up to this size are sorted whole, all rows at once."""
STEP = 64
"""Tokens are tried down to the most probable one's probability divided by this, then again by this,
and again."""


# One operation for torch, which compiles, captures and replays it as a whole: inside it the CPU may
# look at values.
@torch.library.custom_op("specnb::nucleus", mutates_args=())
def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """`probs` `(..., vocab)` of the smallest set of most probable tokens whose mass reaches
    `top_p`, and 0 elsewhere.

    Among equals the lower index comes first. Where rounding leaves the sum of all tokens below
    `top_p`, all are in the set. Static in shape, and without waiting for a device; without a
    gradient.

    >>> nucleus(torch.tensor([0.25, 0.25, 0.5]), top_p=0.75)
    tensor([0.2500, 0.0000, 0.5000])
    """
    return by_sorting(probs, top_p)


def by_sorting(probs: Tensor, top_p: float) -> Tensor:
    """What `nucleus` returns, by operations on all rows at once whose shapes and results no value
    on the host decides.

    >>> by_sorting(torch.tensor([0.25, 0.25, 0.5]), top_p=0.75)
    tensor([0.2500, 0.0000, 0.5000])
    """
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    units = (ordered * UNITS).long()
    inside = units.cumsum(dim=-1) - units < math.ceil(top_p * UNITS)
    return probs.where(torch.zeros_like(inside).scatter(-1, index, inside), 0.0).contiguous()


@nucleus.register_fake
def _(probs: Tensor, top_p: float) -> Tensor:
    return probs.new_empty(probs.shape)


@nucleus.register_kernel("cpu")
def _(probs: Tensor, top_p: float) -> Tensor:
    vocab = probs.shape[-1]
    if vocab <= SMALL:
        return by_sorting(probs, top_p)
    kept, needed = probs.new_empty(probs.shape), math.ceil(top_p * UNITS)
    rows = (of.reshape(-1, vocab).numpy(force=True) for of in (probs, kept))
    for row, kept_row in zip(*rows, strict=True):
        np.multiply(row, _inside(row, needed), out=kept_row)
    return kept


def _inside(row: NDArray[np.floating], needed: int) -> NDArray[np.bool_]:
    """Whether each token is in the smallest set of most probable ones that has `needed` units of
    mass by `row`."""
    ordered = np.sort(_candidates(row, needed))[::-1]
    place = int(np.searchsorted(_units(ordered).cumsum(), needed))
    if place == len(ordered):  # rounding leaves all tokens below the mass that is needed
        return np.ones(len(row), np.bool_)
    inside: NDArray[np.bool_] = row >= ordered[place]
    surplus = np.count_nonzero(inside) - (place + 1)
    if surplus > 0:  # the set ends between equals
        inside[np.flatnonzero(row == ordered[place])[-surplus:]] = False
    return inside


def _candidates(row: NDArray[np.floating], needed: int) -> NDArray[np.floating]:
    """All probabilities from some limit on that together have `needed` units, or all there are."""
    largest = row.max()
    for limit in (largest / STEP, largest / STEP**2, largest / STEP**3):
        values = row[np.flatnonzero(row >= limit)]
        if _units(values).sum() >= needed:
            return values
    return row


def _units(values: NDArray[np.floating]) -> NDArray[np.int64]:
    with np.errstate(invalid="ignore"):  # a row of NaN stays one
        return (values * UNITS).astype(np.int64)
