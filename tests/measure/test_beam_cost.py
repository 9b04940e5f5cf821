"""Levels per step replayed from the target's search alone, and the time of a step."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from tiny import llama, near_copy
from transformers import PreTrainedTokenizerFast

from specnb import theory
from specnb.measure.beam_cost import (
    RunCosts,
    accepted_levels,
    improvement,
    measure_run_costs,
    measure_speeds,
    needed_width,
    replayed,
    step_time,
)
from specnb.models.loading import Pair
from specnb.sampling.beam_enumeration import DyadicLogProbs, trajectory
from specnb.sampling.beam_rules import BeamSettings, steps

ENDS = {"no end": (), "an end": (2,)}


def world(ends, seed):
    distributions = DyadicLogProbs(6, seed)
    return (
        distributions,
        DyadicLogProbs(6, seed + 1, like=distributions, differ=0.4),
        BeamSettings(2, 10, eos=ENDS[ends]),
    )


@pytest.mark.parametrize("ends", ENDS)
def test_a_replay_is_what_the_search_does(ends):
    for seed in range(6):
        distributions, draft, chosen = world(ends, seed)
        accepted = accepted_levels(trajectory(distributions, chosen), draft, (2, 4), 3, chosen)
        for row, width in enumerate((2, 4)):
            for gamma in (1, 2, 3):
                real = [len(states) for states in steps(distributions, chosen, draft, width, gamma)]
                assert replayed(accepted[row], gamma).tolist() == real


@pytest.mark.parametrize("ends", ENDS)
def test_the_needed_width_is_the_least_that_is_accepted(ends):
    widths, seen = (2, 3, 4, 5), set()
    for seed in range(6):
        distributions, draft, chosen = world(ends, seed)
        states = trajectory(distributions, chosen)
        accepted = accepted_levels(states, draft, widths, 1, chosen)
        for at, (state, following) in enumerate(pairwise(states)):
            if not following.ended:
                needed = needed_width(state, following, draft, chosen)
                seen.add(needed)
                assert accepted[:, at].tolist() == [int(width >= needed) for width in widths]
    assert len(seen) > 2


def test_a_step_takes_what_theorem_3_8_says_where_length_is_free():
    for gamma, c in ((1, 0.1), (5, 0.02)):
        assert step_time(4, 8, gamma, c) == pytest.approx(float(theory.step_cost(gamma, c)))
        tokens = float(theory.expected_tokens(0.8, gamma))
        assert improvement(tokens, 1, 1, gamma, c) == pytest.approx(float(theory.walltime_improvement(0.8, gamma, c)))


def test_where_every_token_costs_a_run_no_draft_can_win():
    """At most gamma + 1 levels a step, w + u gamma tokens, and u >= w."""
    gains = [
        improvement(gamma + 1, width, width + more, gamma, 0.0, verify=float)
        for width in (1, 2, 8) for more in (0, 3) for gamma in (1, 4, 9)
    ]  # fmt: skip
    assert max(gains) <= 1


def test_costs_between_sizes_lie_on_a_line():
    costs = RunCosts((1, 5), np.array([[1.0, 3.0]] * 3), np.array([[0.1, 0.1]] * 3))
    assert costs.verify(3) == pytest.approx(2.0)
    assert costs.drafting(4) == pytest.approx(1.0)
    assert costs.cost_ratio.value == pytest.approx(0.1)
    with pytest.raises(ValueError, match="runs over 1 to 5 tokens were measured, not over 6"):
        costs.verify(6)


def test_measuring_needs_sizes_that_begin_with_one_and_grow():
    for sizes in ((), (2, 3), (1, 1)):
        with pytest.raises(ValueError, match="they must begin with 1 and grow"):
            measure_run_costs(tiny_pair(), sizes)


def tiny_pair():
    model = llama(6, dtype=torch.float64)
    return Pair(model, near_copy(model, 0.1), PreTrainedTokenizerFast.__new__(PreTrainedTokenizerFast))


def test_measurements_have_a_row_for_everything():
    costs = measure_run_costs(tiny_pair(), (1, 3), context=4, repetitions=3, progress=False)
    assert costs.target.shape == costs.draft.shape == (3, 2)
    speeds = measure_speeds(tiny_pair(), [[1, 2]] * 3, [(2, 1), (4, 2)], width=2, max_new_tokens=4, progress=False)
    assert [speed.n for speed in speeds] == [3, 3]
    assert all(0 < speed.low <= speed.value <= speed.high for speed in speeds)
