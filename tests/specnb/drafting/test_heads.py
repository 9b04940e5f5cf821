"""The attention head and its drafter: what it reads, and for which targets it is."""

from __future__ import annotations

import pytest
import torch
from drafter_kinds import VOCAB, WIDTH, attending, attending_some, near_model, random_context, some_uniforms

from specnb.heads import AttentionDrafter, AttentionHead

HIDDEN = 16


@torch.no_grad()
def test_a_later_step_gets_what_a_new_start_would_get() -> None:
    """Entries that were drafted with the head's own states are computed again with the target's,
    also of the tokens that a step accepted; and what rejected tokens left behind is not seen."""
    context, own = random_context(14, [1, 4], 2 * WIDTH), some_uniforms(2, 2)
    drafter, fresh = attending(), attending()
    drafter.start(context)
    for lengths in ([1, 4], [2, 7], [5, 8], [8, 11]):
        later = context._replace(lengths=torch.tensor(lengths))
        fresh.start(later)
        expected = fresh.propose(later, own).q
        assert torch.allclose(drafter.propose(later, own).q, expected, atol=1e-6), lengths
    skipped = attending()
    skipped.start(context)
    assert not torch.allclose(skipped.propose(later, own).q, expected, atol=1e-3), "steps were left out"


def test_attention_falls_with_the_distance_in_some_heads_and_sees_nothing_ahead() -> None:
    bias = AttentionHead(WIDTH, HIDDEN, 4, (-1,)).bias(torch.tensor([[[3, 0, -1]]]))[0, :, 0]
    assert bias[:, 0].tolist() == [0.0, 0.0, -0.75, -3.0]
    assert (bias[:, 1] == 0).all()
    assert (bias[:, 2] == torch.finfo(torch.float32).min).all()


@torch.no_grad()
def test_a_head_of_some_tokens_drafts_those_of_its_own_target() -> None:
    """With the probabilities that the target's output head gives to them, and none of the
    others."""
    drafter, context = attending_some(), random_context(8, [4, 2], 2 * WIDTH)
    drafter.start(context)
    found = drafter.propose(context, some_uniforms(2, 2))
    state = drafter.first_state(context, 2)
    logits = near_model("llama").get_output_embeddings()(drafter.head.features(state))
    expected = torch.zeros(2, VOCAB)
    expected[:, [1, 3]] = torch.softmax(logits[:, [1, 3]], dim=-1)
    assert torch.allclose(found.q[:, 0], expected.to(found.q.dtype), atol=1e-6)
    other = near_model("llama")
    other.get_output_embeddings().weight.mul_(1.1)
    with pytest.raises(ValueError, match=r"trained for another target than this LlamaForCausalLM, .* give the head"):
        AttentionDrafter(other, drafter.head)
    drafter.head.proposed += VOCAB
    with pytest.raises(ValueError, match="trained for another target"):
        AttentionDrafter(near_model("llama"), drafter.head)
