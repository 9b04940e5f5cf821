"""A head in a format of its own: what it attends to, for which targets it is, and its folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafter_kinds import VOCAB, WIDTH, near_model, random_head

from specnb.drafters import Context
from specnb.heads import AttentionDrafter
from studies.drafters.heads import AttentionHead, attention_drafter, load_head, save_head

HIDDEN = 16


def attending_some() -> AttentionDrafter:
    """Drafts two of the four tokens."""
    target, head = near_model("llama"), AttentionHead(WIDTH, HIDDEN, 2, (0, -1), proposed=2)
    head.choose(target, torch.tensor([3, 1]))
    return attention_drafter(target, random_head(head))


def test_attention_falls_with_the_distance_in_some_heads_and_sees_nothing_ahead() -> None:
    bias = AttentionHead(WIDTH, HIDDEN, 4, (-1,)).bias(torch.tensor([[[3, 0, -1]]]))[0, :, 0]
    assert bias[:, 0].tolist() == [0.0, 0.0, -0.75, -3.0]
    assert (bias[:, 1] == 0).all()
    assert (bias[:, 2] == torch.finfo(torch.float32).min).all()


@torch.no_grad()
def test_a_head_of_some_tokens_drafts_those_of_its_own_target() -> None:
    """With the probabilities that the target's output head gives to them, and none of the
    others."""
    drafter, random = attending_some(), torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCAB, (2, 8), generator=random)
    context = Context(tokens, torch.tensor([4, 2]), torch.randn(2, 8, 2 * WIDTH, generator=random))
    drafter.start(context)
    found = drafter.propose(context, torch.rand(2, 2, dtype=torch.float64, generator=random))
    state = drafter.first_state(context, 2)
    logits = near_model("llama").get_output_embeddings()(drafter.head.features(state))
    expected = torch.zeros(2, VOCAB)
    expected[:, [1, 3]] = torch.softmax(logits[:, [1, 3]], dim=-1)
    assert torch.allclose(found.q[:, 0], expected.to(found.q.dtype), atol=1e-6)
    other = near_model("llama")
    other.get_output_embeddings().weight.mul_(1.1)
    with pytest.raises(ValueError, match="trained for another target"):
        attention_drafter(other, drafter.head)


def test_a_saved_head_is_read_again(tmp_path: Path) -> None:
    head = attending_some().head
    save_head(head, tmp_path)
    again = load_head(tmp_path)
    assert again.settings == head.settings
    for name, weight in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight if name == "proposed" else weight.bfloat16().float())
