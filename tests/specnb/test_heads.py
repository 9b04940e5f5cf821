"""The drafter with a head: what it computes again, and what copies of the text leave to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from drafter_kinds import (
    VOCAB,
    WIDTH,
    attending,
    eagle3,
    layer_config,
    lookup,
    near_model,
    next_token_layers,
    random_head,
)
from torch import Tensor

from specnb import fast
from specnb.drafters import Context
from specnb.heads import AttentionDrafter, Eagle3Head, FallbackDrafter


def random_context(slots: int, lengths: list[int], layers: int = 2) -> Context:
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (len(lengths), slots), generator=random)
    states = torch.randn(len(lengths), slots, layers * WIDTH, generator=random)
    return Context(tokens, torch.tensor(lengths), states)


def some_uniforms(rows: int, gamma: int) -> Tensor:
    return torch.rand(rows, gamma, dtype=torch.float64, generator=torch.Generator().manual_seed(gamma))


@pytest.mark.parametrize("made", [attending, eagle3, next_token_layers])
@torch.no_grad()
def test_a_later_step_gets_what_a_new_start_would_get(made: Callable[[], AttentionDrafter]) -> None:
    """Entries that were drafted with the head's own states are computed again with the target's,
    also of the tokens that a step accepted, and of steps that it was left out of; and what rejected
    tokens left behind is not seen."""
    drafter, fresh, skipped, stale = made(), made(), made(), made()
    stale.capturable = True  # it does not ask how many tokens came
    context, own = random_context(14, [1, 4], len(drafter.hidden_layers)), some_uniforms(2, 2)
    drafter.start(context)
    for lengths in ([1, 4], [2, 7], [5, 8], [8, 11]):
        later = context._replace(lengths=torch.tensor(lengths))
        fresh.start(later)
        expected = fresh.propose(later, own).q
        assert torch.allclose(drafter.propose(later, own).q, expected, atol=1e-6), lengths
    for left_out in (skipped, stale):
        left_out.start(context)
    assert torch.allclose(skipped.propose(later, own).q, expected, atol=1e-6)
    assert not torch.allclose(stale.propose(later, own).q, expected, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("compile", ["auto", True])
def test_its_layers_are_packed_in_a_copy(compile: fast.Compile, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[object] = []
    monkeypatch.setattr("specnb.heads.pack", lambda modules: packed.append(modules) or [])
    target, head = near_model("llama"), random_head(Eagle3Head(layer_config(), (0, 1)))
    drafter = AttentionDrafter(target, head, compile=compile)
    assert packed
    assert drafter.head is not head
    assert drafter.head.fc.weight is head.fc.weight
    assert not any(isinstance(module, fast.PackedLinear) for module in (*target.modules(), *head.modules()))


def test_a_row_with_a_match_copies_and_the_others_draft_with_the_head() -> None:
    context = random_context(12, [3, 3])
    context.tokens[:, :3] = torch.tensor([[1, 2, 1], [0, 1, 2]])
    own = some_uniforms(2, 3)
    drafter, head = FallbackDrafter(lookup(), attending(most=2)), attending(most=2)
    for one in (drafter, head):
        one.start(context)
    made, sampled = drafter.propose(context, own), head.propose(context, own)
    assert made.draft_tokens[0].tolist() == [2, 1, 2]
    assert made.draft_tokens[1].tolist() == [*sampled.draft_tokens[1].tolist(), -1]
    assert torch.equal(made.q[1, :2], sampled.q[1])
    assert made.q[1, 2].sum() == 0
    assert drafter.gamma == 10, "as many as it may copy"
    of_head: Any = drafter.head
    before = of_head.entered
    drafter.propose(context._replace(tokens=context.tokens[[0, 0]]), own)
    assert of_head.entered is before, "the head is left out where all rows copy"
