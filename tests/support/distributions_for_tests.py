"""Distributions for tests: small vocabularies, dependent on the context, and every kind of
degenerate pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from hypothesis import settings
from numpy.typing import NDArray
from torch import Tensor

from specnb.distributions import Conditional, residual

Array = NDArray[np.float64]

examples = settings(derandomize=True, deadline=None, database=None, max_examples=150)
"""For hypothesis: the same examples every time, and no deadline."""


def _dense(generator: np.random.Generator, vocab: int) -> Array:
    return generator.dirichlet(np.ones(vocab))


def _sparse(generator: np.random.Generator, vocab: int) -> Array:
    """Most tokens impossible, at least one not."""
    return _on(generator.permutation(vocab) < generator.integers(1, vocab), _dense(generator, vocab))


def _one_hot(generator: np.random.Generator, vocab: int) -> Array:
    return np.asarray(np.eye(vocab)[generator.integers(vocab)])


def _on(support: NDArray[np.bool_], probs: Array) -> Array:
    return np.asarray(np.where(support, probs, 0.0) / probs[support].sum())


def _disjoint(generator: np.random.Generator, vocab: int) -> tuple[Array, Array]:
    support = generator.permutation(vocab) < generator.integers(1, vocab)
    return _on(support, _dense(generator, vocab)), _on(~support, _dense(generator, vocab))


def _nearly_equal(generator: np.random.Generator, vocab: int) -> tuple[Array, Array]:
    """So close that p - q is hardly more than rounding error."""
    p = _dense(generator, vocab)
    q = p * (1 + 1e-11 * generator.standard_normal(vocab))
    return p, q / q.sum()


def _equal(sample: Callable[[np.random.Generator, int], Array]) -> Callable[..., tuple[Array, Array]]:
    return lambda generator, vocab: (probs := sample(generator, vocab), probs)


def _independent(
    sample_p: Callable[[np.random.Generator, int], Array], sample_q: Callable[[np.random.Generator, int], Array]
) -> Callable[..., tuple[Array, Array]]:
    return lambda generator, vocab: (sample_p(generator, vocab), sample_q(generator, vocab))


PAIRS: dict[str, Callable[[np.random.Generator, int], tuple[Array, Array]]] = {
    "dense": _independent(_dense, _dense),
    "zeros in p": _independent(_sparse, _dense),
    "zeros in q": _independent(_dense, _sparse),
    "zeros in both": _independent(_sparse, _sparse),
    "disjoint": _disjoint,
    "equal": _equal(_dense),
    "equal with zeros": _equal(_sparse),
    "nearly equal": _nearly_equal,
    "one-hot p": _independent(_one_hot, _dense),
    "one-hot q": _independent(_dense, _one_hot),
    "one-hot p and q": _independent(_one_hot, _one_hot),
}
"""How the distributions p and q of one context are made."""


def distribution_pair(kind: str, vocab: int, seed: int = 0) -> tuple[Conditional, Conditional]:
    """p and q, sampled by `PAIRS[kind]` for each context."""

    @cache
    def both(context: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        # The length goes in as well: numpy takes seeds that differ in trailing zeros for the same.
        generator = np.random.default_rng([seed, len(context), *context])
        p, q = PAIRS[kind](generator, vocab)
        return torch.from_numpy(p), torch.from_numpy(q)

    return lambda context: both(context)[0], lambda context: both(context)[1]


def lenient_distribution(p: Tensor, q: Tensor, lenience: float) -> Tensor:
    """The distribution of the token that lenient verification emits at a draft token."""
    accepted = (p / lenience).minimum(q)
    return accepted + (1 - accepted.sum(dim=-1, keepdim=True)).clamp_min(0) * residual(p, q)


def mapped(change: Callable[[Tensor], Tensor], distributions: Conditional) -> Conditional:
    """The same distributions, each of them changed."""
    return lambda context: change(distributions(context))
