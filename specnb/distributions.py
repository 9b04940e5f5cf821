"""Next-token distributions: from logits to probabilities, what two distributions share, and
sampling.

Every function works on the last axis (the vocabulary) and any leading batch shape, in float32 or
better, on any device.

Uniforms for the decoding loop: one independent stream per row and purpose.

A stream is a Philox counter generator keyed by (seed, row), with the purpose in the counter. So a
row's tokens do not depend on the batch it is in. All uniforms are sampled before the loop, so no
step waits for a generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from specnb.nucleus import nucleus
from specnb.number_checks import real, shown

FLOAT32 = torch.finfo(torch.float32)


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution (section 2.2: every sampling method is sampling from such a
    distribution).

    Applied in this order, which is that of transformers: `temperature` (0 is argmax, the lowest
    index among equals), then `top_k` (tokens tied with the k-th are kept), then `top_p` (the
    smallest set of most probable tokens whose mass reaches it; among equals the lower index comes
    first; `specnb.nucleus` says how mass is added), then `min_p` (tokens less probable than this
    times the most probable token are removed).

    Raises `ValueError` for a temperature that is negative or not representable in float32 (between
    0 and about 1e-38, or above about 3e38), top_k < 1, top_p outside (0, 1], min_p outside [0, 1],
    and anything that is not a number.

    >>> Sampling(temperature=0.7, top_p=0.9)
    Sampling(temperature=0.7, top_k=None, top_p=0.9, min_p=0.0)
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        temperature = real(self.temperature)
        if not (temperature == 0 or FLOAT32.tiny <= temperature <= FLOAT32.max):
            allowed = f"0 (argmax) or positive and finite, from {FLOAT32.tiny:.2g} to {FLOAT32.max:.2g}"
            raise ValueError(f"temperature is {self.temperature!r}; it must be {allowed}")
        top_k: Any = self.top_k
        if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, Integral) or int(top_k) < 1):
            raise ValueError(f"top_k is {self.top_k!r}; it must be a whole number from 1, or None for no limit")
        if not 0 < real(self.top_p) <= 1:
            raise ValueError(f"top_p is {self.top_p!r}; it must lie in (0, 1], where 1 keeps every token")
        if not 0 <= real(self.min_p) <= 1:
            raise ValueError(f"min_p is {self.min_p!r}; it must lie in [0, 1], where 0 keeps every token")


def require_sampling(sampling: Any) -> None:
    """Raises `TypeError` unless `sampling` is a `Sampling`.

    >>> require_sampling(Sampling())
    """
    if not isinstance(sampling, Sampling):
        raise TypeError(
            f"sampling is {shown(sampling)}; it must be a specnb.distributions.Sampling, such as Sampling()"
        )


def standardise(
    logits: Float[Tensor, "*batch vocab"], sampling: Sampling = Sampling(), check: bool = True
) -> Float[Tensor, "*batch vocab"]:
    """The distribution `(..., vocab)` that `sampling` makes of `logits` `(..., vocab)`, in float32
    or better.

    Raises `ValueError` when a row contains NaN or +inf, or -inf everywhere. `check=False` skips
    this test, because reading its result makes the host wait for the device; such rows then come
    out as NaN.

    >>> logits = torch.tensor([2.0, 1.0, 0.0]).exp().log()
    >>> standardise(logits, Sampling(temperature=0))
    tensor([1., 0., 0.])
    >>> standardise(logits, Sampling(top_k=2)).round(decimals=2)
    tensor([0.7300, 0.2700, 0.0000])
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if check:
        _require_finite_maximum(logits)
    if sampling.temperature == 0:
        return _argmax_distribution(logits)
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


def _require_finite_maximum(logits: Float[Tensor, "*batch vocab"]) -> None:
    maximum = logits.amax(dim=-1)  # NaN if the row has one, -inf if no token is possible
    if not bool(torch.isfinite(maximum).all()):
        row = int((~torch.isfinite(maximum)).flatten().nonzero()[0])
        raise ValueError(
            f"logits row {row} has the maximum {float(maximum.flatten()[row])}: each row needs a finite largest "
            "logit and no NaN; look for an overflow in the model (its dtype) or a filter that removed everything"
        )


