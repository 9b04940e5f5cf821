"""Heads and their drafters: the numbers of the networks, their caches, and saved heads."""

from __future__ import annotations

import torch
from drafter_kinds import (
    WIDTH,
    near_model,
    parallel,
    random_context,
    random_head,
    some_uniforms,
)

from specnb.distributions import Sampling, standardise
from studies.drafters.heads import FeatureDrafter, RecurrentHead

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
def test_parallel_heads_read_one_state_and_none_comes_after_the_last() -> None:
    drafter, context = parallel(2), random_context(2, [2])
    found = drafter.propose(context, some_uniforms(1, 4))
    expected = torch.softmax(drafter.output(drafter.head(context.last_hidden_state)), dim=-1)
    assert torch.allclose(found.q[:, :2], expected.to(found.q.dtype), atol=1e-6)
    assert (found.draft_tokens >= 0).tolist() == [[True, True]]
