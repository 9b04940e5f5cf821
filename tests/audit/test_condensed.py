"""The helpers of `condensed`: the likeliest tokens in the order of ids, and the mask of larger entries."""

from __future__ import annotations

import torch
from distributions_for_tests import examples
from hypothesis import given
from hypothesis import strategies as st

from specnb.audit.condensed import greater_mask, top_tokens


@given(st.integers(2, 300), st.integers(1, 300), st.integers(0, 10**6))
@examples
def test_the_likeliest_tokens_are_those_with_the_largest_scores(vocab: int, count: int, seed: int) -> None:
    count = min(count, vocab)
    score = torch.rand(3, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    found = top_tokens(score, count)
    assert torch.equal(found, score.topk(count).indices.sort(dim=-1).values)


def test_greater_mask_is_one_or_zero_and_broadcasts() -> None:
    a = torch.tensor([[0.1, 0.5], [0.3, 0.2]])
    assert greater_mask(a, torch.tensor([0.2, 0.2])).tolist() == [[0, 1], [1, 0]]
    assert greater_mask(a[0], a).tolist() == [[0, 0], [0, 1]]
    assert greater_mask(a, a).dtype == a.dtype


def test_the_likeliest_tokens_stay_on_the_device_of_the_scores() -> None:
    """The device `meta` has shapes and no numbers; as on a GPU, nothing can be read there by numpy."""
    found = top_tokens(torch.empty(3, 7, device="meta"), 2)
    assert (found.device.type, found.shape) == ("meta", (3, 2))
