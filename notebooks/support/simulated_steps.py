"""Steps simulated from the assumptions of the theory: independent acceptances, and random times of
forward passes."""

from __future__ import annotations

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def tokens_of_steps(alpha: float, gamma: int, steps: int, rng: Generator) -> NDArray[np.int64]:
    """Tokens that each of `steps` steps emits `(steps,)`: draft tokens up to the first rejection,
    and one more.

    >>> tokens_of_steps(1.0, gamma=3, steps=2, rng=np.random.default_rng(0)).tolist()
    [4, 4]
    """
    accepted = rng.random((steps, gamma)) < alpha
    return 1 + accepted.cumprod(axis=1).sum(axis=1)  # type: ignore[no-any-return]  # numpy returns Any


def times_of_steps(gamma: int, c: float, v: float, steps: int, rng: Generator) -> Array:
    """Random times of `steps` steps `(steps,)`: gamma draft forward passes of mean c and one of the
    target of mean v.

    The unit is a target forward pass over one token. Every forward pass has a gamma distribution
    whose standard deviation is half of its mean.

    >>> times_of_steps(gamma=2, c=0.0, v=1.0, steps=3, rng=np.random.default_rng(0)).shape
    (3,)
    """
    return rng.gamma(4 * gamma, c / 4, steps) + rng.gamma(4, v / 4, steps)


def ratio_of_means(top: ArrayLike, bottom: ArrayLike) -> tuple[float, float]:
    """The mean of `top` over that of `bottom`, and its standard error; both `(n,)`, an entry for
    each independent step.

    >>> ratio_of_means([2.0, 2.0], [1.0, 1.0])
    (2.0, 0.0)
    """
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    ratio = top.sum() / bottom.sum()
    error = (top - ratio * bottom).std() / np.sqrt(len(top)) / bottom.mean()
    return float(ratio), float(error)
