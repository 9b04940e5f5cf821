"""What `draft` of `generate` stands for where it is a word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_kinds import attending_some, near_model
from tiny import llama

from specnb import PromptLookupDrafter, Sampling, generate
from specnb.drafting import choice, heads
from specnb.heads import AttentionDrafter, FallbackDrafter, save_head

PROMPTS = ([0, 1, 0, 1], [2, 3])
COMMON: dict[str, Any] = {"max_new_tokens": 12, "progress": False, "seed": 1}


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A head of a tiny target in the place of the real one."""
    head = attending_some().head
    save_head(head, tmp_path)
    monkeypatch.setattr(heads, "SHIPPED", tmp_path)
    return heads.load_head(tmp_path)


@pytest.mark.parametrize(("gamma", "copied"), [("auto", choice.COPIED), (3, 3)])
def test_head_is_copies_or_else_tokens_of_the_head_that_ships(gamma: Any, copied: int, shipped: Any) -> None:
    target = near_model("llama")
    by_hand = FallbackDrafter(
        PromptLookupDrafter(4, shortest=choice.AGREEING),
        AttentionDrafter(target, shipped, Sampling(), most=choice.OF_HEAD),
    )
    made = generate(target, PROMPTS, "head", gamma=gamma, **COMMON)
    expected = generate(target, PROMPTS, by_hand, gamma=copied, **COMMON)
    assert made.tokens == expected.tokens
    assert made.record.gamma == copied
    assert (made.record.draft_tokens == expected.record.draft_tokens).all()
    assert heads.shipped_head(target) is heads.shipped_head(target)


def test_a_target_for_which_no_head_ships_is_told_so() -> None:
    for target in (near_model("llama"), llama(dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"no head ships for this LlamaForCausalLM; one does for SmolLM2-135M-In"):
            generate(target, PROMPTS, "head", **COMMON)
