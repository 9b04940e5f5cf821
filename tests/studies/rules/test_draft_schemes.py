"""Draft schemes: every tuple with its probability, and q the distribution that each token was sampled from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import permutations, product

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair

from specnb.draft_schemes import (
    DraftTuple,
    first_appearances,
    from_several,
    hub_pairs,
    independent,
    merged,
    most_probable,
    without_replacement,
)


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_probabilities_sum_to_one(kind: str, k: int) -> None:
    q = distribution_pair(kind, vocab=3)[1](())
    schemes = [independent(q, k), from_several(q.expand(k, -1)), without_replacement(q, k), most_probable(q, k)]
    for drafts in [*schemes, hub_pairs(q), merged(independent(q, k), True), merged(independent(q, k), False)]:
        assert sum(draft.probability for draft in drafts) == pytest.approx(1, abs=1e-12)
        assert all(draft.probability > 0 for draft in drafts)
        assert all(draft.q.shape == (len(draft.tokens), 3) for draft in drafts)


def test_without_replacement_a_tuple_has_the_product_of_its_rows() -> None:
    q = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    for draft in without_replacement(q, 3):
        chances = [float(row[x]) for row, x in zip(draft.q, draft.tokens, strict=True)]
        assert draft.probability == pytest.approx(math.prod(chances), abs=1e-12)
        assert len(set(draft.tokens)) == 3


def test_without_replacement_more_tokens_than_q_has() -> None:
    (draft,) = without_replacement(torch.tensor([0.0, 1.0], dtype=torch.float64), 2)
    assert draft.tokens == (1, -1)
    assert not draft.q[1].any()


def test_the_hub_is_in_every_pair() -> None:
    pairs = {draft.tokens: draft.probability for draft in hub_pairs(torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64))}
    assert pairs == pytest.approx({(0, 1): 0.2, (2, 1): 0.3, (1, 0): 0.2, (1, 2): 0.3})
    assert [draft.tokens for draft in hub_pairs(torch.tensor([0.0, 1.0], dtype=torch.float64))] == [(1, -1)]


def test_merging_keeps_each_token_once() -> None:
    drafts = independent(torch.tensor([0.5, 0.5], dtype=torch.float64), 3)
    in_order = {draft.tokens for draft in merged(drafts, shuffled=False)}
    assert in_order == {(0, -1, -1), (1, -1, -1), (0, 1, -1), (1, 0, -1)}
    assert sum(draft.tokens == (0, 1, -1) for draft in merged(drafts[1:2], shuffled=True)) == 1
    assert len(merged(drafts[1:2], shuffled=True)) == 2


# Whole lists

FLOATS = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])


def is_list(drafts: list[DraftTuple], want: Sequence[tuple[tuple[int, ...], float, list[list[float]]]]) -> None:
    """The drafts are exactly these: tokens, probabilities and distributions, in this order."""
    assert [draft.tokens for draft in drafts] == [tokens for tokens, _, _ in want]
    assert [draft.probability for draft in drafts] == pytest.approx([chance for _, chance, _ in want], abs=1e-7)
    for draft, (_, _, rows) in zip(drafts, want, strict=True):
        assert draft.q.shape == (len(rows), len(rows[0]))
        assert draft.q.flatten().tolist() == pytest.approx([x for row in rows for x in row], abs=1e-7)


@FLOATS
def test_every_scheme_in_full(dtype: torch.dtype) -> None:
    """q has a token of probability zero, which no scheme that samples proposes."""
    own = [0.5, 0.0, 0.25, 0.25]
    q = torch.tensor(own, dtype=dtype)
    possible = (0, 2, 3)
    is_list(independent(q, 1), [((x,), own[x], [own]) for x in possible])
    is_list(independent(q, 2), [((x, y), own[x] * own[y], [own] * 2) for x, y in product(possible, repeat=2)])
    other = [0.0, 0.75, 0.25, 0.0]
    several = from_several(torch.tensor([own, other], dtype=dtype))
    is_list(several, [((x, y), own[x] * other[y], [own, other]) for x in possible for y in (1, 2)])
    want = []
    for x, y, z in permutations(possible):
        second = [0.0 if token == x else share / (1 - own[x]) for token, share in enumerate(own)]
        third = [float(token == z) for token in range(4)]
        want.append(((x, y, z, -1), own[x] * second[y], [own, second, third, [0.0] * 4]))
    is_list(without_replacement(q, 4), want)
    is_list(most_probable(q, 1), [((0,), 1.0, [[1, 0, 0, 0]])])
    ordered = torch.tensor([0.1, 0.4, 0.2, 0.3], dtype=dtype)
    is_list(most_probable(ordered, 3), [((1, 3, 2), 1.0, [[0, 1, 0, 0], [0, 0, 0, 1], [0, 0, 1, 0]])])
    pairs = [((2, 0), 0.25, [own] * 2), ((3, 0), 0.25, [own] * 2)]
    is_list(hub_pairs(q), [*pairs, ((0, 2), 0.25, [own] * 2), ((0, 3), 0.25, [own] * 2)])
    is_list(hub_pairs(q[:2] * 2), [((0, -1), 1.0, [[1, 0]] * 2)])
    for drafts in (independent(q, 2), several, without_replacement(q, 2), most_probable(q, 2), hub_pairs(q)):
        assert all(draft.q.dtype == dtype for draft in drafts)


@FLOATS
def test_merged_drafts_in_full(dtype: torch.dtype) -> None:
    own = [0.75, 0.25]
    q = torch.tensor(own, dtype=dtype)
    chances = [0.75**2, 0.1875, 0.1875, 0.25**2]
    in_order = list(zip([(0, -1), (0, 1), (1, 0), (1, -1)], chances, [[own] * 2] * 4, strict=True))
    is_list(merged(independent(q, 2), shuffled=False), in_order)
    shuffled = [in_order[0], *((order, 0.1875 / 2, [own] * 2) for order in [(0, 1), (1, 0), (1, 0), (0, 1)])]
    is_list(merged(independent(q, 2), shuffled=True), [*shuffled, in_order[3]])
    alone = [[own, [0.0, 0.0]], [own, [0.0, 1.0]], [own, [1.0, 0.0]], [own, [0.0, 0.0]]]
    rows = [(tokens, chance, q_rows) for (tokens, chance, _), q_rows in zip(in_order, alone, strict=True)]
    is_list(first_appearances(independent(q, 2)), rows)


def test_of_three_samples_a_later_token_is_a_sample_of_those_not_yet_seen() -> None:
    own = [0.5, 0.3, 0.2]
    found = {draft.tokens: draft for draft in first_appearances(independent(torch.tensor(own).double(), 3))}
    assert len(found) == 3 + 6 + 6
    assert sum(draft.probability for draft in found.values()) == pytest.approx(1, abs=1e-7)
    for x, y, z in permutations(range(3)):
        second = [0.0 if token == x else share / (1 - own[x]) for token, share in enumerate(own)]
        assert found[x, y, z].probability == pytest.approx(own[x] * own[y] * own[z], abs=1e-7)
        # x twice or y twice: (x, x, y), (x, y, x), (x, y, y)
        assert found[x, y, -1].probability == pytest.approx(own[x] * own[y] * (2 * own[x] + own[y]), abs=1e-7)
        assert found[x, -1, -1].probability == pytest.approx(own[x] ** 3, abs=1e-7)
        assert found[x, y, z].q.tolist() == [
            pytest.approx(row, abs=1e-7) for row in (own, second, [float(token == z) for token in range(3)])
        ]
        assert not found[x, y, -1].q[2].any()
        assert not found[x, -1, -1].q[1:].any()
