"""Heads and their drafters: the numbers of the networks, their caches, and saved heads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafter_kinds import VOCAB, WIDTH, attending, attending_some, near_model, parallel, random_head, recurrent
from torch import Tensor

from specnb.distributions import Sampling, standardise
from specnb.drafting.base import ChainDrafter, Context
from specnb.drafting.model import MixtureDrafter
from specnb.drafting.ngram import UniformDrafter
from studies.drafters.heads import (
    AttentionDrafter,
    AttentionHead,
    FeatureDrafter,
    Head,
    HeadDrafter,
    ParallelHeads,
    RecurrentHead,
    load_head,
    save_head,
)

HIDDEN = 16


def random_context(slots: int, lengths: list[int], width: int = WIDTH, seed: int = 0) -> Context:
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (len(lengths), slots), generator=random)
    return Context(tokens, torch.tensor(lengths), torch.randn(len(lengths), slots, width, generator=random))


def uniforms(rows: int, gamma: int) -> Tensor:
    return torch.rand(rows, gamma, dtype=torch.float64, generator=torch.Generator().manual_seed(gamma))


@torch.no_grad()
def test_each_token_continues_the_state_of_those_before() -> None:
    sampling = Sampling(0.7, top_k=3)
    drafter = FeatureDrafter(near_model("llama"), random_head(RecurrentHead(WIDTH, HIDDEN)), sampling)
    context = random_context(3, [3, 2])
    found = drafter.propose(context, uniforms(2, 3))
    assert context.hidden_states is not None
    for row, length in enumerate(context.lengths.tolist()):
        state, newest = context.hidden_states[row, length - 2], context.tokens[row, length - 1]
        for position in range(3):
            state = drafter.head(state, drafter.embedding(newest))
            expected = standardise(drafter.output(drafter.head.features(state)), sampling)
            assert torch.allclose(found.q[row, position], expected.to(found.q.dtype), atol=1e-6)
            newest = found.draft_tokens[row, position]


@torch.no_grad()
def test_a_later_step_gets_what_a_new_start_would_get() -> None:
    """Entries that were drafted with the head's own states are computed again with the target's, also of the tokens
    that a step accepted; and what rejected tokens left behind is not seen."""
    context, own = random_context(14, [1, 4], 2 * WIDTH), uniforms(2, 2)
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
        own, mixed = fresh.propose(later, uniforms(2, gamma)), ChainDrafter.propose(within, later, uniforms(2, gamma))
        assert torch.equal(own.draft_tokens, mixed.draft_tokens)
        assert torch.allclose(own.q, mixed.q, atol=1e-6), lengths


def test_combined_drafters_read_the_same_layers() -> None:
    with pytest.raises(ValueError, match=r"hidden layers \(0, -1\) and FeatureDrafter \(-1,\); .* the same ones"):
        MixtureDrafter(attending(), recurrent())
    assert MixtureDrafter(UniformDrafter(VOCAB), attending()).hidden_layers == (0, -1)
    assert MixtureDrafter(attending((-1,)), recurrent()).hidden_layers == (-1,)


def test_attention_falls_with_the_distance_in_some_heads_and_sees_nothing_ahead() -> None:
    bias = AttentionHead(WIDTH, HIDDEN, 4, (-1,)).bias(torch.tensor([[[3, 0, -1]]]))[0, :, 0]
    assert bias[:, 0].tolist() == [0.0, 0.0, -0.75, -3.0]
    assert (bias[:, 1] == 0).all()
    assert (bias[:, 2] == torch.finfo(torch.float32).min).all()


@torch.no_grad()
def test_parallel_heads_read_one_state_and_none_comes_after_the_last() -> None:
    drafter, context = parallel(2), random_context(2, [2])
    found = drafter.propose(context, uniforms(1, 4))
    expected = torch.softmax(drafter.output(drafter.head(context.last_hidden_state)), dim=-1)
    assert torch.allclose(found.q[:, :2], expected.to(found.q.dtype), atol=1e-6)
    assert (found.draft_tokens >= 0).tolist() == [[True, True]]


@torch.no_grad()
def test_a_head_of_some_tokens_drafts_those_of_its_own_target() -> None:
    """With the probabilities that the target's output head gives to them, and none of the others."""
    drafter, context = attending_some(), random_context(8, [4, 2], 2 * WIDTH)
    drafter.start(context)
    found = drafter.propose(context, uniforms(2, 2))
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
    (tmp_path / "config.json").write_text('{"kind": "other"}')
    with pytest.raises(ValueError, match="a head of kind 'other'; it must be one of recurrent, attention, parallel"):
        load_head(tmp_path)
