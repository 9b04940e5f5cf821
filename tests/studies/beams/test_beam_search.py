"""Beam search on distributions with exact scores: states of plain Python for every tree; planted
bugs are found."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from beam_bugs import BEAM_BUGS
from beam_enumeration import DyadicLogProbs, enumerate_trees, same, trajectory

from specnb.beam import Beams, BeamSettings, Finished, Path, advance, draft_levels, start

# The search on distributions with exact scores: sums of whole numbers, with ties.


def searched(log_p: DyadicLogProbs, chosen: BeamSettings) -> list[Beams]:
    """The states of beam search, candidate by candidate, from the meaning of the settings."""
    running: list[tuple[float, Path]] = [(0.0, ())]
    finished: list[tuple[float, Path]] = []
    states = [start()]
    for length in range(1, chosen.max_new_tokens + 1):
        rows = log_p([path for _, path in running]).tolist()
        made = [(score + x, (*path, token)) for (score, path), row in zip(running, rows, strict=True)
                for token, x in enumerate(row)]  # fmt: skip
        # a stable sort: the higher beam and the lower token first.
        made.sort(key=lambda one: -one[0])
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
        paths = tuple(path for _, path in running)
        states.append(Beams(paths, scores, tuple(Finished(*one) for one in finished), ended))
        if ended:
            return states
    raise AssertionError("the last level ends the search")


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("eos", [(), (0,), (1, 3)], ids=str)
def test_a_search_has_the_states_of_plain_python(eos: tuple[int, ...], early_stopping: Any) -> None:
    for width, length, penalty, seed in product((1, 3), (1, 5), (1.0, 0.0, 2.0, -1.0), range(2)):
        chosen, log_p = BeamSettings(width, length, penalty, early_stopping, eos), DyadicLogProbs(5, seed)
        found, want = trajectory(log_p, chosen), searched(log_p, chosen)
        assert len(found) == len(want)
        assert all(map(same, found, want))


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


@pytest.mark.parametrize("bug", BEAM_BUGS)
def test_planted_bugs_of_the_search_are_found(bug: str) -> None:
    assert any(
        enumerate_trees(DyadicLogProbs(vocab, seed), chosen, width, gamma, BEAM_BUGS[bug]).different
        for (vocab, chosen, width, gamma), seed in product(CASES.values(), range(2))
    )


def test_drafted_levels_stop_where_nothing_could_follow() -> None:
    drafted = list(draft_levels(start(), DyadicLogProbs(5, 0), 3, 9, BeamSettings(2, 3, eos=(4,))))
    assert [len(level) for level in drafted] == [3, 3]
    assert not any(4 in path for level in drafted for path in level)
    assert advance(start(), {}, BeamSettings(1, 2)) == []
