"""Levels per step computed from the target's search alone, and the time of a step."""

import pytest

from specnb import theory
from specnb.beam import BeamSettings, steps
from studies.beams.beam_cost import accepted_levels, improvement, levels_by_step
from studies.beams.beam_enumeration import DyadicLogProbs, trajectory

ENDS = {"no end": (), "an end": (2,)}


def world(ends: str, seed: int) -> tuple[DyadicLogProbs, DyadicLogProbs, BeamSettings]:
    distributions = DyadicLogProbs(6, seed)
    return (
        distributions,
        DyadicLogProbs(6, seed + 1, like=distributions, differ=0.4),
        BeamSettings(2, 10, eos=ENDS[ends]),
    )


@pytest.mark.parametrize("ends", ENDS)
def test_levels_by_step_equal_those_of_the_search(ends: str) -> None:
    for seed in range(6):
        distributions, draft, chosen = world(ends, seed)
        accepted = accepted_levels(trajectory(distributions, chosen), draft, (2, 4), 3, chosen)
        for row, width in enumerate((2, 4)):
            for gamma in (1, 2, 3):
                real = [len(states) for states in steps(distributions, chosen, draft, width, gamma)]
                assert levels_by_step(accepted[row], gamma).tolist() == real


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
