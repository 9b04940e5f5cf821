"""Closed forms against sums over every outcome, and at their limits."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np
import pytest
from distributions_for_tests import examples
from hypothesis import given
from hypothesis import strategies as st

from specnb import theory

INF = np.inf

alphas = st.floats(0, 1)
gammas = st.integers(0, 9)
costs = st.floats(0, 2)


def enumerated_counts(alpha: Fraction, gamma: int) -> list[Fraction]:
    """P(tokens per step = 1 .. gamma + 1): every pattern of accepted and rejected drafts, one by
    one."""
    probs = [Fraction(0)] * (gamma + 1)
    for pattern in product([True, False], repeat=gamma):
        chance = Fraction(1)
        for accepted in pattern:
            chance *= alpha if accepted else 1 - alpha
        tokens = [*pattern, False].index(False) + 1
        probs[tokens - 1] += chance
    return probs


def geometric_sum(alpha: float, gamma: int) -> float:
    """1 + alpha + ... + alpha^gamma, exactly for the number that alpha is."""
    return float(sum(Fraction(alpha) ** n for n in range(gamma + 1)))


# Tokens per step


@pytest.mark.parametrize("gamma", range(7))
@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 7), Fraction(3, 4), Fraction(1)])
def test_count_distribution_is_that_of_all_patterns(alpha: Fraction, gamma: int) -> None:
    want = [float(chance) for chance in enumerated_counts(alpha, gamma)]
    assert theory.count_distribution(float(alpha), gamma) == pytest.approx(want, abs=1e-15)


@given(alphas | st.sampled_from([1 - 1e-8, 1 - 1e-12, 1 - 1e-16]), gammas)
@examples
def test_expected_tokens_keeps_its_precision_everywhere(alpha: float, gamma: int) -> None:
    assert theory.expected_tokens(alpha, gamma) == pytest.approx(geometric_sum(alpha, gamma), rel=1e-13)


@given(alphas, st.integers(1, 9))
@examples
def test_solve_alpha_inverts_expected_tokens(alpha: float, gamma: int) -> None:
    tokens = float(theory.expected_tokens(alpha, gamma))
    solved = theory.solve_alpha(tokens, gamma)
    assert float(theory.expected_tokens(solved, gamma)) == pytest.approx(tokens, abs=1e-10)
    assert solved == pytest.approx(alpha, abs=1e-10)


# Walltime and operations


@given(alphas, gammas, costs)
@examples
def test_walltime_and_operations_are_cost_over_tokens(alpha: float, gamma: int, c: float) -> None:
    tokens = geometric_sum(alpha, gamma)
    assert theory.step_cost(gamma, c) == pytest.approx(gamma * c + 1)
    assert theory.walltime_improvement(alpha, gamma, c) == pytest.approx(tokens / (gamma * c + 1), rel=1e-12)
    assert theory.operations_increase(alpha, gamma, c) == pytest.approx((gamma * c + gamma + 1) / tokens, rel=1e-12)


def test_walltime_and_operations_at_their_limits() -> None:
    assert theory.walltime_improvement(1, 10**7, 0.25) == pytest.approx(4, rel=1e-6)
    assert theory.operations_increase(1, 10**7, 0.25) == pytest.approx(1.25, rel=1e-6)


def test_verification_that_costs_more_than_one_forward_pass() -> None:
    def cost(n: np.ndarray) -> np.ndarray:
        assert n.dtype == np.int64
        return 1 + 0.1 * (n - 1)

    assert theory.step_cost(4, 0.05, cost) == pytest.approx(0.2 + 1.4)
    assert theory.walltime_improvement(0.5, 1, 0.05, cost) == pytest.approx(1.5 / 1.15)


@given(n=st.integers(1, 64), batch=st.integers(1, 512), ridge=st.floats(1, 1000))
@examples
def test_roofline_without_overlap_and_with_full_overlap(n: int, batch: int, ridge: float) -> None:
    x = batch / ridge
    in_turn, at_once = (1 + n * x) / (1 + x), max(1, n * x) / max(1, x)
    assert theory.roofline(n, ridge, batch) == pytest.approx(in_turn)
    assert theory.roofline(n, ridge, batch, overlap=1) == pytest.approx(at_once)


def test_roofline_at_its_limits() -> None:
    assert theory.roofline(np.uint8(5), 150, batch=np.uint8(60)) == theory.roofline(5, 150, batch=60)
    assert theory.roofline([1, 5, 17], np.inf, batch=8).tolist() == [1, 1, 1]  # Theorem 3.8
    assert theory.roofline(1, [1, 150], batch=[[1], [300]], overlap=0.5).tolist() == [[1, 1], [1, 1]]
    # Twice the weights: twice the time if arithmetic is free, and none of it shows beyond the ridge.
    assert theory.roofline(4, np.inf, reading=2) == 2
    assert theory.roofline(4, 100, batch=100, overlap=1, reading=2) == 4


# The best gamma


@given(alphas.filter(lambda alpha: alpha < 0.99), st.floats(0.01, 2), st.sampled_from([None, 0.05, 0.3]))
@examples
def test_optimal_gamma_against_trying_them_all(alpha: float, c: float, slope: float | None) -> None:
    cost = None if slope is None else lambda n: 1 + slope * (n - 1)
    extra = slope or 0.0
    gamma = np.arange(theory.LARGEST_GAMMA + 1)
    gains = np.cumsum(alpha**gamma) / (gamma * c + 1 + extra * gamma)
    best = int(theory.optimal_gamma(alpha, c, cost))
    assert gains[best] == pytest.approx(max(gains), rel=1e-12)
    assert theory.best_improvement(alpha, c, cost) == pytest.approx(max(gains), rel=1e-12)


def test_optimal_gamma_is_the_least_of_equals_and_at_most_the_largest() -> None:
    equal = np.arange(1, 100) / 100
    assert not theory.optimal_gamma(equal, equal).any()  # gamma = 1 gives 1 as well
    assert (theory.best_improvement(equal, equal) == 1).all()
    assert theory.optimal_gamma(1, [0, 0.5, 0.99]).tolist() == [theory.LARGEST_GAMMA] * 3
    assert theory.optimal_gamma(1, 0.5, largest=7) == 7
    assert theory.best_improvement(1, 0, largest=7) == 8


# Arrays and bad input


def test_everything_broadcasts() -> None:
    alpha, gamma, c = np.array([[0.2], [0.9]]), np.array([1, 3, 5]), np.array([[[0.0]], [[0.1]]])
    cases: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (theory.expected_tokens, (alpha, gamma)),
        (theory.step_cost, (gamma, c)),
        (theory.walltime_improvement, (alpha, gamma, c)),
        (theory.operations_increase, (alpha, gamma, c)),
        (theory.best_improvement, (alpha, c)),
    ]
    for function, arguments in cases:
        assert np.array_equal(function(*arguments), np.vectorize(function)(*arguments)), function.__name__


@pytest.mark.parametrize(
    "call",
    [
        lambda: theory.expected_tokens([0.5, -0.1], 2),
        lambda: theory.expected_tokens(np.nan, 1),
        lambda: theory.expected_tokens(0.5, -1),
        lambda: theory.walltime_improvement(0.5, 1.5, 0.1),
        lambda: theory.step_cost(1, INF),
        lambda: theory.step_cost(INF, 0.1),
        lambda: theory.operations_increase(0.5, 1, -1),
        lambda: theory.solve_alpha(4.01, 3),
        lambda: theory.solve_alpha(1, 0),
        lambda: theory.roofline(4, np.nan),
        lambda: theory.roofline(4, 1, overlap=1.5),
    ],
)
def test_what_would_give_a_wrong_number_is_refused(call: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=" "):
        call()
