"""Heads and their drafters: the numbers of the networks, their caches, and saved heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafter_kinds import (
    VOCAB,
    WIDTH,
    attending,
    near_model,
    parallel,
    random_context,
    random_head,
    recurrent,
    some_uniforms,
)

from specnb.distributions import Sampling, standardise
from specnb.drafters import ChainDrafter, MixtureDrafter
from specnb.heads import AttentionHead, HeadDrafter, load_head, save_head
from specnb.ngram import UniformDrafter
from studies.drafters.heads import FeatureDrafter, Head, ParallelHeads, RecurrentHead

HIDDEN = 16


@torch.no_grad()
def test_each_token_continues_the_state_of_those_before() -> None:
    sampling = Sampling(0.7, top_k=3)
    drafter = FeatureDrafter(near_model("llama"), random_head(RecurrentHead(WIDTH, HIDDEN)), sampling)
    context = random_context(3, [3, 2])
    found = drafter.propose(context, some_uniforms(2, 3))
    assert context.hidden_states is not None
    for row, length in enumerate(context.lengths.tolist()):
        state, newest = context.hidden_states[row, length - 2], context.tokens[row, length - 1]
        for position in range(3):
            state = drafter.head(state, drafter.embedding(newest))
            expected = standardise(drafter.output(drafter.head.features(state)), sampling)
            assert torch.allclose(found.q[row, position], expected.to(found.q.dtype), atol=1e-6)
            newest = found.draft_tokens[row, position]


@torch.no_grad()
@pytest.mark.parametrize("make", [recurrent, lambda: attending((-1,)), parallel])
def test_a_mixture_gets_the_distributions_that_the_drafter_samples_from(make: Callable[[], HeadDrafter]) -> None:
    """Also in steps after others of more and of fewer draft tokens."""
    context = random_context(20, [1, 3])
    within, fresh = make(), make()
    within.start(context)
    for lengths, gamma in (([1, 3], 2), ([4, 4], 1), ([6, 5], 3), ([10, 6], 2)):
        later = context._replace(lengths=torch.tensor(lengths))
        fresh.start(later)
        own, mixed = (
            fresh.propose(later, some_uniforms(2, gamma)),
            ChainDrafter.propose(within, later, some_uniforms(2, gamma)),
        )
        assert torch.equal(own.draft_tokens, mixed.draft_tokens)
        assert torch.allclose(own.q, mixed.q, atol=1e-6), lengths


def test_combined_drafters_read_the_same_layers() -> None:
    with pytest.raises(ValueError, match=r"hidden layers \(0, -1\) and FeatureDrafter \(-1,\); .* the same ones"):
        MixtureDrafter(attending(), recurrent())
    assert MixtureDrafter(UniformDrafter(VOCAB), attending()).hidden_layers == (0, -1)
    assert MixtureDrafter(attending((-1,)), recurrent()).hidden_layers == (-1,)


@torch.no_grad()
def test_parallel_heads_read_one_state_and_none_comes_after_the_last() -> None:
    drafter, context = parallel(2), random_context(2, [2])
    found = drafter.propose(context, some_uniforms(1, 4))
    expected = torch.softmax(drafter.output(drafter.head(context.last_hidden_state)), dim=-1)
    assert torch.allclose(found.q[:, :2], expected.to(found.q.dtype), atol=1e-6)
    assert (found.draft_tokens >= 0).tolist() == [[True, True]]


def test_a_new_head_leaves_the_state_as_it_is() -> None:
    state = torch.randn(3, WIDTH)
    assert torch.equal(RecurrentHead(WIDTH, HIDDEN)(state, torch.randn(3, WIDTH)), state)


@pytest.mark.parametrize(
    "head",
    [RecurrentHead(WIDTH, HIDDEN, 1), AttentionHead(WIDTH, HIDDEN, 2, (1, -1), 2), ParallelHeads(WIDTH, HIDDEN, 3)],
    ids=lambda head: type(head).__name__,
)
def test_a_head_is_saved_and_loaded(head: Head, tmp_path: Path) -> None:
    save_head(random_head(head), tmp_path)
    found = load_head(tmp_path)
    assert type(found) is type(head)
    assert found.settings == head.settings
    for name, weight in head.state_dict().items():
        assert torch.equal(found.state_dict()[name], weight.bfloat16().to(weight.dtype))
