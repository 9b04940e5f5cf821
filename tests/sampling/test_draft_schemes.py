"""Draft schemes: every tuple with its probability, and q the distribution that each token was sampled from."""

from __future__ import annotations

import math

import pytest
import torch
from distributions_for_tests import PAIRS, distribution_pair

from specnb.sampling.draft_schemes import (
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
