"""Beam search on distributions with exact scores: every tree, ties and ends; planted bugs must be found."""

from collections.abc import Iterable, Sequence
from dataclasses import FrozenInstanceError
from fractions import Fraction
from itertools import product
from math import comb
from typing import Any

import numpy as np
import pytest
import torch
from beam_bugs import BEAM_BUGS
from hypothesis import given, settings
from hypothesis import strategies as st

from specnb.beam import (
    BeamSettings,
    Finished,
    Path,
    State,
    advance,
    advance_pooled,
    best,
    draft_levels,
    extend,
    is_over,
    start,
    steps,
)
from studies.beams.beam_enumeration import DyadicLogProbs, enumerate_trees, every_tree, same, trajectory

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


# The search beside plain Python.


def searched(log_p: DyadicLogProbs, chosen: BeamSettings) -> list[State]:
    """The states of beam search, candidate by candidate, from the meaning of the settings."""
    running: list[tuple[float, Path]] = [(0.0, ())]
    finished: list[tuple[float, Path]] = []
    states = [start()]
    for length in range(1, chosen.max_new_tokens + 1):
        rows = log_p([path for _, path in running]).tolist()
        made = [(score + x, (*path, token)) for (score, path), row in zip(running, rows, strict=True)
                for token, x in enumerate(row)]  # fmt: skip
        made.sort(key=lambda one: -one[0])  # a stable sort: the higher beam and the lower token first
        ends = [length == chosen.max_new_tokens or path[-1] in chosen.eos for _, path in made]
        if not (chosen.early_stopping is True and len(finished) == chosen.width):
            for (score, path), end in list(zip(made, ends, strict=True))[: chosen.width]:
                if end:
                    finished.append((score / length**chosen.length_penalty, path))
            finished = sorted(finished, key=lambda one: -one[0])[: chosen.width]
        running = [one for one, end in zip(made, ends, strict=True) if not end][: chosen.width]
        ended = length == chosen.max_new_tokens
        if not ended and len(finished) == chosen.width:
            reach = length
            if chosen.early_stopping == "never" and chosen.length_penalty > 0:
                reach = chosen.max_new_tokens
            ended = chosen.early_stopping is True or running[0][0] / reach**chosen.length_penalty <= finished[-1][0]
        scores = torch.tensor([score for score, _ in running], dtype=torch.float64)
        states.append(
            State(tuple(path for _, path in running), scores, tuple(Finished(*one) for one in finished), ended)
        )
        if ended:
            return states
    raise AssertionError("the last level ends the search")


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("eos", [(), (0,), (1, 3)], ids=str)
def test_a_search_has_the_states_of_plain_python(eos: tuple[int, ...], early_stopping: Any) -> None:
    for width, length, penalty, seed in product((1, 3), (1, 5), (1.0, 0.0, 2.0, -1.0), range(2)):
        chosen = BeamSettings(width, length, penalty, early_stopping, eos)
        log_p = DyadicLogProbs(5, seed)
        found, want = trajectory(log_p, chosen), searched(log_p, chosen)
        assert len(found) == len(want)
        for one, other in zip(found, want, strict=True):
            assert one.paths == other.paths
            assert one.scores.tolist() == other.scores.tolist()
            assert one.finished == other.finished
            assert one.ended == other.ended


def test_beams_of_different_tokens_take_their_own_distributions() -> None:
    """Five candidates of two beams: their parents, tokens, sums, and the beams that go on."""
    state = State(((3,), (4,)), torch.tensor([-1.0, -2.0], dtype=torch.float64))
    log_p = torch.tensor([[-4.0, -1.0, -3.0], [-1.0, -9.0, -0.5]], dtype=torch.float64)
    extended = extend(state, log_p, BeamSettings(width=3, max_new_tokens=9, eos=(2,)))
    assert extended.paths == ((3, 1), (4, 0), (3, 0))  # (4, 2) ends with -2.5, (3, 2) with -4 is the fourth
    assert extended.scores.tolist() == [-2.0, -3.0, -5.0]
    assert extended.finished == (Finished(-1.25, (4, 2)),)
    assert not extended.ended
    assert extended.scores.dtype == torch.float64
    assert start().scores.tolist() == [0.0]
    assert start().scores.dtype == torch.float64
    assert (start().finished, start().ended) == ((), False)


