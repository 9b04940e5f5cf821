"""Closed forms of the paper: expected tokens, speed-up and the best gamma (3.1 to 3.5, A.2), and
lenience (A.5).

alpha is the acceptance probability in [0, 1], gamma the number of draft tokens per step (a whole
number from 0, or inf), c the time of a forward pass of the draft model, in units of a target
forward pass over one token. Arguments broadcast as numpy arrays. Limits (alpha = 0, alpha = 1,
c = 0) are exact. Acceptance is assumed iid. Every function of these raises `ValueError` for an
alpha outside [0, 1], a gamma that is not a whole number from 0, and a cost that is negative or not
finite. Simulated steps with iid acceptance check the formulas without using them.

The lenient rule (`specnb.rules.lenient_verification`), with target p, draft q and lenience l in (0,
1], accepts a sampled draft token x with probability min(1, p(x) / (l q(x))); the remaining mass is
filled from Algorithm 1's residual. Functions of p and q work on the last axis and any leading batch
shape.

>>> print(walltime_improvement(alpha=0.8, gamma=4, c=0.05).round(3))
2.801
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy  # its parts, which take a second, are imported when first used
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specnb.distributions import residual

Array = NDArray[np.float64]
VerifyCost = Callable[[NDArray[np.int64]], ArrayLike]
"""v(n): the time of a target forward pass over n tokens, in units of one over a single token."""

LARGEST_GAMMA = 512
"""The largest gamma that `optimal_gamma` tries by default."""


def _alpha(alpha: ArrayLike) -> Array:
    alpha = np.asarray(alpha, dtype=np.float64)
    if not np.all((alpha >= 0) & (alpha <= 1)):
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    return alpha


def _gamma(gamma: ArrayLike) -> Array:
    gamma = np.asarray(gamma, dtype=np.float64)
    if not np.all((gamma >= 0) & ((gamma == np.floor(gamma)) | np.isinf(gamma))):
        raise ValueError(f"gamma must be a whole number from 0 (or inf), got {gamma}")
    return gamma


def _cost(c: ArrayLike, name: str = "c") -> Array:
    c = np.asarray(c, dtype=np.float64)
    if not np.all((c >= 0) & np.isfinite(c)):
        raise ValueError(f"{name} must be finite and not negative, got {c}")
    return c


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> Array:
    """E[tokens per step] = (1 - alpha^(gamma+1)) / (1 - alpha), Equation 1; gamma + 1 at alpha = 1.

    gamma = inf gives 1 / (1 - alpha), the value with an oracle for gamma (section 3.5).

    >>> expected_tokens([0.0, 0.5, 1.0], gamma=3).tolist()
    [1.0, 1.875, 4.0]
    """
    alpha, gamma = np.broadcast_arrays(_alpha(alpha), _gamma(gamma))
    with np.errstate(divide="ignore", invalid="ignore"):
        # expm1 and log1p keep full precision where 1 - alpha is small.
        series = -np.expm1((gamma + 1) * np.log1p(alpha - 1)) / (1 - alpha)
    return np.where(alpha == 1, gamma + 1, series)


def count_distribution(alpha: ArrayLike, gamma: int) -> Array:
    """P(tokens per step = n) for n = 1 .. gamma + 1, on a new last axis: capped geometric (section
    3.1).

    Raises `ValueError` also for an infinite gamma.

    >>> count_distribution(0.5, gamma=2).tolist()
    [0.5, 0.25, 0.25]
    """
    alpha = _alpha(alpha)[..., None]
    if not np.isfinite(_gamma(gamma)):
        raise ValueError("gamma is inf; the distribution of the count is an array only for a finite gamma")
    n = np.arange(1, int(gamma) + 1)
    return np.concatenate([(1 - alpha) * alpha ** (n - 1), alpha ** int(gamma)], axis=-1)


def step_begins(alpha: float, gamma: int, tokens: int) -> Array:
    """u(k) for k = 0 .. tokens - 1: the probability that a step begins after exactly k emitted
    tokens `(tokens,)`.

    u(0) = 1 and u(k) = sum_n P(n) u(k - n), where P is `count_distribution`. The sum over k is the
    mean number of steps, and so of target forward passes, of a sequence of this length. Raises
    `ValueError` for an infinite gamma.

    >>> step_begins(0.5, gamma=1, tokens=3).tolist()
    [1.0, 0.5, 0.75]
    """
    counts = count_distribution(alpha, gamma)[::-1]
    u = np.zeros(gamma + 1 + tokens)
    u[gamma + 1] = 1
    for k in range(gamma + 2, len(u)):
        u[k] = counts @ u[k - gamma - 1 : k]
    return u[gamma + 1 :]


def step_cost(gamma: ArrayLike, c: ArrayLike, verify_cost: VerifyCost | None = None) -> Array:
    """Time of a step, in units of a target forward pass over one token: gamma c + v(gamma + 1).

    Without `verify_cost`, v = 1 as in Theorem 3.8. Raises `ValueError` for gamma = inf with a
    `verify_cost`.

    >>> step_cost(gamma=4, c=0.25, verify_cost=lambda n: 1 + 0.1 * n).tolist()
    2.5
    """
    gamma, c = np.broadcast_arrays(_gamma(gamma), _cost(c))
    # With c = 0 drafting costs 0 for any gamma, also where inf * 0 would be NaN.
    drafting = np.multiply(gamma, c, out=np.zeros(c.shape), where=c > 0)
    if verify_cost is None:
        return drafting + 1.0  # type: ignore[no-any-return]  # numpy returns Any
    if np.isinf(gamma).any():
        raise ValueError("gamma is inf, and verify_cost needs a finite number of tokens; give a finite gamma")
    cost: Array = drafting + np.asarray(verify_cost((gamma + 1).astype(np.int64)), dtype=np.float64)
    return cost


def roofline(
    n: ArrayLike, ridge: ArrayLike, batch: ArrayLike = 1, overlap: ArrayLike = 0.0, reading: ArrayLike = 1.0
) -> Array:
    """Relative time v(n) of a target forward pass over n tokens in each row, from a roofline.

    Parameters
    ----------
    n : array_like
        Tokens of a row in the forward pass; gamma + 1 for a verification.
    ridge : array_like
        R, the number of tokens for which arithmetic takes as long as reading the weights: operations
        per second over bytes per second, times bytes per parameter, divided by 2. With inf,
        arithmetic is free.
    batch : array_like
        B, the rows that are decoded together.
    overlap : array_like
        The fraction of the shorter of the two times that is hidden behind the longer, from 0 (one
        after the other) to 1 (the longer alone counts). A real device lies between.
    reading : array_like
        What the pass over n tokens reads, in units of what the pass over one token reads. Above 1 if
        the tokens choose different experts.

    Returns
    -------
    Array
        t(n) / t(1) with t(n) = reading + Bn/R - overlap min(reading, Bn/R): (1 + Bn/R) / (1 + B/R)
        without overlap, max(1, Bn/R) / max(1, B/R) with full overlap.

    Raises
    ------
    ValueError
        If `ridge` is not positive or `overlap` not in [0, 1].

    Notes
    -----
    With full overlap it is the model of Williams, Waterman and Patterson, "Roofline", CACM 52(4),
    2009. Overlap makes v(n) smaller up to B = R / sqrt(n) and larger beyond, where it is plain
    decoding that gains more from it.

    Examples
    --------
    >>> roofline(5, ridge=150, batch=[1, 60, 600], overlap=[[0], [1]]).round(2).tolist()
    [[1.03, 2.14, 4.2], [1.0, 2.0, 5.0]]
    """
    ridge, overlap = np.asarray(ridge, dtype=np.float64), np.asarray(overlap, dtype=np.float64)
    if not (np.all(ridge > 0) and np.all((overlap >= 0) & (overlap <= 1))):
        raise ValueError(f"ridge must be positive and overlap in [0, 1], got {ridge} and {overlap}")

    def time(tokens: ArrayLike, read: ArrayLike) -> Array:
        arithmetic = np.asarray(batch) * np.asarray(tokens) / ridge
        return np.asarray(read + arithmetic - overlap * np.minimum(read, arithmetic))

    return time(n, reading) / time(1, 1.0)


def walltime_improvement(
    alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike, verify_cost: VerifyCost | None = None
) -> Array:
    """The speed-up over plain decoding, E[tokens per step] / (gamma c + 1): Theorem 3.8.

    `verify_cost` replaces the theorem's assumption that a forward pass over gamma + 1 tokens takes
    as long as one over a single token: the denominator becomes gamma c + v(gamma + 1).

    >>> walltime_improvement(alpha=0.5, gamma=1, c=[0.0, 0.5]).tolist()
    [1.5, 1.0]
    """
    alpha, gamma, c = np.broadcast_arrays(_alpha(alpha), _gamma(gamma), _cost(c))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        improvement = expected_tokens(alpha, gamma) / step_cost(gamma, c, verify_cost)
        # gamma = inf and all accepted: the time per token is that of its draft token.
        return np.where((alpha == 1) & np.isinf(gamma), 1 / c, improvement)


def operations_increase(alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike) -> Array:
    """Factor by which the number of arithmetic operations grows: Theorem 3.11.

    `c_hat` is the draft model's operations per token, in units of the target's.

    >>> operations_increase(alpha=0.5, gamma=1, c_hat=0.25).tolist()
    1.5
    """
    alpha, gamma, c_hat = np.broadcast_arrays(_alpha(alpha), _gamma(gamma), _cost(c_hat, "c_hat"))
    with np.errstate(invalid="ignore"):
        increase = (gamma * (c_hat + 1) + 1) / expected_tokens(alpha, gamma)
    return np.where((alpha == 1) & np.isinf(gamma), c_hat + 1, increase)


def optimal_gamma(
    alpha: ArrayLike, c: ArrayLike, verify_cost: VerifyCost | None = None, largest: int = LARGEST_GAMMA
) -> NDArray[np.int64]:
    """The gamma from 0 (do not speculate) to `largest` with the best walltime improvement (section
    3.5).

    The smallest one of several that are equally good. With c = 0 and v = 1 a larger gamma is always
    better, so the result is limited only by rounding and by `largest`.

    >>> optimal_gamma(alpha=[0.2, 0.6, 0.9], c=0.1).tolist()
    [1, 3, 10]
    """
    alpha, c = np.broadcast_arrays(_alpha(alpha), _cost(c))
    gammas = np.arange(largest + 1)
    gains = walltime_improvement(alpha[..., None], gammas, c[..., None], verify_cost)
    return gains.argmax(axis=-1)  # type: ignore[no-any-return]  # numpy returns Any


def best_improvement(alpha: ArrayLike, c: ArrayLike, verify_cost: VerifyCost | None = None) -> Array:
    """The walltime improvement at the optimal gamma; at least 1, because gamma = 0 is plain
    decoding.

    Above 1 if and only if alpha > c, and then at least (1 + alpha) / (1 + c), the value at gamma =
    1: Corollary 3.9.

    >>> best_improvement(alpha=0.1, c=0.5).tolist()
    1.0
    """
    return walltime_improvement(alpha, optimal_gamma(alpha, c, verify_cost), c, verify_cost)


def solve_alpha(tokens_per_step: float, gamma: int) -> float:
    """The alpha at which Equation 1 gives `tokens_per_step`: the iid acceptance that explains a
    mean count.

    Raises `ValueError` for gamma < 1, where every alpha gives one token, and when `tokens_per_step`
    is not between 1 and gamma + 1.

    >>> round(solve_alpha(1.875, gamma=3), 6)
    0.5
    """
    if gamma < 1:
        raise ValueError(f"gamma is {gamma}; without drafts every alpha gives one token per step")
    if not 1 <= tokens_per_step <= gamma + 1:
        raise ValueError(f"tokens_per_step is {tokens_per_step}; with gamma = {gamma} it lies in [1, {gamma + 1}]")
    return float(scipy.optimize.brentq(lambda alpha: expected_tokens(alpha, gamma) - tokens_per_step, 0.0, 1.0))


def lenient_distribution(
    p: Float[Tensor, "*#batch vocab"], q: Float[Tensor, "*#batch vocab"], lenience: float
) -> Float[Tensor, "*#batch vocab"]:
    """The distribution `(..., vocab)` of the token emitted where a draft token was tested.

    min(q, p/l) + (1 - alpha(l)) residual. It is at most max(p, q), at most p/l, and at least
    p (1 - alpha(l)) / (1 - alpha(1)), which can be 0. Equal to p at l = 1.

    >>> lenient_distribution(torch.tensor([0.5, 0.5]), torch.tensor([0.25, 0.75]), lenience=0.8)
    tensor([0.3750, 0.6250])
    """
    accepted = torch.minimum(p / lenience, q)
    rejected = (1 - accepted.sum(dim=-1, keepdim=True)).clamp_min(0)
    return accepted + rejected * residual(p, q)
