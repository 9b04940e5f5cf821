"""Drafters: the distribution they report is the one they drew from, and it is the model's own at that prefix."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from implementation_distribution import PROMPTS, VOCAB, PatchyDrafter
from tiny import ARCHITECTURES, gpt2, llama, next_distributions
from torch import Tensor
from transformers import MistralConfig, MistralForCausalLM

from specnb.decoding.generate import generate
from specnb.distributions import Sampling, sample
from specnb.drafting.base import Context, Drafter, Proposal, missing_members
from specnb.drafting.model import ModelDrafter
from specnb.drafting.ngram import NgramDrafter, NgramModel

GAMMA = 3
STEPS = 3


def batch(prompts: Sequence[Sequence[int]], slots: int = 16) -> tuple[Tensor, Tensor]:
    """Sequences with unused slots behind them, filled with arbitrary tokens."""
    tokens = torch.full((len(prompts), slots), VOCAB - 1)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    return tokens, torch.tensor([len(prompt) for prompt in prompts])


def texts_of(tokens: Tensor, lengths: Tensor) -> list[list[int]]:
    return [row[:length] for row, length in zip(tokens.tolist(), lengths.tolist(), strict=True)]


@torch.inference_mode()
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.5, top_k=3), Sampling(0)], ids=["soft", "sharp", "argmax"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_q_is_the_model_s_distribution_at_every_prefix_and_what_was_sampled_from(
    architecture: str, sampling: Sampling
) -> None:
    """Over several steps in which rows accept 0 to all of their drafts, the full acceptance included."""
    model = ARCHITECTURES[architecture](dtype=torch.float64)
    drafter = ModelDrafter(model, sampling)
    tokens, lengths = batch(PROMPTS)
    drafter.start(Context(tokens, lengths))
    for step in range(STEPS):
        uniforms = torch.from_numpy(np.random.default_rng(step).random((len(PROMPTS), GAMMA)))
        draft_tokens, q = drafter.propose(Context(tokens, lengths), uniforms)
        assert torch.equal(draft_tokens, sample(q, uniforms))
        for row, text in enumerate(texts_of(tokens, lengths)):
            for at in range(GAMMA):
                exact = next_distributions(model, [text + draft_tokens[row, :at].tolist()], sampling)[0]
                assert torch.allclose(q[row, at], exact, rtol=0, atol=1e-10)
            accepted = (row + step + 1) % (GAMMA + 1) if len(text) + GAMMA < 13 else 0
            emitted = [*draft_tokens[row, :accepted].tolist(), (step + row) % VOCAB]
            tokens[row, len(text) : len(text) + len(emitted)] = torch.tensor(emitted)
            lengths[row] += len(emitted)


def test_a_draft_at_temperature_zero_reports_a_one_hot_distribution() -> None:
    drafter = ModelDrafter(llama(), Sampling(0))
    tokens, lengths = batch(PROMPTS)
    drafter.start(Context(tokens, lengths))
    draft_tokens, q = drafter.propose(Context(tokens, lengths), torch.rand(len(PROMPTS), GAMMA))
    assert torch.equal(q, torch.nn.functional.one_hot(draft_tokens, VOCAB).to(q.dtype))


def ngram() -> NgramDrafter:
    return NgramDrafter(NgramModel(np.random.default_rng(0).integers(0, VOCAB, 200), 3, VOCAB))


MADE = {"llama": lambda: ModelDrafter(llama()), "gpt2": lambda: ModelDrafter(gpt2()), "ngram": ngram}


@torch.inference_mode()
@pytest.mark.parametrize("name", MADE)
def test_entries_behind_a_row_are_ignored(name: str) -> None:
    proposals = []
    for filling in (0, VOCAB - 1):
        tokens, lengths = batch(PROMPTS)
        for row, length in enumerate(lengths):
            tokens[row, length:] = filling
        drafter = MADE[name]()
        drafter.start(Context(tokens, lengths))
        proposals.append(drafter.propose(Context(tokens, lengths), torch.full((len(PROMPTS), GAMMA), 0.4)))
    assert torch.equal(proposals[0].draft_tokens, proposals[1].draft_tokens)
    assert torch.equal(proposals[0].q, proposals[1].q)


@torch.inference_mode()
@pytest.mark.parametrize("name", MADE)
def test_start_forgets_the_batch_before(name: str) -> None:
    drafter = MADE[name]()
    uniforms = torch.full((len(PROMPTS), GAMMA), 0.4)
    proposals = []
    for prompts in (PROMPTS, [(1,) * 7, (2, 2), (3,)], PROMPTS):
        tokens, lengths = batch(prompts)
        drafter.start(Context(tokens, lengths))
        proposals.append(drafter.propose(Context(tokens, lengths), uniforms))
    assert torch.equal(proposals[0].q, proposals[2].q)
    assert not torch.equal(proposals[0].q, proposals[1].q)


def test_an_ngram_drafter_reports_the_distributions_of_its_table() -> None:
    drafter = ngram()
    tokens, lengths = batch(PROMPTS)
    uniforms = torch.from_numpy(np.random.default_rng(1).random((len(PROMPTS), GAMMA)))
    draft_tokens, q = drafter.propose(Context(tokens, lengths), uniforms)
    assert torch.equal(draft_tokens, sample(q, uniforms))
    for row, prompt in enumerate(PROMPTS):
        for at in range(GAMMA):
            context = np.array([([-1, -1, *prompt, *draft_tokens[row, :at].tolist()])[-2:]])
            assert np.allclose(q[row, at].numpy(), drafter.model.probs(context)[0], rtol=0, atol=1e-12)


class SilentDrafter(Drafter):
    """Never has anything to propose."""

    vocab = VOCAB

    def propose(self, context: Context, uniforms: Tensor) -> Proposal:
        return Proposal(torch.full(uniforms.shape, -1), torch.zeros(*uniforms.shape, VOCAB))


def test_without_a_proposal_a_step_is_a_step_of_the_target() -> None:
    alone = generate(llama(), PROMPTS, gamma=0, max_new_tokens=6, seed=4, progress=False)
    silent = generate(llama(), PROMPTS, SilentDrafter(), gamma=3, max_new_tokens=6, seed=4, progress=False)
    assert silent.tokens == alone.tokens
    assert (silent.record.draft_tokens == -1).all()
    assert not silent.record.accepted.any()
    assert not silent.record.tested.any()
    assert silent.record.target_passes.tolist() == [6, 6, 6]


def test_a_missing_draft_token_ends_the_step_there() -> None:
    made = generate(llama(), PROMPTS * 20, PatchyDrafter(llama()), gamma=3, max_new_tokens=8, progress=False)
    missing = made.record.draft_tokens < 0
    first = np.where(missing.any(axis=-1), missing.argmax(axis=-1), made.record.gamma)
    assert (made.record.accepted <= first)[made.record.active].all()
    # The draft is the target itself, so nothing but a missing draft ends a step.
    assert (made.record.accepted == first)[made.record.active].all()


@pytest.mark.parametrize("drafter", [ModelDrafter(llama()), ngram(), SilentDrafter()])
def test_drafters_have_all_members(drafter: Drafter) -> None:
    assert missing_members(drafter) == []


def test_a_model_that_the_loop_cannot_run_is_refused_as_a_draft() -> None:
    config = MistralConfig(vocab_size=VOCAB, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                           num_attention_heads=2, num_key_value_heads=1, sliding_window=4)  # fmt: skip
    with pytest.raises(TypeError, match=r"MistralForCausalLM .* DynamicSlidingWindowLayer"):
        ModelDrafter(MistralForCausalLM(config).eval())
