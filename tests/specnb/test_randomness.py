"""Uniforms: one stream per row and purpose, whatever batch the row is in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import FrozenInstanceError
from itertools import combinations, product

import numpy as np
import pytest
import torch

from specnb.distributions import PURPOSES, Uniforms, stream, uniforms

PLAIN = (0, 1, 2**63 - 1, 2**63, 2**63 + 1, 2**63 + 1000, 2**64 - 1)  # used as they are
LARGE = (2**64, 2**64 + 2**32, 2**128, 10**5000)  # hashed


def philox(key: Sequence[int], counter: int) -> list[float]:
    """The first numbers of the generator with this key, and the last word of its counter."""
    bits = np.random.Philox(key=np.array(key, dtype=np.uint64), counter=[0, 0, 0, counter])
    numbers: list[float] = np.random.Generator(bits).random(5).tolist()
    return numbers


def test_streams_below_two_to_the_64_are_those_of_a_plain_philox() -> None:
    """What is committed was sampled with them."""
    assert PURPOSES == ("draft", "accept", "final")
    some = np.random.default_rng(0).integers(2**63, size=(50, 2)).tolist()
    for seed, row in [*product(PLAIN, repeat=2), *some]:
        for number, purpose in enumerate(PURPOSES):
            assert stream(seed, row, purpose).random(5).tolist() == philox([seed, row], number)


def test_seeds_and_rows_from_two_to_the_64_are_hashed() -> None:
    """With counters of their own: 3 to 5."""
    for seed, row in [(2**64, 0), (0, 2**64), (2**70, 3), (2**64 - 1, 2**64)]:
        digest = hashlib.sha256(f"{seed:x} {row:x}".encode()).digest()
        key = [int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")]
        for number, purpose in enumerate(PURPOSES):
            assert stream(seed, row, purpose).random(5).tolist() == philox(key, 3 + number)


def test_seeds_rows_and_purposes_all_have_different_streams() -> None:
    """No two share a number, also not a row and a seed that are exchanged, nor shifted by any
    lag."""
    keys = [(seed, row, purpose) for seed in (0, 1, 2) for row in (0, 1, 2) for purpose in PURPOSES]
    for one, other in combinations([set(stream(*key).random(500)) for key in keys], 2):
        assert not one & other
    every = [stream(*key).random() for key in product(PLAIN + LARGE, PLAIN + LARGE, PURPOSES)]
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
    with pytest.raises(ValueError, match="tuple"):
        stream(0, 0, "other")


def test_uniforms_are_moved_to_the_device_and_cannot_be_replaced() -> None:
    def devices(numbers: Uniforms) -> set[str]:
        return {part.device.type for part in (numbers.draft, numbers.accept, numbers.final)}

    numbers = uniforms(0, [0], steps=1, gamma=1)
    assert devices(numbers) == {"cpu"}
    assert devices(uniforms(0, [0], steps=1, gamma=1, device="meta")) == {"meta"}
    with pytest.raises(FrozenInstanceError):
        numbers.draft = numbers.accept  # type: ignore[misc]
    assert stream(0, 0, "draft").random() == stream(np.int64(0), np.int64(0), "draft").random()  # type: ignore[arg-type]
