"""Uniforms: one stream per row and purpose, whatever batch the row is in."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
import torch

from specnb.distributions import PURPOSES, stream, uniforms

NUMBERS = (0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**63 + 1000, 2**64 - 1)


def test_streams_are_those_of_a_plain_philox() -> None:
    """What is committed was sampled with them."""
    for seed, row in product(NUMBERS, repeat=2):
        for number, purpose in enumerate(("draft", "accept", "final")):
            bits = np.random.Philox(key=np.array([seed, row], dtype=np.uint64), counter=[0, 0, 0, number])
            assert stream(seed, row, purpose).random(5).tolist() == np.random.Generator(bits).random(5).tolist()


def test_seeds_rows_and_purposes_all_have_different_streams() -> None:
    """No two share a number, also not a row and a seed that are exchanged, nor shifted by any
    lag."""
    keys = [(seed, row, purpose) for seed in (0, 1, 2) for row in (0, 1, 2) for purpose in PURPOSES]
    for one, other in combinations([set(stream(*key).random(500)) for key in keys], 2):
        assert not one & other
    every = [stream(*key).random() for key in product(NUMBERS, NUMBERS, PURPOSES)]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize(("steps", "gamma"), [(3, 2), (5, 0), (1, 4)])
def test_uniforms_are_those_of_the_streams_in_order(steps: int, gamma: int) -> None:
    """So they do not depend on the batch, more steps only append some, and the final ones do not
    depend on gamma."""
    numbers = uniforms(5, [4, 0], steps, gamma)
    assert numbers.draft.dtype == numbers.accept.dtype == numbers.final.dtype == torch.float64
    for at, row in enumerate([4, 0]):
        for part, name in ((numbers.draft, "draft"), (numbers.accept, "accept")):
            assert part[at].tolist() == stream(5, row, name).random((steps, gamma)).tolist()
        assert numbers.final[at].tolist() == stream(5, row, "final").random(steps).tolist()
