"""Uniforms: one stream per row and purpose, whatever batch the row is in."""

from __future__ import annotations

import hashlib
from dataclasses import FrozenInstanceError
from itertools import combinations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from specnb.distributions import PURPOSES, Uniforms, stream, uniforms


def parts(numbers: Uniforms) -> tuple[Tensor, ...]:
    return numbers.draft, numbers.accept, numbers.final


def test_shapes_type_and_range() -> None:
    numbers = uniforms(0, [3, 1], steps=50, gamma=4)
    assert numbers.draft.shape == numbers.accept.shape == (2, 50, 4)
    assert numbers.final.shape == (2, 50)
    for part in parts(numbers):
        assert part.dtype == torch.float64
        assert part.min() >= 0
        assert part.max() < 1


def test_a_row_has_the_same_uniforms_in_every_batch() -> None:
    together = uniforms(7, [0, 1, 2, 10**6], steps=5, gamma=3)
    for position, row in enumerate([0, 1, 2, 10**6]):
        for many, alone in zip(parts(together), parts(uniforms(7, [row], steps=5, gamma=3)), strict=True):
            assert torch.equal(many[position], alone[0])


def test_more_steps_only_append_uniforms() -> None:
    few, many = uniforms(7, [0, 5], steps=3, gamma=2), uniforms(7, [0, 5], steps=9, gamma=2)
    for short, long in zip(parts(few), parts(many), strict=True):
        assert torch.equal(short, long[:, :3])


def test_the_final_uniforms_do_not_depend_on_gamma() -> None:
    assert torch.equal(uniforms(7, [0], 5, gamma=0).final, uniforms(7, [0], 5, gamma=4).final)


def test_plain_decoding_needs_no_uniforms_for_draft_tokens() -> None:
    numbers = uniforms(0, [0, 1], steps=4, gamma=0)
    assert numbers.draft.shape == numbers.accept.shape == (2, 4, 0)


def test_seeds_rows_and_purposes_all_have_different_streams() -> None:
    """No two share a number, also not a row and a seed that are exchanged, nor shifted by any lag."""
    keys = [(seed, row, purpose) for seed in (0, 1, 2) for row in (0, 1, 2) for purpose in PURPOSES]
    sampled = [set(stream(*key).random(500)) for key in keys]
    for one, other in combinations(sampled, 2):
        assert not one & other


def test_streams_are_uniform_and_uncorrelated() -> None:
    n = 4000
    sampled = np.array([stream(0, row, purpose).random(n) for row in range(4) for purpose in PURPOSES])
    for row in sampled:
        assert stats.kstest(row, "uniform").pvalue > 1e-6
    correlations = np.corrcoef(sampled)[np.triu_indices(len(sampled), 1)]
    assert np.abs(correlations).max() < stats.norm.isf(1e-8) / np.sqrt(n)


LARGE = (2**63 - 1, 2**63, 2**63 + 1, 2**63 + 1000, 2**64 - 1, 2**64, 2**64 + 2**32, 2**128, 10**5000)


def test_seeds_and_rows_of_any_size_have_different_streams() -> None:
    keys = [(seed, row) for seed in (0, 1, *LARGE) for row in (0, 1, *LARGE)]
    sampled = [stream(*key, purpose).random() for key in keys for purpose in PURPOSES]
    assert len(set(sampled)) == len(sampled)


def test_streams_below_two_to_the_63_are_those_of_a_plain_philox() -> None:
    """What is committed was sampled with them."""
    rng = np.random.default_rng(0)
    for seed, row in [(0, 0), (2**63 - 1, 2**63 - 1), *rng.integers(2**63, size=(50, 2)).tolist()]:
        for number, purpose in enumerate(PURPOSES):
            plain = np.random.Generator(np.random.Philox(key=[seed, row], counter=[0, 0, 0, number]))
            assert np.array_equal(stream(seed, row, purpose).random(5), plain.random(5))


@pytest.mark.parametrize(("seed", "row"), [(-1, 0), (0, -1)])
def test_negative_seeds_and_rows_are_refused(seed: int, row: int) -> None:
    with pytest.raises(ValueError, match=f"seed is {seed} and row {row}; both must be whole numbers from 0"):
        stream(seed, row, "draft")


def test_seeds_and_rows_from_two_to_the_64_are_hashed() -> None:
    """With counters of their own: 3 to 5. The largest number of a plain key is 2^64 - 1."""
    for seed, row in [(2**64, 0), (0, 2**64), (2**70, 3), (2**64 - 1, 2**64)]:
        digest = hashlib.sha256(f"{seed:x} {row:x}".encode()).digest()
        key = np.array([int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")], dtype=np.uint64)
        for number, purpose in enumerate(PURPOSES):
            plain = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, 0, 3 + number]))
            assert np.array_equal(stream(seed, row, purpose).random(3), plain.random(3))
    for seed, row in [(2**64 - 1, 0), (0, 2**64 - 1), (2**64 - 1, 2**64 - 1)]:
        key_of = np.array([seed, row], dtype=np.uint64)
        for number, purpose in enumerate(PURPOSES):
            plain = np.random.Generator(np.random.Philox(key=key_of, counter=[0, 0, 0, number]))
            assert np.array_equal(stream(seed, row, purpose).random(3), plain.random(3))


def test_uniforms_are_those_of_the_streams_in_order() -> None:
    numbers = uniforms(5, [4, 0], steps=3, gamma=2)
    for at, row in enumerate([4, 0]):
        assert numbers.draft[at].flatten().tolist() == stream(5, row, "draft").random(6).tolist()
        assert numbers.accept[at].flatten().tolist() == stream(5, row, "accept").random(6).tolist()
        assert numbers.final[at].tolist() == stream(5, row, "final").random(3).tolist()
    assert PURPOSES == ("draft", "accept", "final")
    with pytest.raises(ValueError, match="tuple"):
        stream(0, 0, "other")


def test_uniforms_are_moved_to_the_device_and_cannot_be_replaced() -> None:
    numbers = uniforms(0, [0], steps=1, gamma=1)
    assert all(part.device.type == "cpu" for part in parts(numbers))
    assert all(part.device.type == "meta" for part in parts(uniforms(0, [0], steps=1, gamma=1, device="meta")))
    with pytest.raises(FrozenInstanceError):
        numbers.draft = numbers.accept  # type: ignore[misc]
    assert stream(0, 0, "draft").random() == stream(np.int64(0), np.int64(0), "draft").random()  # type: ignore[arg-type]