def test_nan_anywhere_is_an_error_with_its_cause() -> None:
    state = State(((0,), (1,)), torch.zeros(2))
    log_p = torch.zeros(2, 3)
    log_p[1, 2] = torch.nan
    with pytest.raises(FloatingPointError) as error:
        extend(state, log_p, BeamSettings(width=2, max_new_tokens=3))
    assert str(error.value) == "the target's distributions have NaN; look for an overflow in the model (its dtype)"


def test_the_defaults_of_a_search() -> None:
    assert BeamSettings(2, 3) == BeamSettings(2, 3, length_penalty=1.0, early_stopping=False, eos=())
    with pytest.raises(FrozenInstanceError):
        BeamSettings(2, 3).width = 3  # type: ignore[misc]
    for penalty, score in {0.0: -8.0, 1.0: -2.0, 2.0: -0.5, -1.0: -32.0, 0.5: -4.0}.items():
        assert BeamSettings(1, 8, penalty).normalised(-8.0, length=4) == score
    taken: list[Any] = [1, np.int64(3)]
    for number in taken:
        assert BeamSettings(number, number).width == BeamSettings(number, number).max_new_tokens == number
    penalties: list[Any] = [Fraction(1, 2), -3, np.float32(0.25)]
    for finite in penalties:
        assert BeamSettings(1, 1, finite).length_penalty == finite


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"width": -1}, "width is -1; it must be a whole number from 1"),
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0; it must be a whole number from 1"),
        ({"length_penalty": None}, "length_penalty is None; it must be a finite number (1: the mean)"),
        ({"length_penalty": float("-inf")}, "length_penalty is -inf; it must be a finite number (1: the mean)"),
        ({"length_penalty": 1j}, "length_penalty is 1j; it must be a finite number (1: the mean)"),
        ({"early_stopping": None}, "early_stopping is None; it must be True, False or 'never'"),
    ],
)
def test_the_message_names_the_setting_and_what_it_may_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        BeamSettings(**({"width": 2, "max_new_tokens": 4} | wrong))
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("early_stopping", "penalty", "score", "over"),
    [
        (True, 1.0, -1.0, True),
        (False, 1.0, -4.0, True),  # -4 / 2 tokens: no better than -2
        (False, 1.0, -3.9, False),
        (False, -1.0, -1.0, True),  # -1 * 2
        (False, -1.0, -0.9, False),
        ("never", 1.0, -16.0, True),  # -16 / 8 tokens
        ("never", 1.0, -15.9, False),
        ("never", 0.0, -2.0, True),  # more tokens do not help
        ("never", 0.0, -1.9, False),
        ("never", -1.0, -1.0, True),
        ("never", -1.0, -0.9, False),
    ],
)
def test_a_search_is_over_when_no_beam_can_become_better_than_the_worst_finished(
    early_stopping: Any, penalty: float, score: float, over: bool
) -> None:
    chosen = BeamSettings(2, 8, penalty, early_stopping, (9,))
    running = State(((0, 1), (0, 2)), torch.tensor([score, -99.0]), (Finished(-1.5, (9,)), Finished(-2.0, (1, 9))))
    assert is_over(running, chosen) == over
    assert not is_over(running._replace(finished=running.finished[:1]), chosen)


def test_a_draft_is_the_search_of_the_draft_model_from_the_scores_of_the_beams() -> None:
    log_p = DyadicLogProbs(5, 2)
    for width, gamma, eos, longest in product((1, 3, 30), (0, 1, 3), ((), (0, 3)), (2, 3, 9)):
        chosen = BeamSettings(2, longest, eos=eos)
        state = extend(start(), DyadicLogProbs(5, 7)([()]), chosen)
        beams = dict(zip(state.paths, state.scores.tolist(), strict=True))
        want = []
        for _ in range(min(gamma, longest - 2)):
            made = [
                (score + x, (*path, token))
                for path, score in beams.items()
                for token, x in enumerate(log_p([path])[0].tolist())
                if token not in eos
            ]
            made.sort(key=lambda one: -one[0])
            beams = {path: score for score, path in made[:width]}
            want.append(tuple(beams))
        assert [level[: len(own)] for level, own in
                zip(draft_levels(state, log_p, width, gamma, chosen), want, strict=True)] == want  # fmt: skip
        if not eos or width < 4:  # with fewer paths than asked for, those that end follow, at -inf
            assert list(draft_levels(state, log_p, width, gamma, chosen)) == want


