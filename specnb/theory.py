"""Closed forms of the paper: expected tokens, speed-up and the best gamma (3.1 to 3.5); a roofline for v(n).

alpha is the acceptance probability, taken as iid; gamma the draft tokens per step; c the time of a
draft pass in target passes over one token. Arguments broadcast.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
# v(n): time of a target forward pass over n tokens, in passes over one token
VerifyCost = Callable[[NDArray[np.int64]], ArrayLike]

LARGEST_GAMMA = 512  # the largest gamma that `optimal_gamma` tries by default


def _alpha(alpha: ArrayLike) -> Array:
    alpha = np.asarray(alpha, dtype=np.float64)
    if not np.all((alpha >= 0) & (alpha <= 1)):
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    return alpha


def _gamma(gamma: ArrayLike) -> Array:
    gamma = np.asarray(gamma, dtype=np.float64)
    if not np.all((gamma >= 0) & np.isfinite(gamma) & (gamma == np.floor(gamma))):
        raise ValueError(f"gamma must be a whole number from 0, got {gamma}")
    return gamma


def _cost(c: ArrayLike, name: str = "c") -> Array:
    c = np.asarray(c, dtype=np.float64)
    if not np.all((c >= 0) & np.isfinite(c)):
        raise ValueError(f"{name} must be finite and not negative, got {c}")
    return c


def expected_tokens(alpha: ArrayLike, gamma: ArrayLike) -> Array:
    """E[tokens per step] = (1 - alpha^(gamma+1)) / (1 - alpha), Equation 1.

    >>> expected_tokens([0.0, 0.5, 1.0], gamma=3).tolist()
    [1.0, 1.875, 4.0]
    """
    alpha, gamma = np.broadcast_arrays(_alpha(alpha), _gamma(gamma))
    with np.errstate(divide="ignore", invalid="ignore"):
        # expm1 and log1p keep full precision where 1 - alpha is small.
        series = -np.expm1((gamma + 1) * np.log1p(alpha - 1)) / (1 - alpha)
    return np.where((alpha == 1) | (gamma == 0), gamma + 1, series)


def count_distribution(alpha: ArrayLike, gamma: int) -> Array:
    """P(tokens per step = n) for n = 1 .. gamma + 1 on a new last axis (section 3.1).

    >>> count_distribution(0.5, gamma=2).tolist()
    [0.5, 0.25, 0.25]
    """
    alpha, gamma = _alpha(alpha)[..., None], int(_gamma(gamma))
    n = np.arange(1, gamma + 1)
    return np.concatenate([(1 - alpha) * alpha ** (n - 1), alpha**gamma], axis=-1)


def step_cost(gamma: ArrayLike, c: ArrayLike, verify_cost: VerifyCost | None = None) -> Array:
    """Time of a step in target passes over one token: gamma c + v(gamma + 1), by default v = 1."""
    gamma, c = np.broadcast_arrays(_gamma(gamma), _cost(c))
    verify: ArrayLike = 1.0 if verify_cost is None else verify_cost((gamma + 1).astype(np.int64))
    cost: Array = gamma * c + np.asarray(verify, dtype=np.float64)
    return cost


def roofline(
    n: ArrayLike, ridge: ArrayLike, batch: ArrayLike = 1, overlap: ArrayLike = 0.0, reading: ArrayLike = 1.0
) -> Array:
    """Relative time v(n) of a target forward pass over n tokens in each row, from a roofline.

    Parameters
    ----------
    ridge
        R, the tokens for which arithmetic takes as long as reading the weights: operations over bytes
        per second, times bytes per parameter, divided by 2.
    batch
        B, rows decoded together.
    overlap
        The fraction of the shorter of the two times that is hidden behind the longer.
    reading
        What the pass reads, in passes over one token; above 1 if tokens choose different experts.

    Notes
    -----
    t(n) / t(1) with t(n) = reading + Bn/R - overlap min(reading, Bn/R); full overlap is the model of
    Williams, Waterman and Patterson (2009).

    Examples
    --------
    >>> roofline(5, ridge=150, batch=[1, 60, 600]).round(2).tolist()
    [1.03, 2.14, 4.2]
    """
    ridge, overlap = np.asarray(ridge, dtype=np.float64), np.asarray(overlap, dtype=np.float64)
    if not (np.all(ridge > 0) and np.all((overlap >= 0) & (overlap <= 1))):
        raise ValueError(f"ridge must be positive and overlap in [0, 1], got {ridge} and {overlap}")

    def time(tokens: ArrayLike, read: ArrayLike) -> Array:
        arithmetic = np.asarray(batch, dtype=np.float64) * np.asarray(tokens, dtype=np.float64) / ridge
        return np.asarray(read + arithmetic - overlap * np.minimum(read, arithmetic))

    return time(n, reading) / time(1, 1.0)


def walltime_improvement(
    alpha: ArrayLike, gamma: ArrayLike, c: ArrayLike, verify_cost: VerifyCost | None = None
) -> Array:
    """The speed-up over plain decoding, E[tokens per step] / (gamma c + v(gamma + 1)): Theorem 3.8, with v = 1.

    >>> walltime_improvement(alpha=0.5, gamma=1, c=[0.0, 0.5]).tolist()
    [1.5, 1.0]
    """
    return np.asarray(expected_tokens(alpha, gamma) / step_cost(gamma, c, verify_cost))


def operations_increase(alpha: ArrayLike, gamma: ArrayLike, c_hat: ArrayLike) -> Array:
    """Factor by which operations grow (Theorem 3.11); `c_hat` is the draft's over the target's."""
    gamma, c_hat = _gamma(gamma), _cost(c_hat, "c_hat")
    return np.asarray((gamma * (c_hat + 1) + 1) / expected_tokens(alpha, gamma))


def optimal_gamma(
    alpha: ArrayLike, c: ArrayLike, verify_cost: VerifyCost | None = None, largest: int = LARGEST_GAMMA
) -> NDArray[np.int64]:
    """The gamma from 0 to `largest` with the best improvement, the smallest of equals (section 3.5).

    >>> optimal_gamma(alpha=[0.2, 0.6, 0.9], c=0.1).tolist()
    [1, 3, 10]
    """
    alpha, c = np.broadcast_arrays(_alpha(alpha), _cost(c))
    gammas = np.arange(largest + 1)
    gains = walltime_improvement(alpha[..., None], gammas, c[..., None], verify_cost)
    equal = gains >= gains.max(axis=-1, keepdims=True) * (1 - 1e-14)  # up to rounding
    return equal.argmax(axis=-1)  # type: ignore[no-any-return]  # numpy returns Any


def best_improvement(
    alpha: ArrayLike, c: ArrayLike, verify_cost: VerifyCost | None = None, largest: int = LARGEST_GAMMA
) -> Array:
    """The improvement at the optimal gamma up to `largest`; with v = 1 above 1 if and only if alpha > c (Corollary
    3.9)."""
    return walltime_improvement(alpha, optimal_gamma(alpha, c, verify_cost, largest), c, verify_cost)


def solve_alpha(tokens_per_step: float, gamma: int) -> float:
    """The alpha at which Equation 1 gives `tokens_per_step`."""
    if gamma < 1 or not 1 <= tokens_per_step <= gamma + 1:
        raise ValueError(f"tokens_per_step is {tokens_per_step}; with gamma = {gamma} it lies in [1, {gamma + 1}]")
    low, high = 0.0, 1.0
    for _ in range(60):  # bisection, until both are as good as one number
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, gamma) < tokens_per_step else (low, middle)
    return low
