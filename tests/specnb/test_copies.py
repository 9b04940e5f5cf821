"""Copied continuations against a search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specnb.copies import PER_MATCH, PromptLookupDrafter, match_lengths
from specnb.drafters import Context


def test_bounds_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="longest"):
        PromptLookupDrafter(4, longest=1, shortest=2)


SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@given(row=SEQUENCES, longest=st.integers(1, 5))
def test_matches_are_those_of_a_search(row: list[int], longest: int) -> None:
    """None in slots beyond the row; the latest of the longest is copied from."""
    lengths = [
        next(n for n in range(longest + 1) if n == min(longest, slot) or row[slot - 1 - n] != row[-1 - n])
        for slot in range(len(row))
    ]
    found = match_lengths(torch.tensor([[*row, 1, 1]]), torch.tensor([len(row)]), longest)[0]
    assert found.tolist() == [*lengths, 0, 0]
    best = max(lengths)
    place = max(slot for slot in range(len(row)) if lengths[slot] == best) if best else 0
    context = Context(torch.tensor([[*row, 1, 1]]), torch.tensor([len(row)]))
    assert [int(one) for one in PromptLookupDrafter(3, longest).matches(context)] == [place, best]


@given(rows=st.lists(SEQUENCES, min_size=1, max_size=3), gamma=st.integers(0, 9), shortest=st.integers(1, 3))
def test_a_copy_is_what_follows_the_place_again_and_again(rows: list[list[int]], gamma: int, shortest: int) -> None:
    """In each row as if it were alone; -1 stands in slots without a token."""
    tokens = torch.full((len(rows), 15), -1)
    for row, sequence in zip(tokens, rows, strict=True):
        row[: len(sequence)] = torch.tensor(sequence)
    context = Context(tokens, torch.tensor(list(map(len, rows))))
    drafter = PromptLookupDrafter(3, shortest=shortest)
    draft_tokens, q = drafter.propose(context, torch.zeros(len(rows), gamma))
    counts = [0]
    places, found = drafter.matches(context)
    for sequence, drafted, place, matched in zip(rows, draft_tokens.tolist(), places, found.tolist(), strict=True):
        counts.append(matched)
        copied = (sequence[place:] * gamma)[: min(gamma, PER_MATCH * matched)]
        assert drafted == copied + [-1] * (len(drafted) - len(copied))
    assert draft_tokens.shape[1] == min(gamma, PER_MATCH * max(counts))
    assert torch.equal(q, torch.nn.functional.one_hot(draft_tokens + 1, 4)[..., 1:].float())
