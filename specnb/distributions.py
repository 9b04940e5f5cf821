"""Next-token distributions: from logits to probabilities, the residual, sampling, and the uniforms of each row.

Functions work on the last axis (the vocabulary), in float32 or better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from numpy.typing import NDArray
from torch import Tensor

from specnb.arguments import shown, whole

FLOAT32 = torch.finfo(torch.float32)
# Mass is counted in whole units: their sums are exact, so the nucleus does not depend on the order
# of adding
UNITS = 2.0**61
SMALL = 1024  # on a CPU larger vocabularies are sorted by numpy


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution (section 2.2), in the order of transformers.

    Parameters
    ----------
    temperature
        0 is argmax, the lowest token among equals.
    top_k
        Keep the k most probable tokens, and those tied with the k-th.
    top_p
        Keep the smallest set of most probable tokens whose mass reaches it, of equals the lower ones.
    min_p
        Remove tokens less probable than this times the most probable one.

    Examples
    --------
    >>> Sampling(top_k=40).temperature
    1.0
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if not hasattr(value := getattr(self, name), "__float__"):
                raise TypeError(f"{name} is {value!r}; it must be a number")
        if not (self.temperature == 0 or FLOAT32.tiny <= self.temperature <= FLOAT32.max):
            raise ValueError(f"temperature is {self.temperature!r}; it must be 0 (argmax) or a positive float32")
        if self.top_k is not None and (whole(self.top_k) or 0) < 1:
            raise ValueError(f"top_k is {self.top_k!r}; it must be a whole number from 1, or None for no limit")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p!r}; it must lie in (0, 1], where 1 keeps every token")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p!r}; it must lie in [0, 1], where 0 keeps every token")


def require_sampling(sampling: Any) -> None:
    """Raise `TypeError` for a subclass of `Sampling`, and anything else, whose other settings would be lost."""
    if type(sampling) is not Sampling:
        raise TypeError(f"sampling is {shown(sampling)}: give a Sampling; what a subclass adds would be lost")


def standardise(
    logits: Float[Tensor, "*batch vocab"], sampling: Sampling = Sampling(), check: bool = True
) -> Float[Tensor, "*batch vocab"]:
    """The distribution `(..., vocab)` that `sampling` makes of `logits`, in float32 or better.

    Raises `ValueError` for a row with NaN or without a finite maximum; with `check=False`, which
    does not wait for the device, such a row is NaN.

    >>> standardise(torch.tensor([2.0, 1.0, 0.0]), Sampling(top_k=2)).round(decimals=2)
    tensor([0.7300, 0.2700, 0.0000])
    """
    require_sampling(sampling)
    logits = at_least_float(logits)
    if check:
        maximum = logits.amax(dim=-1).flatten()  # NaN if the row has one, -inf if no token is possible
        if not bool(maximum.isfinite().all()):
            row = int((~maximum.isfinite()).nonzero()[0])
            raise ValueError(
                f"logits row {row} has the maximum {float(maximum[row])}: each row needs a finite largest logit and no "
                "NaN; look for an overflow in the model (its dtype) or a filter that removed everything"
            )
    if sampling.temperature == 0:
        first = logits.argmax(dim=-1, keepdim=True)  # the lowest index among equals
        return torch.zeros_like(logits).scatter_(-1, first, 1.0).where(logits.gather(-1, first).isfinite(), torch.nan)
    if sampling.temperature != 1:
        # Subtract the maximum first: divided by a low temperature, large logits would overflow.
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / float(sampling.temperature)
    probs = torch.softmax(logits, dim=-1)
    if sampling.top_k is not None and sampling.top_k < probs.shape[-1]:
        smallest_kept = probs.topk(sampling.top_k, dim=-1).values[..., -1:]
        probs = normalise(probs.where(probs >= smallest_kept, 0.0))
    if sampling.top_p < 1:
        probs = normalise(nucleus(probs, float(sampling.top_p)))
    if sampling.min_p > 0:
        least = float(sampling.min_p) * probs.amax(dim=-1, keepdim=True)
        probs = normalise(probs.where(probs >= least, 0.0))
    return probs


def at_least_float(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def standardise_probs(probs: Float[Tensor, "*batch vocab"], sampling: Sampling) -> Float[Tensor, "*batch vocab"]:
    return probs if sampling == Sampling() else standardise(probs.log(), sampling, check=False)


def nucleus(probs: Tensor, top_p: float) -> Tensor:
    """`probs` of the smallest set of most probable tokens whose mass reaches `top_p`, 0 elsewhere.

    >>> nucleus(torch.tensor([0.25, 0.25, 0.5]), top_p=0.75)
    tensor([0.2500, 0.0000, 0.5000])
    """
    vocab = probs.shape[-1]
    if probs.device.type != "cpu" or vocab <= SMALL:
        return by_sorting(probs, top_p)
    kept, needed = probs.new_empty(probs.shape), math.ceil(top_p * UNITS)
    rows = (of.reshape(-1, vocab).numpy(force=True) for of in (probs, kept))
    for row, kept_row in zip(*rows, strict=True):
        np.multiply(row, _inside(row, needed), out=kept_row)
    return kept


def by_sorting(probs: Tensor, top_p: float) -> Tensor:
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    units = (ordered * UNITS).long()
    inside = units.cumsum(dim=-1) - units < math.ceil(top_p * UNITS)
    return probs.where(torch.zeros_like(inside).scatter(-1, index, inside), 0.0)


def _inside(row: NDArray[np.floating], needed: int) -> NDArray[np.bool_]:
    ordered = np.sort(row)[::-1]  # numpy sorts a large vocabulary a hundred times as fast as torch
    with np.errstate(invalid="ignore"):  # a row of NaN stays one
        units = (ordered * UNITS).astype(np.int64)
    place = min(int(np.searchsorted(units.cumsum(), needed)), len(row) - 1)  # rounding may leave less than is needed
    inside: NDArray[np.bool_] = row >= ordered[place]
    surplus = np.count_nonzero(inside) - (place + 1)
    if surplus > 0:  # the set ends between equals
        inside[np.flatnonzero(row == ordered[place])[-surplus:]] = False
    return inside


def normalise(mass: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    return mass / mass.sum(dim=-1, keepdim=True)


def one_hot(
    tokens: Int[Tensor, "*batch"], vocab: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*batch {vocab}"]:
    """1 at each token, and 0 throughout for -1."""
    return (tokens.unsqueeze(-1) == torch.arange(vocab, device=tokens.device)).to(dtype)


def overlap(p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"]) -> Float[Tensor, "*#batch"]:
    """sum min(p, q) `(...,)`: beta, the acceptance probability of a draft token from q (Theorem 3.5).

    >>> overlap(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor(0.7500)
    """
    return torch.minimum(p, q).sum(dim=-1).clamp_max(1)  # the sum of probabilities can round to more


def total_variation(p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"]) -> Float[Tensor, "*#batch"]:
    """D_LK(p, q) = sum |p - q| / 2 = 1 - overlap, `(...,)` (Definition 3.2, Lemma 3.3).

    >>> total_variation(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor(0.2500)
    """
    return (p - q).abs().sum(dim=-1) / 2


def unnormalised_residual(
    p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"]
) -> Float[Tensor, "*#batch vocab"]:
    positive_part = (p - q).clamp_min(0)
    return positive_part.where(positive_part.sum(dim=-1, keepdim=True) > 0, p)


def residual(p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"]) -> Float[Tensor, "*#batch vocab"]:
    """norm(max(0, p - q)) `(..., vocab)`: the distribution of the recovered token (section 2.3); norm(p) if q = 0.

    >>> residual(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor([1., 0.])
    """
    return normalise(unnormalised_residual(p, q))


def sample(probs: Float[Tensor, "*batch vocab"], uniform: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """The token at which the cumulative sum of `probs` `(..., vocab)` passes `uniform` `(...,)` times their sum.

    A token of probability zero is never sampled; from NaN the result is the last token.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    # A float64 below 1 is at most 1 - 2^-53, and that times the total rounds to less than the
    # total.
    threshold = (uniform.double().unsqueeze(-1) * cumulative[..., -1:]).contiguous()
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_max(probs.shape[-1] - 1)


PURPOSES = ("draft", "accept", "final")


@dataclass(frozen=True)
class Uniforms:
    """Float64 uniforms in [0, 1) of a batch: for drafting, acceptance, and the final token of each step."""

    draft: Float64[Tensor, "batch steps gamma"]
    accept: Float64[Tensor, "batch steps gamma"]
    final: Float64[Tensor, "batch steps"]


def stream(seed: int, row: int, purpose: str) -> np.random.Generator:
    """The generator of one row for one of `PURPOSES`, independent of all others; seed and row are below 2^64."""
    # The purpose is in the counter's highest word, so two streams of a key are 2^192 samples apart.
    counter = np.array([0, 0, 0, PURPOSES.index(purpose)], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=np.array([seed, row], dtype=np.uint64), counter=counter))


def draw_uniforms(seed: int, rows: Sequence[int], steps: int, gamma: int) -> Uniforms:
    """The `Uniforms` of `rows` for `steps` steps of `gamma` draft tokens."""

    def sampled(purpose: str, *shape: int) -> Tensor:
        of_rows = [stream(int(seed), int(row), purpose).random(shape) for row in rows]
        return torch.from_numpy(np.stack(of_rows))

    return Uniforms(sampled("draft", steps, gamma), sampled("accept", steps, gamma), sampled("final", steps))


# From the tokens emitted so far to the float64 distribution `(vocab,)` of the next one
Conditional = Callable[[tuple[int, ...]], Tensor]
