"""The time of a step of speculative beam search."""

import pytest

from specnb import theory
from studies.beams.beam_cost import improvement


def test_with_constant_costs_a_step_takes_what_theorem_3_8_says() -> None:
    for gamma, c in ((1, 0.1), (5, 0.02)):
        tokens = float(theory.expected_tokens(0.8, gamma))
        assert improvement(tokens, 1, 1, gamma, c) == pytest.approx(float(theory.walltime_improvement(0.8, gamma, c)))


def test_with_costs_proportional_to_tokens_no_draft_improves() -> None:
    """At most gamma + 1 levels a step, w + u gamma tokens, and u >= w."""
    gains = [
        improvement(gamma + 1, width, width + more, gamma, 0.0, verify_cost=float)
        for width in (1, 2, 8) for more in (0, 3) for gamma in (1, 4, 9)
    ]  # fmt: skip
    assert max(gains) <= 1
