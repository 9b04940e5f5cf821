"""What a draft model's cache lacks of each row."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from studies.drafters.seen import LEAST, SeenTokens

Row = tuple[list[int], int]  # tokens, and how many of them count
SLOTS = 6
ROW = st.tuples(st.lists(st.integers(0, 1), min_size=SLOTS, max_size=SLOTS), st.integers(1, SLOTS))


def _tensors(rows: list[Row]) -> tuple[Tensor, Tensor]:
    return torch.tensor([tokens for tokens, _ in rows]), torch.tensor([count for _, count in rows])


@given(held=st.lists(ROW, min_size=2, max_size=2), entered=ROW, asked=st.lists(ROW, min_size=2, max_size=2))
def test_what_is_unseen_follows_the_first_tokens_in_common(held: list[Row], entered: Row, asked: list[Row]) -> None:
    """Another sequence has entered the second row."""
    seen = SeenTokens(SLOTS, torch.device("cpu"))
    seen.hold(*_tensors(held))
    seen.hold(*_tensors([held[1], entered]), torch.tensor([1]))
    lacking = []
    for (kept, count), (others, length) in zip([held[0], entered], asked, strict=True):
        same = next((n for n in range(count) if kept[n] != others[n]), count)
        lacking.append(length - same)
    tokens, lengths = _tensors(asked)
    assert seen.unseen(tokens, lengths) == max(LEAST, *lacking)
    longer = torch.nn.functional.pad(tokens, (0, 3))  # as a chain drafter gives it
    assert seen.unseen(longer, lengths) == max(LEAST, *lacking)
