"""Other tests of whether tokens were sampled from given distributions, each as a p-value from a
fixed number of tokens.

    ranks         the rank-based uniformity test (RUT): the randomised rank of each token under p is
                  uniform
    surprise      z-test: a score of the tokens, such as -log p, against its mean under p
    per_sequence  chi-square: the same score, summed over each completion
    marginals     chi-square: counts of tokens against the sum of p
    acceptance    z-test: accepted draft tokens against the overlap of p and q
    kernel        two-sample test with the maximum mean discrepancy (MMD), as in Model Equality
                  Testing

All but `kernel` read the target's distributions at the prefixes of the tokens. Under an exact
sampler the deviation of each token from its expectation is a martingale difference, whatever the
tokens before, so the sums are compared with the sums of the conditional variances.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from specnb.statistics import merged_cells

Array = NDArray[np.float64]
Integers = NDArray[np.int64]

PERMUTATIONS = 999
"""The smallest p-value of a permutation test is 1 / (PERMUTATIONS + 1)."""


def ranks(u: Array) -> float:
    """Cramér-von Mises p-value of the transforms U `(n,)` (`specnb_audit.uniforms.transform`,
    ordered by p).

    The published test takes one rank for each completion, among completions of the reference; this
    one takes a rank for each token, exactly.

    >>> ranks((np.arange(100) + 0.5) / 100) > 0.99, ranks(np.full(100, 0.9)) < 1e-6
    (True, True)
    """
    return float(stats.cramervonmises(u, "uniform").pvalue)


def surprise(score: Array, variance: Array) -> float:
    """p-value of the sum of scores `(n,)`, each less its mean under p and with this `variance`
    under p.

    >>> one = np.ones(100)
    >>> surprise(0 * one, one), surprise(0.5 * one, one) < 1e-5
    (1.0, True)
    """
    return _two_sided(float(score.sum()), float(variance.sum()))


def per_sequence(score: Array, variance: Array) -> float:
    """p-value of too large sums of scores within completions, whatever their sign; as `surprise`,
    `(m, length)` each.

    >>> of_some = np.zeros((20, 50))
    >>> of_some[:4] = 1  # twenty per cent of the completions deviate
    >>> per_sequence(0 * of_some, 1 + 0 * of_some), per_sequence(of_some, 1 + 0 * of_some) < 1e-5
    (1.0, True)
    """
    sums, variances = score.sum(axis=1), variance.sum(axis=1)
    free = variances > 0
    return float(stats.chi2.sf((sums[free] ** 2 / variances[free]).sum(), free.sum())) if free.any() else 1.0


def acceptance(accepted: NDArray[np.bool_], overlap: Array) -> float:
    """p-value of the number of accepted draft tokens; `overlap` `(n,)` of p and q is the
    probability of each.

    >>> half = np.full(100, 0.5)
    >>> acceptance(np.array([True, False] * 50), half), acceptance(np.ones(100, dtype=bool), half) < 1e-6
    (1.0, True)
    """
    return _two_sided(float((accepted - overlap).sum()), float((overlap * (1 - overlap)).sum()))


def marginals(tokens: Integers, p: Array) -> float:
    """Chi-square p-value of the counts of `tokens` `(n,)` against the sum of their distributions p
    `(n, vocab)`.

    The counts are not multinomial, because every token has a distribution of its own: the statistic
    uses the sum of the conditional covariances. Tokens that expect few samples are merged.

    >>> p = np.full((100, 2), 0.5)
    >>> marginals(np.arange(100) % 2, p), marginals(np.zeros(100, dtype=int), p) < 1e-6
    (1.0, True)
    """
    expected = p.sum(axis=0)
    cells = _cells(expected)
    deviation = cells @ (np.bincount(tokens, minlength=p.shape[1]) - expected)
    pooled = p @ cells.T
    covariance = np.diag(pooled.sum(axis=0)) - pooled.T @ pooled
    values, vectors = np.linalg.eigh(covariance)
    kept = values > 1e-9 * len(tokens)
    statistic = float((((vectors.T @ deviation)[kept]) ** 2 / values[kept]).sum())
    return float(stats.chi2.sf(statistic, kept.sum())) if kept.any() else 1.0


def kernel(
    mine: Integers, other: Integers, prompts: Integers, random: np.random.Generator, permutations: int = PERMUTATIONS
) -> float:
    """Permutation p-value of the MMD between completions `(m, length)` and as many of an exact
    sampler, `other`.

    The kernel is the number of positions with the same token, and 0 between different prompts;
    `prompts` `(m,)` numbers the prompt of completion i of both. Under an exact sampler completion i
    of one and of the other may be exchanged.

    >>> mine, other = np.zeros((20, 5), dtype=int), np.ones((20, 5), dtype=int)
    >>> kernel(mine, other, np.arange(20) % 2, np.random.default_rng(0))
    0.001
    """
    signs = random.choice([-1, 1], size=(permutations, len(mine)))
    observed, permuted = 0, np.zeros(permutations, dtype=np.int64)
    for prompt in np.unique(prompts):
        at = prompts == prompt
        cross = _matches(mine[at], other[at])
        gram = _matches(mine[at], mine[at]) + _matches(other[at], other[at]) - cross - cross.T
        observed += int(gram.sum())
        permuted += ((signs[:, at] @ gram) * signs[:, at]).sum(axis=1)
    return float((1 + (permuted >= observed).sum()) / (permutations + 1))


def _matches(a: Integers, b: Integers) -> Integers:
    """Positions with the same token `(m, k)`, for completions `(m, length)` and `(k, length)`."""
    return (a[:, None] == b[None]).sum(axis=-1)  # type: ignore[no-any-return]  # numpy returns Any


def _cells(expected: Array) -> Array:
    """Which token `(cells, vocab)` is in which cell; cells merged by `merged_cells`."""
    number = merged_cells(expected)
    cells: Array = np.eye(number.max() + 1)[number].T
    return cells


def _two_sided(deviation: float, variance: float) -> float:
    if variance == 0:
        return float(deviation == 0)
    return float(2 * stats.norm.sf(abs(deviation) / variance**0.5))
