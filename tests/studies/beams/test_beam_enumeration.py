"""The distributions and trees that beam search is enumerated on."""

from itertools import product

import torch
from beam_enumeration import DyadicLogProbs, enumerate_trees, every_tree, trajectory

from specnb.beam import Beams, BeamSettings


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
