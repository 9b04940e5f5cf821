"""Each test's p-value is uniform under an exact sampler; what each finds is in
test_audit_power.py."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from audit_studies.power.relatives import acceptance, kernel, marginals, per_sequence, ranks, surprise

RUNS, TOKENS, VOCAB = 400, 200, 4
Floats = NDArray[np.float64]
Integers = NDArray[np.int_]


def distributions(random: np.random.Generator) -> Floats:
    """Distributions that differ from token to token."""
    return random.dirichlet(np.ones(VOCAB), size=TOKENS)


def sampled(p: Floats, random: np.random.Generator) -> Integers:
    return np.asarray((p.cumsum(axis=1) < random.random(len(p))[:, None]).sum(axis=1).clip(max=VOCAB - 1))


def ranks_of(p: Floats, tokens: Integers, random: np.random.Generator) -> float:
    own = p[np.arange(len(p)), tokens]
    return ranks((p * (p > own[:, None])).sum(axis=1) + random.random(len(p)) * own)


def scores(p: Floats, tokens: Integers) -> tuple[Floats, Floats]:
    """log p of the tokens less its mean, and its variance."""
    deviation = np.log(p) - (p * np.log(p)).sum(axis=1, keepdims=True)
    return deviation[np.arange(len(p)), tokens], (p * deviation**2).sum(axis=1)


def surprise_of(p: Floats, tokens: Integers, _: np.random.Generator) -> float:
    return surprise(*scores(p, tokens))


def per_sequence_of(p: Floats, tokens: Integers, _: np.random.Generator) -> float:
    """Four sequences."""
    score, variance = scores(p, tokens)
    return per_sequence(score.reshape(4, -1), variance.reshape(4, -1))


def acceptance_of(p: Floats, _: Integers, random: np.random.Generator) -> float:
    overlap = p[:, 0] + p[:, 1]
    return acceptance(random.random(len(p)) < overlap, overlap)


TESTS: dict[str, Callable[[Floats, Integers, np.random.Generator], float]] = {
    "ranks": ranks_of,
    "surprise": surprise_of,
    "surprise per sequence": per_sequence_of,
    "marginals": lambda p, tokens, _: marginals(tokens, p),
    "acceptance": acceptance_of,
}


@pytest.mark.parametrize("test", TESTS)
def test_p_values_of_an_exact_sampler_are_uniform(test: str) -> None:
    random, found = np.random.default_rng(0), []
    for _ in range(RUNS):
        p = distributions(random)
        found.append(TESTS[test](p, sampled(p, random), random))
    assert stats.kstest(found, "uniform").pvalue > 1e-3


def test_the_kernel_test_is_uniform() -> None:
    """Twenty completions of six tokens for each of two prompts that prefer different tokens."""
    random, prompts = np.random.default_rng(4), np.arange(40) % 2

    def completions() -> Integers:
        chance = np.where(prompts == 0, 0.3, 0.7)
        return (random.random((40, 6)) < chance[:, None]).astype(int)

    found = np.array([kernel(completions(), completions(), prompts, random, permutations=99) for _ in range(RUNS)])
    tenths = np.bincount((found * 100).round().astype(int) // 10, minlength=11)
    assert tenths[:10].max() < 80  # of 400: an even share is 40
    assert np.mean(found <= 0.05) < 0.09
