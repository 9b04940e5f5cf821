"""Simulated steps have the means and spreads that the closed forms say."""

import numpy as np
import pytest

from specnb import theory
from studies.views.simulated_steps import ratio_of_means, times_of_steps, tokens_of_steps


def test_simulated_steps_agree_with_the_closed_forms() -> None:
    """Certain counts where acceptance is certain; means, spreads and standard errors elsewhere, within 4 sigma."""
    rng = np.random.default_rng(0)
    for alpha, tokens in ((0.0, 1), (1.0, 5)):
        assert set(tokens_of_steps(alpha, 4, 100, rng)) == {tokens}
    times = times_of_steps(4, 0.25, 1.5, 20_000, rng)
    spread = np.hypot(np.sqrt(4) * 0.125, 0.75)
    assert times.mean() == pytest.approx(float(theory.step_cost(4, 0.25)) + 0.5, abs=4 * spread / np.sqrt(20_000))
    assert times.std() == pytest.approx(spread, abs=0.03)
    repeated = [
        ratio_of_means(tokens_of_steps(0.7, 3, 400, rng), times_of_steps(3, 0.1, 1, 400, rng)) for _ in range(400)
    ]
    ratios, errors = np.array(repeated).T
    want = float(theory.walltime_improvement(0.7, 3, 0.1))
    assert ratios.mean() == pytest.approx(want, abs=4 * errors.mean() / np.sqrt(400) + 0.005)
    assert ratios.std() == pytest.approx(errors.mean(), rel=0.15)
