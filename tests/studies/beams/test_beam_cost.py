"""Levels per step computed from the target's search alone, and the time of a step."""

from itertools import pairwise

import pytest
import torch

from specnb import theory
from specnb.beam import Beams, BeamSettings, LogProbs, steps
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


def min_draft_width(state: Beams, following: Beams, draft: LogProbs, settings: BeamSettings) -> int:
    """The smallest u at which the first drafted level contains all beams of `following`, the target's next state."""
    totals = state.scores[:, None] + draft(state.paths).to(state.scores)
    totals[:, list(settings.eos)] = -torch.inf
    rows = {path: row for row, path in enumerate(state.paths)}
    flat = totals.flatten()
    ranks = []
    for path in following.paths:
        at = rows[path[:-1]] * totals.shape[1] + path[-1]
        ranks.append(int((flat > flat[at]).sum() + (flat[:at] == flat[at]).sum()) + 1)
    return max(ranks)


@pytest.mark.parametrize("ends", ENDS)
def test_levels_by_step_equal_those_of_the_search(ends: str) -> None:
    for seed in range(6):
        distributions, draft, chosen = world(ends, seed)
        accepted = accepted_levels(trajectory(distributions, chosen), draft, (2, 4), 3, chosen)
        for row, width in enumerate((2, 4)):
            for gamma in (1, 2, 3):
                real = [len(states) for states in steps(distributions, chosen, draft, width, gamma)]
                assert levels_by_step(accepted[row], gamma).tolist() == real


@pytest.mark.parametrize("ends", ENDS)
def test_the_minimal_draft_width_is_the_least_that_is_accepted(ends: str) -> None:
    widths, seen = (2, 3, 4, 5), set()
    for seed in range(6):
        distributions, draft, chosen = world(ends, seed)
        states = trajectory(distributions, chosen)
        accepted = accepted_levels(states, draft, widths, 1, chosen)
        for at, (state, following) in enumerate(pairwise(states)):
            if not following.ended:
                least = min_draft_width(state, following, draft, chosen)
                seen.add(least)
                assert accepted[:, at].tolist() == [int(width >= least) for width in widths]
    assert len(seen) > 2


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