def test_best_gives_what_there_is_where_more_is_asked_for() -> None:
    parents, tokens, scores = best(torch.tensor([[1.0, 3.0], [2.0, 3.0]], dtype=torch.float64), 9)
    assert (parents, tokens) == ([0, 1, 1, 0], [1, 1, 0, 0])
    assert scores.tolist() == [3.0, 3.0, 2.0, 1.0]
    assert scores.dtype == torch.float64


class Noting(DyadicLogProbs):
    """Notes what is asked for and what is kept."""

    def __init__(self, vocab: int, seed: int) -> None:
        super().__init__(vocab, seed)
        self.kept: list[tuple[Any, ...]] = []
        self.asked: list[list[Any]] = []

    def __call__(self, paths: Sequence[Path]) -> torch.Tensor:
        self.asked.append(list(paths))
        return super().__call__(paths)

    def keep(self, paths: Iterable[Path]) -> None:
        self.kept.append(tuple(paths))


def test_a_step_asks_the_target_once_and_both_models_keep_the_beams() -> None:
    target, draft = Noting(4, 1), Noting(4, 2)
    chosen = BeamSettings(2, 5)
    made = list(steps(target, chosen, draft, draft_width=3, gamma=2))
    assert len(target.asked) == len(made)
    assert target.kept == draft.kept == [states[-1].paths for states in made]
    assert [len(asked) for asked in target.asked][:1] == [1 + 3 + 3]
    assert all(len(asked) == len(set(asked)) for asked in target.asked)
    plain = Noting(4, 1)
    assert [len(states) for states in steps(plain, chosen)] == [1] * 5
    assert [len(asked) for asked in plain.asked] == [1, 2, 2, 2, 2]
    assert [len(states) for states in steps(Noting(4, 1), chosen, draft)] == [1] * 5  # gamma is 0 by default
    greedy = BeamSettings(1, 5)
    alone = Noting(4, 1)
    assert [len(states) for states in steps(alone, greedy, alone, gamma=4)] == [5]  # a width of 1 by default


def test_the_pooled_search_takes_the_best_children_of_all_nodes_of_a_level() -> None:
    """With whatever scores they have: sums from the beam that they descend from."""
    for seed in range(6):
        target, chosen = DyadicLogProbs(4, seed), BeamSettings(2, 6)
        state = extend(start(), target([()]), chosen)
        levels = list(draft_levels(state, DyadicLogProbs(4, seed + 50), 4, 2, chosen))
        paths = [*state.paths, *(path for level in levels for path in level)]
        log_p = dict(zip(paths, target(paths), strict=True))
        reached = advance_pooled(state, log_p, chosen)
        sums = dict(zip(state.paths, state.scores.tolist(), strict=True))
        for level in levels:
            for path in level:
                sums[path] = sums[path[:-1]] + float(log_p[path[:-1]][path[-1]])
        nodes = set(state.paths)
        for depth, after in enumerate(reached):
            made = {(*path, x): sums[path] + float(log_p[path][x]) for path in nodes for x in range(4)}
            assert sorted(after.scores.tolist(), reverse=True) == sorted(made.values(), reverse=True)[:2]
            assert [made[path] for path in after.paths] == after.scores.tolist()
            sums |= made
            nodes = set(after.paths) | set(levels[depth] if depth < 2 else ())
        assert 1 <= len(reached) <= 3
        last = set(reached[-1].paths)
        assert len(reached) == 3 or not last <= log_p.keys()


# The distributions and trees of the enumeration.


def test_dyadic_distributions_sum_to_one_and_have_a_tie() -> None:
    for vocab in range(2, 10):
        log_p, seen = DyadicLogProbs(vocab, 4), set()
        paths = [(), *((x,) for x in range(vocab)), *product(range(vocab), repeat=2)]
        rows = log_p(paths)
        assert rows.shape == (len(paths), vocab)
        assert rows.dtype == torch.float64
        assert torch.equal(rows, rows.round())
        assert torch.equal((2**rows).sum(-1), torch.ones(len(paths), dtype=torch.float64))
        seen = {tuple(sorted(row, reverse=True)) for row in rows.tolist()}
        sharp = tuple(float(-min(x + 1, vocab - 1)) for x in range(vocab))
        assert seen >= {sharp}
        assert len(seen) == (2 if vocab > 3 else 1)  # with up to three tokens the flattest is as sharp
        assert all(max(row) - min(row) <= 1 for row in seen - {sharp})
        assert torch.equal(DyadicLogProbs(vocab, 4)(paths), rows)
        assert len(paths) < 12 or not torch.equal(DyadicLogProbs(vocab, 5)(paths), rows)


