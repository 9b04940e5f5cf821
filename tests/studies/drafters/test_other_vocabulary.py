"""A draft with another vocabulary: what it proposes, and what it refuses."""

import torch
from drafter_kinds import other_vocabulary

from specnb.drafting.base import Context
from specnb.models.cached_model import CachedModel
from studies.drafters.other_vocabulary import OtherVocabularyDrafter

UNIFORMS = torch.tensor([[0.2, 0.9, 0.5]], dtype=torch.float64)


def proposed(drafter: OtherVocabularyDrafter, *tokens: int, slots: int = 8) -> torch.Tensor:
    row = torch.tensor([[*tokens, *[0] * (slots - len(tokens))]])
    return drafter.propose(Context(row, torch.tensor([len(tokens)])), UNIFORMS).q[0]


def started(drafter: OtherVocabularyDrafter) -> OtherVocabularyDrafter:
    drafter.start(Context(torch.zeros(1, 8, dtype=torch.int64), torch.tensor([1])))
    return drafter


def test_the_first_q_is_the_draft_s_over_the_common_tokens() -> None:
    drafter = started(other_vocabulary())
    q = proposed(drafter, 0, 2, 1)  # a c b, which the draft numbers 1 0 2
    logits = CachedModel(drafter.model, 8).run(torch.tensor([[1, 0, 2]]), torch.arange(3)[None], keep=1)[0, -1]
    expected = torch.softmax(logits[:3].detach(), dim=-1)
    assert torch.allclose(q[0], torch.tensor([*expected[[1, 2, 0]], 0.0]), atol=1e-6)


def test_a_token_that_the_draft_lacks_is_read_and_never_proposed() -> None:
    drafter = started(other_vocabulary())
    q = proposed(drafter, 0, 3, 1)
    assert (q[:, 3] == 0).all()
    assert torch.allclose(q.sum(dim=-1), torch.ones(3))


def test_what_was_rejected_is_not_in_the_cache() -> None:
    used = started(other_vocabulary())
    proposed(used, 0, 2, 1)
    for tokens in ((0, 2, 1, 1), (0, 2, 1, 1, 0, 2), (0, 1)):
        assert torch.allclose(proposed(used, *tokens), proposed(started(other_vocabulary()), *tokens), atol=1e-6)


def test_a_row_gets_draft_tokens_as_far_as_the_draft_s_context_reaches() -> None:
    drafter = started(other_vocabulary())
    drafter.runner = CachedModel(drafter.model, 6)
    whole = proposed(started(other_vocabulary()), 0, 1, 2, 0, 1)
    cut = proposed(drafter, 0, 1, 2, 0, 1)
    assert torch.allclose(cut[:2], whole[:2], atol=1e-6)  # after five tokens and after six
    assert not cut[2].any()
    assert not proposed(drafter, 0, 1, 2, 0, 1, 2, 0).any()