def _argmax_distribution(logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    first = logits.argmax(dim=-1, keepdim=True)  # the lowest index among equals
    probs = torch.zeros_like(logits).scatter_(-1, first, 1.0)
    return probs.where(logits.gather(-1, first).isfinite(), torch.nan)


def standardise_probs(probs: Float[Tensor, "*batch vocab"], sampling: Sampling) -> Float[Tensor, "*batch vocab"]:
    """What `sampling` makes of `probs` `(..., vocab)` instead of logits; the default `Sampling()`
    returns them as is.

    >>> standardise_probs(torch.tensor([0.25, 0.75]), Sampling(temperature=0))
    tensor([0., 1.])
    """
    return probs if sampling == Sampling() else standardise(probs.log(), sampling, check=False)


def normalise(mass: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """`mass` `(..., vocab)` divided by its sum; NaN where the sum is zero.

    >>> normalise(torch.tensor([1.0, 3.0]))
    tensor([0.2500, 0.7500])
    """
    return mass / mass.sum(dim=-1, keepdim=True)


def one_hot(
    tokens: Int[Tensor, "*batch"], vocab: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*batch {vocab}"]:
    """The distribution `(..., vocab)` that is 1 at `tokens` `(...,)`: the q of a deterministic
    drafter.

    >>> one_hot(torch.tensor([2]), vocab=3)
    tensor([[0., 0., 1.]])
    """
    return torch.nn.functional.one_hot(tokens, vocab).to(dtype)


def overlap(p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"]) -> Float[Tensor, "*#batch"]:
    """beta = sum min(p, q), `(...,)`: the probability that a token sampled from q is accepted
    (Theorem 3.5).

    >>> overlap(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor(0.7500)
    """
    return torch.minimum(p, q).sum(dim=-1)


def total_variation(p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"]) -> Float[Tensor, "*#batch"]:
    """D_LK(p, q) = sum |p - q| / 2, `(...,)` (Definition 3.2), which is 1 - overlap (Lemma 3.3).

    >>> total_variation(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor(0.2500)
    """
    return (p - q).abs().sum(dim=-1) / 2


def unnormalised_residual(
    p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"]
) -> Float[Tensor, "*#batch vocab"]:
    """max(0, p - q) `(..., vocab)`, or p where that is zero everywhere: `residual` before division
    by its sum.

    >>> unnormalised_residual(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor([0.2500, 0.0000])
    """
    positive_part = (p - q).clamp_min(0)
    return positive_part.where(positive_part.sum(dim=-1, keepdim=True) > 0, p)


def residual(p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"]) -> Float[Tensor, "*#batch vocab"]:
    """norm(max(0, p - q)) `(..., vocab)`: the distribution of the recovered token (section 2.3).

    Where p = q no token is ever rejected, up to rounding, and the result is norm(p). With q = 0,
    which stands for "no draft token here", the result is norm(p) too: the distribution of the bonus
    token.

    >>> residual(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]))
    tensor([1., 0.])
    """
    return normalise(unnormalised_residual(p, q))


def sample(probs: Float[Tensor, "*batch vocab"], uniform: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """The token `(...,)` at which the cumulative sum of `probs` `(..., vocab)` passes `uniform`
    `(...,)` in [0, 1).

    `probs` need not sum to 1: `uniform` is multiplied by their sum. Sums are float64, whatever the
    dtype. A token of probability zero is never sampled. From NaN the result is the last token.

    >>> sample(torch.tensor([[0.2, 0.8], [0.2, 0.8]]), torch.tensor([0.1, 0.3]))
    tensor([0, 1])
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    # A float64 below 1 is at most 1 - 2^-53, and that times the total rounds to less than the
    # total.
    threshold = (uniform.double().unsqueeze(-1) * cumulative[..., -1:]).contiguous()
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1).clamp_max(probs.shape[-1] - 1)


PURPOSES = ("draft", "accept", "final")


@dataclass(frozen=True)
class Uniforms:
    """Float64 uniforms in [0, 1) of a batch.

    draft   (batch, steps, gamma)  to sample the draft tokens
    accept  (batch, steps, gamma)  to accept or reject them
    final   (batch, steps)         to sample the recovered or bonus token
    """

    draft: Float64[Tensor, "batch steps gamma"]
    accept: Float64[Tensor, "batch steps gamma"]
    final: Float64[Tensor, "batch steps"]


def stream(seed: int, row: int, purpose: str) -> np.random.Generator:
    """The generator of one row for one of `PURPOSES`, independent of all others.

    `seed` and `row` are any whole numbers from 0. Raises `ValueError` if one is negative.

    >>> stream(seed=7, row=0, purpose="accept").random() == stream(seed=7, row=1, purpose="accept").random()
    False
    """
    if seed < 0 or row < 0:
        raise ValueError(f"seed is {seed} and row {row}; both must be whole numbers from 0")
    if max(seed, row) < 2**64:
        key, counter = np.array([seed, row], dtype=np.uint64), PURPOSES.index(purpose)
    else:
        # A key has 128 bits. Larger numbers are hashed, with counters that no smaller number uses.
        digest = hashlib.sha256(f"{seed:x} {row:x}".encode()).digest()
        key, counter = np.frombuffer(digest[:16], dtype="<u8"), PURPOSES.index(purpose) + len(PURPOSES)
    # The purpose is in the counter's highest word, so two streams of a key are 2^192 samples apart.
    return np.random.Generator(np.random.Philox(key=key, counter=np.array([0, 0, 0, counter], dtype=np.uint64)))


def uniforms(seed: int, rows: Sequence[int], steps: int, gamma: int, device: torch.device | str = "cpu") -> Uniforms:
    """The `Uniforms` of `rows` for `steps` steps of `gamma` draft tokens, on `device`.

    >>> uniforms(seed=7, rows=[0, 1], steps=10, gamma=4).accept.shape
    torch.Size([2, 10, 4])
    """

    def sampled(purpose: str, *shape: int) -> Tensor:
        of_rows = [stream(int(seed), int(row), purpose).random(shape) for row in rows]
        return torch.from_numpy(np.stack(of_rows)).to(device)

    return Uniforms(sampled("draft", steps, gamma), sampled("accept", steps, gamma), sampled("final", steps))


Conditional = Callable[[tuple[int, ...]], Tensor]
"""From the tokens emitted so far to the float64 distribution `(vocab,)` of the next one."""