def test_a_like_model_differs_at_a_fraction_of_the_paths() -> None:
    paths = list(product(range(6), repeat=3))
    like, own = DyadicLogProbs(6, 0), DyadicLogProbs(6, 1)
    same_rows = {differ: (DyadicLogProbs(6, 1, like, differ)(paths) == like(paths)).all(-1) for differ in (0.0, 0.3)}
    assert same_rows[0.0].all()
    assert 0.6 < float(same_rows[0.3].double().mean()) < 0.8
    changed = DyadicLogProbs(6, 1, like)  # all of them by default
    assert (changed(paths) == like(paths)).all(-1).double().mean() < 0.1
    assert not torch.equal(own(paths), like(paths))
    assert like.keep(paths) is None


def test_every_tree_has_each_choice_of_children_once() -> None:
    chosen = BeamSettings(2, 4, eos=(0,))
    state = State(((1,), (2,)), torch.zeros(2))
    trees = list(every_tree(state, vocab=3, width=2, gamma=9, settings=chosen))
    assert len(trees) == len(set(trees)) == comb(4, 2) ** 2
    for first, second in trees:
        assert {path[:-1] for path in first} <= set(state.paths)
        assert {path[:-1] for path in second} <= set(first)
        assert all(path[-1] in (1, 2) for path in (*first, *second))
        assert len(first) == len(second) == 2
    wide = list(every_tree(state, vocab=3, width=9, gamma=1, settings=chosen))
    assert wide == [(((1, 1), (1, 2), (2, 1), (2, 2)),)]
    assert list(every_tree(state, vocab=3, width=2, gamma=0, settings=chosen)) == [()]
    at_the_end = State(((1, 1, 1),), torch.zeros(1))
    assert list(every_tree(at_the_end, vocab=3, width=2, gamma=2, settings=chosen)) == [()]


def test_states_are_the_same_if_all_parts_are() -> None:
    state = State(((0,), (1,)), torch.tensor([-1.0, -2.0]), (Finished(-1.0, (2,)),), False)
    assert same(state, state._replace(scores=state.scores.clone()))
    for other in (
        state._replace(paths=((0,), (2,))),
        state._replace(scores=torch.tensor([-1.0, -2.5])),
        state._replace(finished=()),
        state._replace(ended=True),
    ):
        assert not same(state, other)


@pytest.mark.parametrize(("change", "worse", "better"), [(-1.0, True, False), (1.0, False, True), (0.0, False, False)])
def test_an_enumeration_counts_trees_and_how_their_beams_differ(change: float, worse: bool, better: bool) -> None:
    """Of a rule that changes the score of its last beam."""

    def wrong(state: State, log_p: Any, settings: BeamSettings) -> list[State]:
        states = advance(state, log_p, settings)
        scores = states[0].scores.clone()
        scores[-1:] += change
        return [states[0]._replace(scores=scores), *states[1:]]

    distributions, chosen = DyadicLogProbs(3, 1), BeamSettings(2, 3)
    found = enumerate_trees(distributions, chosen, width=2, gamma=2, rule=wrong)
    states = trajectory(distributions, chosen)
    each = [sum(1 for _ in every_tree(state, 3, 2, 2, chosen)) for state in states[:-1]]
    beams = [bool(state.paths) for state in states[1:]]  # after the last level none is running
    affected = sum(count for count, some in zip(each, beams, strict=True) if some)
    assert found.trees == sum(each)
    assert found.levels.shape == (3,)
    assert found.levels.dtype == np.int64
    assert found.levels.sum() == found.trees
    assert found.different == (affected if change else 0)
    assert found.worse == (affected if worse else 0)
    assert found.better == (affected if better else 0)


def test_a_rule_that_takes_other_numbers_of_levels_is_different() -> None:
    def longer(state: State, log_p: Any, settings: BeamSettings) -> list[State]:
        """It goes on behind the end of the search."""
        states = advance(state, log_p, settings)
        return [*states, states[-1]] if states[-1].ended else states

    distributions, chosen = DyadicLogProbs(3, 1), BeamSettings(1, 3)
    assert enumerate_trees(distributions, chosen, width=2, gamma=3, rule=longer).different > 0
