"""Beam search on distributions with exact scores: every tree, ties and ends; planted bugs must be found."""

from typing import Any

import pytest
import torch
from beam_bugs import BEAM_BUGS
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.sampling.beam_enumeration import DyadicLogProbs, enumerate_trees, every_tree, same, trajectory
from specnb.sampling.beam_rules import BeamSettings, advance, advance_pooled, best, draft_levels, extend, start, steps

EXAMPLES = settings(max_examples=60, deadline=None, derandomize=True)


# Candidates and the rule for ties.


@EXAMPLES
@given(st.lists(st.lists(st.integers(-3, 0), min_size=4, max_size=4), min_size=1, max_size=4), st.integers(1, 20))
def test_best_is_a_stable_sort(rows: list[list[int]], count: int) -> None:
    totals = torch.tensor(rows, dtype=torch.float64)
    flat = [(-score, parent, token) for parent, row in enumerate(rows) for token, score in enumerate(row)]
    expected = sorted(flat)[:count]
    parents, tokens, scores = best(totals, count)
    assert list(zip(parents, tokens, scores.tolist(), strict=True)) == [(p, t, -s) for s, p, t in expected]


def test_ties_of_one_level_go_to_the_higher_beam_and_the_lower_token() -> None:
    state = extend(start(), torch.zeros(1, 5), BeamSettings(width=3, max_new_tokens=9))
    assert state.paths == ((0,), (1,), (2,))
    state = extend(state, torch.zeros(3, 5), BeamSettings(width=3, max_new_tokens=9))
    assert state.paths == ((0, 0), (0, 1), (0, 2))


def test_many_ties_go_to_the_first_candidates() -> None:
    """Torch keeps the order of up to 16 equal numbers in any sort, and that of more only in a stable one."""
    totals = torch.zeros(4, 100)
    totals[:, ::3] = 1.0
    parents, tokens, _ = best(totals, 40)
    assert (parents, tokens) == ([0] * 34 + [1] * 6, [*range(0, 100, 3), *range(0, 18, 3)])


def test_of_equal_finished_beams_the_older_stays_before() -> None:
    chosen = BeamSettings(width=2, max_new_tokens=3, length_penalty=0.0, early_stopping="never", eos=(1,))
    row = torch.tensor([[0.0, 0.0, -9.0]])
    state = start()
    while not state.ended:
        state = extend(state, row.expand(len(state.paths), -1), chosen)
    assert [beam.path for beam in state.finished] == [(1,), (0, 1)]


def test_a_distribution_that_is_not_a_number_is_an_error() -> None:
    with pytest.raises(FloatingPointError, match="NaN"):
        extend(start(), torch.tensor([[0.0, torch.nan]]), BeamSettings(width=1, max_new_tokens=2))


# The speculative search equals beam search, whatever the draft.

SEARCHES = st.builds(
    BeamSettings,
    width=st.integers(1, 3),
    max_new_tokens=st.integers(1, 6),
    length_penalty=st.sampled_from([0.0, 1.0, 2.0, -1.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
    eos=st.sampled_from([(), (0,), (2, 4)]),
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(SEARCHES, st.integers(0, 2), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_any_draft_gives_the_same_states(
    chosen: BeamSettings, wider: int, gamma: int, seed: int, differ: float
) -> None:
    distributions = DyadicLogProbs(6, seed)
    draft = DyadicLogProbs(6, seed + 1, like=distributions, differ=differ)
    own, reached = trajectory(distributions, chosen), [start()]
    for states in steps(distributions, chosen, draft, chosen.width + wider, gamma):
        assert 1 <= len(states) <= gamma + 1
        reached += states
    assert len(own) == len(reached)
    assert all(map(same, own, reached))


def test_a_draft_that_is_the_target_is_always_accepted() -> None:
    """Of the target's own distributions, u = w drafts are its beams: every step but the last is full."""
    distributions, chosen = DyadicLogProbs(6, 3), BeamSettings(width=3, max_new_tokens=12)
    levels = [len(states) for states in steps(distributions, chosen, distributions, 3, 2)]
    assert levels == [3, 3, 3, 3]


CASES = {
    "greedy": (3, BeamSettings(1, 4), 2, 2),
    "two beams": (3, BeamSettings(2, 4), 2, 2),
    "two of three": (3, BeamSettings(2, 4), 3, 2),
    "ends": (4, BeamSettings(2, 4, eos=(0,)), 3, 2),
    "ends early": (4, BeamSettings(2, 5, length_penalty=2.0, early_stopping=True, eos=(1,)), 2, 2),
    "never ends": (4, BeamSettings(1, 5, length_penalty=0.5, early_stopping="never", eos=(2,)), 2, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_every_tree_gives_the_same_states(case: str) -> None:
    vocab, chosen, width, gamma = CASES[case]
    found = [enumerate_trees(DyadicLogProbs(vocab, seed), chosen, width, gamma) for seed in range(3)]
    assert sum(one.trees for one in found) > 100
    assert not any(one.different for one in found)
    assert sum(one.levels[-1] for one in found) > 0


def test_every_tree_is_counted_once() -> None:
    distributions, chosen = DyadicLogProbs(3, 0), BeamSettings(1, 3)
    states = trajectory(distributions, chosen)[:-1]
    trees = sum(1 for state in states for _ in every_tree(state, 3, width=2, gamma=1, settings=chosen))
    found = enumerate_trees(distributions, chosen, width=2, gamma=1)
    assert found.trees == found.levels.sum() == trees


@pytest.mark.parametrize("bug", BEAM_BUGS)
def test_planted_bugs_are_found(bug: str) -> None:
    different = 0
    for vocab, chosen, width, gamma in CASES.values():
        for seed in range(2):
            different += enumerate_trees(
                DyadicLogProbs(vocab, seed), chosen, width, gamma, BEAM_BUGS[bug].rule
            ).different
    assert different > 0


def test_pooling_is_never_worse_level_by_level_and_not_the_same() -> None:
    """A.4's more elaborate procedure: from the same beams, no beam of a rank scores lower, and some higher."""
    found = [enumerate_trees(DyadicLogProbs(4, seed), BeamSettings(1, 4), 2, 2, advance_pooled) for seed in range(8)]
    assert sum(one.worse for one in found) == 0
    assert sum(one.better for one in found) > 0
    as_wide = [enumerate_trees(DyadicLogProbs(3, seed), BeamSettings(2, 4), 2, 2, advance_pooled) for seed in range(4)]
    assert sum(one.better for one in as_wide) == 0  # what is accepted is then all that was drafted


def test_drafted_levels_stop_where_nothing_could_follow() -> None:
    distributions, chosen = DyadicLogProbs(5, 0), BeamSettings(2, 3, eos=(4,))
    levels = list(draft_levels(start(), distributions, 3, 9, chosen))
    assert [len(level) for level in levels] == [3, 3]
    assert not any(4 in path for level in levels for path in level)


def test_advance_takes_no_step_without_distributions() -> None:
    assert advance(start(), {}, BeamSettings(1, 2)) == []


# Bad input.


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": 0}, "width is 0; it must be a whole number from 1"),
        ({"width": 1.5}, r"width is 1\.5"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"length_penalty": float("inf")}, "length_penalty is inf"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"length_penalty": "long"}, "length_penalty is 'long'"),
        ({"early_stopping": "always"}, "early_stopping is 'always'; it must be True, False or 'never'"),
    ],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSettings(**({"width": 2, "max_new_tokens": 4} | wrong))
