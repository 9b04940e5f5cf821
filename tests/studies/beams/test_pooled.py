"""A.4's more elaborate procedure, and the distributions and trees that beam search is enumerated on."""

from itertools import product

import pytest
import torch

from specnb.beam import Beams, BeamSettings, draft_levels, extend, start
from studies.beams.beam_enumeration import DyadicLogProbs, enumerate_trees, every_tree, trajectory
from studies.beams.pooled import advance_pooled


def test_pooling_is_never_worse_level_by_level_and_not_the_same() -> None:
    """From the same beams, no beam of a rank scores lower, and some higher."""
    found = [enumerate_trees(DyadicLogProbs(4, seed), BeamSettings(1, 4), 2, 2, advance_pooled) for seed in range(8)]
    assert sum(one.worse for one in found) == 0
    assert sum(one.better for one in found) > 0
    as_wide = [enumerate_trees(DyadicLogProbs(3, seed), BeamSettings(2, 4), 2, 2, advance_pooled) for seed in range(4)]
    assert sum(one.better for one in as_wide) == 0  # what is accepted is then all that was drafted


@pytest.mark.parametrize("seed", range(4))
def test_the_best_children_of_all_nodes_of_a_level_are_taken(seed: int) -> None:
    target, chosen = DyadicLogProbs(4, seed), BeamSettings(2, 6)
    state = extend(start(), target([()]), chosen)
    levels = list(draft_levels(state, DyadicLogProbs(4, seed + 50), 4, 2, chosen))
    paths = [*state.paths, *(path for level in levels for path in level)]
    log_p = dict(zip(paths, target(paths), strict=True))
    sums = dict(zip(state.paths, state.scores.tolist(), strict=True))
    for path in paths[len(state.paths) :]:
        sums[path] = sums[path[:-1]] + float(log_p[path[:-1]][path[-1]])
    nodes = set(state.paths)
    for depth, after in enumerate(advance_pooled(state, log_p, chosen)):
        made = {(*path, x): sums[path] + float(log_p[path][x]) for path in nodes for x in range(4)}
        assert sorted(after.scores.tolist(), reverse=True) == sorted(made.values(), reverse=True)[:2]
        assert [made[path] for path in after.paths] == after.scores.tolist()
        sums |= made
        nodes = set(after.paths) | set(levels[depth] if depth < 2 else ())


def test_dyadic_distributions_sum_to_one_and_differ_from_those_they_are_like_at_a_fraction_of_the_paths() -> None:
    paths = list(product(range(6), repeat=3))
    like = DyadicLogProbs(6, 0)
    assert torch.equal((2 ** like(paths)).sum(-1), torch.ones(len(paths), dtype=torch.float64))
    own = DyadicLogProbs(6, 1, like, differ=0.3)
    assert 0.6 < float((own(paths) == like(paths)).all(-1).double().mean()) < 0.8


def test_every_tree_has_each_choice_of_children_once() -> None:
    chosen = BeamSettings(2, 4, eos=(0,))
    trees = list(every_tree(Beams(((1,), (2,)), torch.zeros(2)), vocab=3, width=2, gamma=9, settings=chosen))
    assert len(trees) == len(set(trees)) == 6**2  # two of four children at each of two levels
    distributions, chosen = DyadicLogProbs(3, 0), BeamSettings(1, 3)
    found = enumerate_trees(distributions, chosen, width=2, gamma=1)
    every = [every_tree(state, 3, 2, 1, chosen) for state in trajectory(distributions, chosen)[:-1]]
    assert found.trees == found.levels.sum() == sum(len(list(trees)) for trees in every)
