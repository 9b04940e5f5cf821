"""Simulated steps against steps that are certain, and standard errors against repetitions."""

import numpy as np
import pytest

from specnb.theory import ratio_of_means, times_of_steps, tokens_of_steps


@pytest.mark.parametrize(("alpha", "tokens"), [(0.0, 1), (1.0, 5)])
def test_certain_acceptance_gives_certain_counts(alpha: float, tokens: int) -> None:
    assert set(tokens_of_steps(alpha, 4, 100, np.random.default_rng(0))) == {tokens}


def test_without_drafts_a_step_is_one_target_pass() -> None:
    rng = np.random.default_rng(0)
    assert set(tokens_of_steps(0.5, 0, 10, rng)) == {1}
    assert times_of_steps(0, 0.3, 1.0, 20_000, rng).mean() == pytest.approx(1, abs=0.02)


def test_a_step_takes_gamma_draft_passes_and_one_of_the_target() -> None:
    times = times_of_steps(4, 0.25, 1.5, 20_000, np.random.default_rng(0))
    assert times.mean() == pytest.approx(2.5, abs=0.03)
    assert times.std() == pytest.approx(np.hypot(np.sqrt(4) * 0.125, 0.75), abs=0.03)


def test_the_standard_error_is_the_spread_of_repetitions() -> None:
    rng = np.random.default_rng(0)
    repeated = [
        ratio_of_means(tokens_of_steps(0.7, 3, 400, rng), times_of_steps(3, 0.1, 1, 400, rng)) for _ in range(400)
    ]
    ratios, errors = np.array(repeated).T
    assert ratios.std() == pytest.approx(errors.mean(), rel=0.15)
