"""Drafting and verification in one pass of the target, with look-ahead embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from drafter_kinds import VOCAB, WIDTH
from implementation_distribution import FALSE_ALARMS, PROMPTS, completions_p_value, eager, refilled
from rule_checks import step_off
from tiny import llama, next_distributions
from torch import Tensor
from transformers import PreTrainedModel

from specnb.cache import slots_for
from specnb.distributions import Uniforms, overlap
from specnb.drafters import Context, Drafter, Proposal
from specnb.sampler import generate
from specnb.step import Setup
from studies.drafters.lookahead_embeddings import FusedDrafter, extended, losses, train
from studies.drafters.one_pass import ONE_PASS, OnePassBatch, OnePassDrafter

COUNT = 2


def with_vectors(target: PreTrainedModel) -> PreTrainedModel:
    return extended(target, 2 * torch.randn(COUNT, WIDTH, generator=torch.Generator().manual_seed(0)))


HOW: dict[str, Any] = {"gamma": COUNT, "progress": False, "instruments": ONE_PASS}


def test_the_loop_has_the_target_s_distribution() -> None:
    how: dict[str, Any] = {"gamma": COUNT, "instruments": ONE_PASS}
    found = refilled(with_vectors(eager("llama")), FusedDrafter(VOCAB, COUNT), 1_500, seed=8, eos=1, **how)
    assert completions_p_value(found, "llama", 1) > FALSE_ALARMS / 2
    assert found.record.accepted.any()


class SecondStep(Drafter):
    """What `drafter` proposes in the step after one whose pass ended with the token before the
    newest."""

    vocab = VOCAB

    def __init__(self, target: PreTrainedModel, drafter: OnePassDrafter) -> None:
        self.target, self.drafter = target, drafter

    def start(self, context: Context, rows: Tensor | None = None) -> None:
        count, zeros = len(context.lengths), torch.zeros(len(context.lengths), 2, COUNT, dtype=torch.float64)
        prompts = [row[: length - 1] for row, length in zip(context.tokens.tolist(), context.lengths, strict=True)]
        slots = slots_for(context.tokens.shape[1], 2, COUNT)
        batch = OnePassBatch(Setup(self.target, self.drafter, COUNT, count, slots, max_steps=2))
        batch.clear([])
        batch.enter([*range(count)], prompts, Uniforms(zeros, zeros, zeros[..., 0]), 2)
        batch.step()

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return self.drafter.propose(context, uniforms)


@torch.inference_mode()
def test_a_fused_step_has_the_target_s_joint_distribution() -> None:
    """The drafter is enumerated after a pass of the real batch; q is that of a pass over the text
    and the vectors."""
    target, prefix = with_vectors(llama(dtype=torch.float64)), (3, 1, 2, 3, 1)
    second = SecondStep(target, FusedDrafter(VOCAB, COUNT))
    assert step_off(second, prefix, COUNT) < 1e-6
    logits = target(input_ids=torch.tensor([[*prefix[:-1], VOCAB, VOCAB + 1]]), use_cache=False).logits
    assert torch.allclose(second.drafter.q[0], torch.softmax(logits[0, -COUNT:], dim=-1), atol=1e-9)  # type: ignore[attr-defined]


@torch.no_grad()
def test_every_q_is_of_the_vectors_after_the_last_accepted_token() -> None:
    target, drafter = with_vectors(llama(dtype=torch.float64)), FusedDrafter(VOCAB, COUNT)
    found = generate(target, PROMPTS * 3, drafter, max_new_tokens=9, **HOW)
    for row, (prompt, tokens) in enumerate(zip(PROMPTS * 3, found.tokens, strict=True)):
        known = len(prompt) + int(found.record.emitted[row, 0])
        for step in range(1, found.record.target_passes[row]):
            text = [*prompt, *tokens][:known]
            p = next_distributions(target, [text])
            q = target(input_ids=torch.tensor([[*text[:-1], VOCAB]]), use_cache=False).logits[:, -1]
            assert float(overlap(p, torch.softmax(q, dim=-1))) == pytest.approx(found.record.beta[row, step, 0])
            known += int(found.record.emitted[row, step])


def test_vectors_are_trained_at_the_places_where_they_draft() -> None:
    """The loss is that of passes over each text and the vectors alone; only the vectors change."""
    target, tokens = llama(), torch.randint(VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    model = with_vectors(target)
    texts = [row[:length] for row in tokens.tolist() for length in (4, 8)]
    with torch.no_grad():
        q = [torch.softmax(model(input_ids=torch.tensor([[*text, VOCAB]])).logits[0, -1], dim=-1) for text in texts]
    p = [next_distributions(target, [row[:length]])[0] for row in tokens.tolist() for length in (5, 9)]
    expected = 1 - sum(float(overlap(a, b.double())) for a, b in zip(p, q, strict=True)) / 4
    assert float(losses(model, tokens, 1.0)[0].detach()) == pytest.approx(expected, abs=1e-5)
    before = {name: weight.clone() for name, weight in target.named_parameters()}
    assert train(target, [tokens] * 3, COUNT, 3).shape == (COUNT, WIDTH)
    assert all(torch.equal(before[name], weight) for name, weight in target.named_parameters())
