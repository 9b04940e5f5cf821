"""Each test's p-value is uniform under an exact sampler, and small under a gross deviation."""

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from studies.audit_power import relatives
from studies.audit_power.relatives import acceptance, kernel, marginals, ranks, surprise

RUNS, TOKENS, VOCAB = 400, 200, 4


def distributions(random: np.random.Generator) -> NDArray[np.float64]:
    """Distributions that differ from token to token."""
    return random.dirichlet(np.ones(VOCAB), size=TOKENS)


def sampled(p: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int_]:
    return np.asarray((p.cumsum(axis=1) < random.random(len(p))[:, None]).sum(axis=1).clip(max=VOCAB - 1))


def p_value_of(test: str, p: NDArray[np.float64], tokens: NDArray[np.int_], random: np.random.Generator) -> float:
    if test == "marginals":
        return marginals(tokens, p)
    own = p[np.arange(len(p)), tokens]
    if test == "ranks":
        before = (p * (p > own[:, None])).sum(axis=1)
        return ranks(before + random.random(len(p)) * own)
    log = np.log(p)
    entropy = -(p * log).sum(axis=1)
    return surprise(np.log(own), entropy, (p * log**2).sum(axis=1) - entropy**2)


@pytest.mark.parametrize("test", ["ranks", "surprise", "marginals"])
def test_p_values_of_an_exact_sampler_are_uniform(test: str) -> None:
    random = np.random.default_rng(0)
    found = []
    for _ in range(RUNS):
        p = distributions(random)
        found.append(p_value_of(test, p, sampled(p, random), random))
    assert stats.kstest(found, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("test", ["ranks", "surprise", "marginals"])
def test_another_temperature_is_found(test: str) -> None:
    random = np.random.default_rng(1)
    p = distributions(random) * [1.0, 1.0, 1.0, 3.0]
    p /= p.sum(axis=1, keepdims=True)
    cold = p**3 / (p**3).sum(axis=1, keepdims=True)
    assert p_value_of(test, p, sampled(cold, random), random) < 1e-3


def test_marginals_miss_what_averages_out_over_contexts() -> None:
    p = np.tile([[0.8, 0.2], [0.2, 0.8]], (100, 1))
    swapped = np.tile([[0.2, 0.8], [0.8, 0.2]], (100, 1))
    random = np.random.default_rng(2)
    tokens = (random.random(len(p)) < swapped[:, 1]).astype(int)
    assert marginals(tokens, p) > 1e-3
    log = np.log(p)
    entropy = -(p * log).sum(axis=1)
    assert surprise(log[np.arange(200), tokens], entropy, (p * log**2).sum(axis=1) - entropy**2) < 1e-6


def test_acceptance_is_uniform_and_finds_what_accepts_too_much() -> None:
    random = np.random.default_rng(3)
    found = []
    for _ in range(RUNS):
        overlap = random.uniform(0.3, 0.9, size=TOKENS)
        found.append(acceptance(random.random(TOKENS) < overlap, overlap))
    assert stats.kstest(found, "uniform").pvalue > 1e-3
    assert acceptance(random.random(TOKENS) < overlap**0.3, overlap) < 1e-3


def completions(random: np.random.Generator, bias: float = 0.0) -> tuple[NDArray[np.int_], NDArray[np.int_]]:
    """Twenty completions of six tokens for each of two prompts that prefer different tokens."""
    prompts = np.arange(40) % 2
    chance = np.where(prompts == 0, 0.3, 0.7) + bias
    return (random.random((40, 6)) < chance[:, None]).astype(int), prompts


def test_the_kernel_test_is_uniform_and_finds_another_distribution() -> None:
    random = np.random.default_rng(4)
    found = []
    for _ in range(RUNS):
        (mine, prompts), (other, _) = completions(random), completions(random)
        found.append(kernel(mine, other, prompts, random, permutations=99))
    ranks_of = np.bincount((np.array(found) * 100).round().astype(int) // 10, minlength=11)
    assert ranks_of[:10].max() < 80  # of 400: an even share is 40
    assert np.mean(np.array(found) <= 0.05) < 0.09
    wrong, prompts = completions(random, bias=0.6)
    assert kernel(wrong, completions(random)[0], prompts, random) == 1 / (relatives.PERMUTATIONS + 1)


def test_distributions_without_freedom_are_no_evidence() -> None:
    certain = np.tile([1.0, 0.0], (50, 1))
    zeros = np.zeros(50)
    assert marginals(zeros.astype(int), certain) == 1.0
    assert surprise(zeros, zeros, zeros) == 1.0


def test_rare_tokens_are_merged() -> None:
    p = np.tile([0.97, 0.01, 0.01, 0.01], (100, 1))
    cells = relatives._cells(p.sum(axis=0))
    assert cells.shape == (1, 4)
    assert relatives._cells(10 * p.sum(axis=0)).sum() == 4
