"""Heads in a format of their own, and their folder."""

from __future__ import annotations

from pathlib import Path

import torch
from drafter_kinds import WIDTH, random_head

from studies.drafters.heads import RecurrentHead, load_head, save_head


def test_a_saved_head_is_read_again(tmp_path: Path) -> None:
    head = random_head(RecurrentHead(WIDTH, 16))
    save_head(head, tmp_path)
    again = load_head(tmp_path)
    assert again.settings == head.settings
    for name, weight in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight.bfloat16().float())
