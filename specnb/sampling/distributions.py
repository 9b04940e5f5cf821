"""Distributions of one token: from logits to a distribution, and what two distributions have in common.

Every function works on the last axis and on any leading batch shape, in float32 or better, on any
device. Nothing here knows of models, drafts or loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution (section 2.2: every sampling method is plain sampling from such a distribution).

    Applied in this order: `temperature` (0 is argmax, the lowest index among equals), then `top_k`
    (tokens tied with the k-th stay), then `top_p` (the smallest set of most probable tokens whose
    mass reaches it; among equals the lower index comes first). The order is that of transformers.

    Raises `ValueError` for a temperature that is negative or that float32 cannot hold (between 0 and about 1e-38, or
    above about 3e38), top_k < 1, top_p outside (0, 1], and anything that is no number.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        heat = _number(self.temperature)
        if not (heat == 0 or FLOAT32.tiny <= heat <= FLOAT32.max):
            allowed = f"0 (argmax) or positive and finite, from {FLOAT32.tiny:.2g} to {FLOAT32.max:.2g}"
            raise ValueError(f"temperature is {self.temperature!r}; it must be {allowed}")
        most: Any = self.top_k
        if most is not None and (isinstance(most, bool) or not isinstance(most, Integral) or int(most) < 1):
            raise ValueError(f"top_k is {self.top_k!r}; it must be a whole number from 1, or None for no limit")
        if not 0 < _number(self.top_p) <= 1:
            raise ValueError(f"top_p is {self.top_p!r}; it must lie in (0, 1], where 1 keeps every token")


def _number(value: Any) -> float:
    """A real number as a float; NaN where it is too large for one, and for anything else, truth values too."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def standardise(logits: Tensor, sampling: Sampling = Sampling(), check: bool = True) -> Tensor:
    """The distribution `(..., vocab)` that `sampling` makes of `logits` `(..., vocab)`; float32 or better.

    Raises `ValueError` when a row has NaN or +inf, or -inf everywhere. `check=False` leaves that test
    out, since reading its answer makes the host wait for the device; such rows then come out as NaN.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if check:
        _require_finite_peak(logits)
    if sampling.temperature == 0:
        return _argmax_distribution(logits)
    if sampling.temperature != 1:
        # The peak goes first: divided by a low temperature, large logits would overflow.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    probs = torch.softmax(logits, dim=-1)
    if sampling.top_k is not None and sampling.top_k < probs.shape[-1]:
        weakest = probs.topk(sampling.top_k, dim=-1).values[..., -1:]
        probs = normalise(probs.where(probs >= weakest, 0.0))
    if sampling.top_p < 1:
        probs = normalise(probs.where(_nucleus(probs, sampling.top_p), 0.0))
    return probs


def _require_finite_peak(logits: Tensor) -> None:
    peak = logits.amax(dim=-1)  # NaN if the row has one, -inf if nothing is possible
    if not bool(torch.isfinite(peak).all()):
        row = int((~torch.isfinite(peak)).flatten().nonzero()[0])
        raise ValueError(
            f"logits row {row} has the maximum {float(peak.flatten()[row])}: each row needs a finite largest "
            "logit and no NaN; look for an overflow in the model (its dtype) or a filter that removed everything"
        )


def _argmax_distribution(logits: Tensor) -> Tensor:
    first = logits.argmax(dim=-1, keepdim=True)  # the lowest index among equals
    probs = torch.zeros_like(logits).scatter_(-1, first, 1.0)
    return probs.where(logits.gather(-1, first).isfinite(), torch.nan)


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(dim=-1) - ordered
    return torch.zeros_like(probs, dtype=torch.bool).scatter(-1, index, before < top_p)


def standardise_probs(probs: Tensor, sampling: Sampling) -> Tensor:
    """What `sampling` makes of a `distribution` `(..., vocab)` in place of logits; plain sampling leaves it as it is."""
    return probs if sampling == Sampling() else standardise(probs.log(), sampling, check=False)


def normalise(mass: Tensor) -> Tensor:
    """`mass` `(..., vocab)` divided by its sum; NaN where the sum is zero."""
    return mass / mass.sum(dim=-1, keepdim=True)


def one_hot(tokens: Tensor, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The distribution `(..., vocab)` of a token that is certain: the q of a deterministic drafter."""
    return torch.nn.functional.one_hot(tokens, vocab).to(dtype)


def overlap(p: Tensor, q: Tensor) -> Tensor:
    """beta = sum min(p, q), `(...,)`: the chance that a draft from q is accepted (Theorem 3.5)."""
    return torch.minimum(p, q).sum(dim=-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """D_LK(p, q) = sum |p - q| / 2, `(...,)` (Definition 3.2), which is 1 - overlap (Lemma 3.3)."""
    return (p - q).abs().sum(dim=-1) / 2


def unnormalised_residual(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q) `(..., vocab)`, or p where nothing is left: `residual` before it is divided by its sum."""
    left = (p - q).clamp_min(0)
    return left.where(left.sum(dim=-1, keepdim=True) > 0, p)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) `(..., vocab)`: what is drawn from after a rejection (section 2.3).

    Where nothing is left (p = q) no draft is ever rejected, up to rounding, and the result is norm(p).
    Against q = 0, which stands for "no draft here", the result is norm(p) too: the bonus token's distribution.
    """
    return normalise(unnormalised_residual(p, q))


def sample(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token `(...,)` at which the cumulated `distribution` `(..., vocab)` passes `uniform` `(...,)` in [0, 1).

    The distribution need not sum to 1: what counts is the share of its sum. Sums are float64, whatever its dtype; a token
    of probability zero is never drawn, and from a distribution of NaN the last one.
    """
    cumulated = probs.cumsum(dim=-1, dtype=torch.float64)
    # A float64 below 1 is at most 1 - 2^-53, and that times the total rounds to less than the total.
    reached = (uniform.double().unsqueeze(-1) * cumulated[..., -1:]).contiguous()
    return torch.searchsorted(cumulated, reached, right=True).squeeze(-1).clamp_max(probs.shape[-1] - 1)
