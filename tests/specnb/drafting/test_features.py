"""Drafters that read the target's features: exact by enumeration, the numbers of their networks, and bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from distributions_for_tests import distribution_pair
from drafter_kinds import random_head
from tiny import llama
from torch import Tensor

from specnb.distributions import Sampling, one_hot
from specnb.drafting.base import ChainDrafter, Context, Drafter, Proposal
from specnb.drafting.heads import (
    AttentionDrafter,
    AttentionHead,
    FeatureDrafter,
    Head,
    HeadDrafter,
    ParallelHeads,
    ParallelHeadsDrafter,
    RecurrentHead,
    load_head,
    save_head,
)
from specnb.drafting.model import MixtureDrafter
from specnb.drafting.ngram import UniformDrafter
from specnb.enumeration import completed, drafter_step_distribution, joint_distribution

VOCAB, WIDTH, HIDDEN, GAMMA = 4, 8, 16, 2
STATES = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(3))


def recurrent() -> FeatureDrafter:
    return FeatureDrafter(llama(), random_head(RecurrentHead(WIDTH, HIDDEN)))


def attending(layers: tuple[int, ...] = (-1,)) -> AttentionDrafter:
    return AttentionDrafter(llama(), random_head(AttentionHead(WIDTH, HIDDEN, 2, layers)))


def parallel(count: int = GAMMA) -> ParallelHeadsDrafter:
    return ParallelHeadsDrafter(llama(), random_head(ParallelHeads(WIDTH, HIDDEN, count)))


class Given(Drafter):
    """A drafter whose hidden states are made from the tokens, as there is no target in an enumeration.

    With `bug` it proposes the most probable tokens and reports the distributions that they were not sampled from.
    """

    vocab = VOCAB

    def __init__(self, drafter: Drafter, bug: bool = False) -> None:
        self.drafter, self.bug = drafter, bug

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        states = STATES[context.tokens.clamp_min(0)].cumsum(dim=1)
        context = context._replace(hidden_states=states)
        self.drafter.start(context)
        draft_tokens, q = self.drafter.propose(context, uniforms)
        return Proposal(q.argmax(dim=-1) if self.bug else draft_tokens, q)


def deviation(drafter: Drafter) -> float:
    p, _ = distribution_pair("dense", VOCAB, 0)
    emitted = drafter_step_distribution(drafter, p, (3, 1, 2), GAMMA)
    return float((completed(emitted, p, GAMMA + 1) - joint_distribution(p, GAMMA + 1)).abs().sum()) / 2


@pytest.mark.parametrize("make", [recurrent, attending, parallel])
def test_a_step_has_the_target_s_joint_distribution(make: type[Drafter]) -> None:
    assert deviation(Given(make())) < 1e-6
    assert deviation(Given(make(), bug=True)) > 0.005


@torch.no_grad()
def test_each_token_continues_the_state_of_those_before() -> None:
    drafter = recurrent()
    states, tokens = torch.randn(2, 3, WIDTH), torch.tensor([[1, 2, 0], [3, 0, 1]])
    lengths, uniforms = torch.tensor([3, 2]), torch.rand(2, 3, dtype=torch.float64)
    found = drafter.propose(Context(tokens, lengths, states), uniforms)
    for row, length in enumerate(lengths.tolist()):
        state, newest = states[row, length - 2], tokens[row, length - 1]
        for position in range(3):
            state = drafter.head(state, drafter.embedding(newest))
            logits = drafter.output(drafter.head.features(state))
            assert torch.allclose(found.q[row, position], torch.softmax(logits, -1).to(found.q.dtype), atol=1e-6)
            newest = found.draft_tokens[row, position]


@torch.no_grad()
def test_a_later_step_gets_what_a_new_start_would_get() -> None:
    """Entries that were drafted with the head's own states are computed again with the target's, also of the tokens
    that a step accepted; and what rejected tokens left behind is not seen."""
    random = torch.Generator().manual_seed(2)
    tokens, states = torch.randint(VOCAB, (2, 14), generator=random), torch.randn(2, 14, 2 * WIDTH, generator=random)
    uniforms = torch.rand(2, GAMMA, dtype=torch.float64, generator=random)
    drafter, fresh = attending((0, -1)), attending((0, -1))
    drafter.start(Context(tokens, torch.tensor([1, 4]), states))
    for lengths in ([1, 4], [2, 7], [5, 8], [8, 11]):
        context = Context(tokens, torch.tensor(lengths), states)
        fresh.start(context)
        later, new = drafter.propose(context, uniforms), fresh.propose(context, uniforms)
        assert torch.allclose(later.q, new.q, atol=1e-6), lengths
    too_few = attending((0, -1))
    too_few.start(Context(tokens, torch.tensor([1, 4]), states))
    jumped = Context(tokens, torch.tensor([8, 11]), states)
    assert not torch.allclose(too_few.propose(jumped, uniforms).q, new.q, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("make", [recurrent, attending, parallel])
def test_a_mixture_gets_the_distributions_that_the_drafter_samples_from(make: Callable[[], HeadDrafter]) -> None:
    """Also in steps after others of more and of fewer draft tokens."""
    random = torch.Generator().manual_seed(4)
    tokens, states = torch.randint(VOCAB, (2, 20), generator=random), torch.randn(2, 20, WIDTH, generator=random)
    within, fresh = make(), make()
    within.start(Context(tokens, torch.tensor([1, 3]), states))
    for lengths, gamma in (([1, 3], 2), ([4, 4], 1), ([6, 5], 3), ([10, 6], 2)):
        context, uniforms = Context(tokens, torch.tensor(lengths), states), torch.rand(2, gamma, dtype=torch.float64)
        fresh.start(context)
        own, mixed = fresh.propose(context, uniforms), ChainDrafter.propose(within, context, uniforms)
        assert torch.equal(own.draft_tokens, mixed.draft_tokens)
        assert torch.allclose(own.q, mixed.q, atol=1e-6), lengths


def test_drafters_that_read_different_layers_are_not_combined() -> None:
    with pytest.raises(ValueError, match=r"hidden layers \(0, -1\) and FeatureDrafter \(-1,\); .* the same ones"):
        MixtureDrafter(attending((0, -1)), recurrent())
    assert MixtureDrafter(UniformDrafter(VOCAB), attending((0, -1))).hidden_layers == (0, -1)
    assert MixtureDrafter(attending(), recurrent()).hidden_layers == (-1,)


@torch.no_grad()
def test_a_row_does_not_depend_on_the_others() -> None:
    random = torch.Generator().manual_seed(5)
    tokens, states = torch.randint(VOCAB, (3, 12), generator=random), torch.randn(3, 12, WIDTH, generator=random)
    lengths, uniforms = torch.tensor([9, 1, 5]), torch.rand(3, 3, dtype=torch.float64, generator=random)
    drafter = attending()
    drafter.start(Context(tokens, lengths, states))
    together = drafter.propose(Context(tokens, lengths, states), uniforms).q
    for row in range(3):
        alone, own = attending(), Context(tokens[row : row + 1], lengths[row : row + 1], states[row : row + 1])
        alone.start(own)
        assert torch.allclose(alone.propose(own, uniforms[row : row + 1]).q, together[row : row + 1], atol=1e-6)


@torch.no_grad()
def test_attention_falls_with_the_distance_in_some_heads_and_sees_nothing_ahead() -> None:
    head = AttentionHead(WIDTH, HIDDEN, 4, (-1,))
    bias = head.bias(torch.tensor([[[3, 0, -1]]]))[0, :, 0]
    assert bias[:, 0].tolist() == [0.0, 0.0, -0.75, -3.0]
    assert (bias[:, 1] == 0).all()
    assert (bias[:, 2] == torch.finfo(torch.float32).min).all()


@torch.no_grad()
def test_all_heads_read_one_state_and_none_comes_after_the_last() -> None:
    drafter = parallel(2)
    states = torch.randn(1, 2, WIDTH)
    context = Context(torch.tensor([[1, 2]]), torch.tensor([2]), states)
    found = drafter.propose(context, torch.full((1, 4), 0.5, dtype=torch.float64))
    logits = drafter.output(drafter.head(states[:, 0]))
    assert torch.allclose(found.q[:, :2], torch.softmax(logits, -1).to(found.q.dtype), atol=1e-6)
    assert (found.draft_tokens[:, :2] >= 0).all()
    assert (found.draft_tokens[:, 2:] == -1).all()
    assert (found.q[:, 2:] == 0).all()
    one = drafter.propose(context, torch.full((1, 1), 0.5, dtype=torch.float64))
    assert torch.equal(one.q, found.q[:, :1])


def test_a_new_head_leaves_the_state_as_it_is() -> None:
    state = torch.randn(3, WIDTH)
    assert torch.equal(RecurrentHead(WIDTH, HIDDEN)(state, torch.randn(3, WIDTH)), state)


def test_settings_are_applied_to_the_drafts() -> None:
    drafter = FeatureDrafter(llama(), random_head(RecurrentHead(WIDTH, HIDDEN)), Sampling(temperature=0))
    context = Context(torch.tensor([[1, 2]]), torch.tensor([2]), torch.randn(1, 2, WIDTH))
    found = drafter.propose(context, torch.rand(1, 2, dtype=torch.float64))
    assert torch.equal(found.q, one_hot(found.draft_tokens, VOCAB, found.q.dtype))


def test_a_head_is_saved_and_loaded(tmp_path: Path) -> None:
    heads: list[Head] = [
        random_head(RecurrentHead(WIDTH, HIDDEN, layers=1)),
        random_head(AttentionHead(WIDTH, HIDDEN, 2, (1, -1))),
        random_head(ParallelHeads(WIDTH, HIDDEN, 3)),
    ]
    for head in heads:
        save_head(head, tmp_path)
        found = load_head(tmp_path)
        assert type(found) is type(head)
        assert found.settings == head.settings
        for name, weight in head.state_dict().items():
            assert torch.equal(found.state_dict()[name], weight.bfloat16().float())
    (tmp_path / "config.json").write_text('{"kind": "other"}')
    with pytest.raises(ValueError, match="a head of kind 'other'; it must be one of recurrent, attention, parallel"):
        load_head(tmp_path)


def test_bad_heads_are_refused() -> None:
    with pytest.raises(TypeError, match="give one of the class RecurrentHead"):
        FeatureDrafter(llama(), ParallelHeads(WIDTH, HIDDEN, 2))
    with pytest.raises(TypeError, match="give one of the class ParallelHeads"):
        ParallelHeadsDrafter(llama(), RecurrentHead(WIDTH, HIDDEN))
    with pytest.raises(TypeError, match="give one of the class AttentionHead"):
        AttentionDrafter(llama(), RecurrentHead(WIDTH, HIDDEN))
    with pytest.raises(ValueError, match="there are no hidden states"):
        attending().start(Context(torch.tensor([[1, 2]]), torch.tensor([2])))
    with pytest.raises(ValueError, match="width 4, and LlamaForCausalLM has 8; give the head that was trained"):
        FeatureDrafter(llama(), RecurrentHead(4, HIDDEN))
    with pytest.raises(ValueError, match=r"torch.float64 on cpu, and the target torch.float32 on cpu; give head.to"):
        FeatureDrafter(llama(), RecurrentHead(WIDTH, HIDDEN).double())
    with pytest.raises(ValueError, match="there are no hidden states"):
        recurrent().propose(Context(torch.tensor([[1, 2]]), torch.tensor([2])), torch.rand(1, 1))
