"""Encoder-decoder models in the loop: T5, BART and Marian against their own forward passes without
caches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from architectures import ENCODER_DECODERS, require_exact_or_refused, tiny_model
from tiny import near_copy
from torch import Tensor
from transformers import PreTrainedModel

from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling
from specnb.enumeration import joint_distribution
from specnb.record import Generation
from specnb.sampler import Instruments
from specnb.statistics import goodness_of_fit
from studies.batching import encoder_decoder
from studies.batching.encoder_decoder import EncoderDecoderDrafter, EncoderDecoderSampler

VOCAB, START = 5, 3
PROMPTS = [[2], [4, 1, 2, 0, 3, 1], [3, 3, 1], [1, 0, 4, 2]]
MODELS = ("t5", "bart", "marian")
EXACT = "bart blenderbot marian mbart mt5 pegasus t5"


def small(kind: str) -> Any:
    """A tiny model of few tokens; those of a T5 attend to several, by relative positions as much as by scores."""
    model: Any = tiny_model(kind, True, VOCAB, START)
    model.generation_config.forced_eos_token_id = None
    for name, weights in model.named_parameters():
        weights.data *= 0.1 if ".q." in name else 4 if "relative" in name else 1
    if kind == "t5":
        model.get_output_embeddings().weight.data *= 8
    return model.double()


@torch.inference_mode()
def exact(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """The distribution after `tokens`, by a forward pass without caches."""
    given, decoded = torch.tensor([list(prompt)]), torch.tensor([[model.config.decoder_start_token_id, *tokens]])
    logits: Tensor = model(input_ids=given, decoder_input_ids=decoded, use_cache=False).logits
    return logits[0, -1].softmax(-1)


def refilled(target: PreTrainedModel, draft: Any, eos: int | None = None, **settings: Any) -> Generation:
    """Two rows take four prompts of different lengths in turn."""
    sampler = EncoderDecoderSampler(target, draft, progress=False, **{"gamma": 3, **settings})
    return sampler.generate(PROMPTS, max_new_tokens=9, batch_size=2, eos=eos)


def near(model: PreTrainedModel, noise: float, sampling: Sampling = Sampling()) -> EncoderDecoderDrafter:
    return EncoderDecoderDrafter(near_copy(model, noise), sampling)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", MODELS)
def test_every_token_has_the_distribution_of_an_uncached_pass(name: str, attention: str) -> None:
    target = small(name)
    target.set_attn_implementation(attention)
    made = refilled(target, near(target, 0.05), eos=1, instruments=Instruments(keep_probs=True))
    assert made.record.accepted.max() == 3
    assert made.probs is not None
    for prompt, tokens, probs in zip(PROMPTS, made.tokens, made.probs, strict=True):
        expected = [exact(target, prompt, tokens[:n]) for n in range(len(tokens))]
        torch.testing.assert_close(probs, torch.stack(expected), rtol=0, atol=1e-6 if attention == "eager" else 1e-9)


@pytest.mark.parametrize("draft", ["near", "copies"])
def test_completions_have_the_target_s_joint_distribution(draft: str) -> None:
    """Pearson's test of all completions, with refilled rows; it would find a total variation of
    about 0.05."""
    target, length, copies = small("t5"), 3, 3_000
    drafts: dict[str, Any] = {"near": near(target, 0.1), "copies": PromptLookupDrafter(VOCAB)}
    made = EncoderDecoderSampler(target, drafts[draft], gamma=2, progress=False).generate(
        [PROMPTS[1], PROMPTS[2]] * copies, max_new_tokens=length, batch_size=2 * copies - 600, seed=4
    )  # fmt: skip
    for at, prompt in enumerate(PROMPTS[1:3]):
        probs = joint_distribution(partial(exact, target, prompt), length)
        codes = np.array(made.tokens[at::2]) @ VOCAB ** np.arange(length)[::-1]
        fit = goodness_of_fit(np.bincount(codes, minlength=VOCAB**length), probs.numpy().ravel())
        assert fit.p_value > 1e-6, fit


@pytest.mark.parametrize("name", MODELS)
def test_at_temperature_0_the_tokens_are_those_of_transformers(name: str) -> None:
    """Greedy and assisted, with the default gamma and with a draft that copies the encoder's
    input."""
    target = small(name)
    draft = near_copy(target, 0.2)
    greedy: dict[str, Any] = {"sampling": Sampling(temperature=0), "eos": 1}
    made = refilled(target, EncoderDecoderDrafter(draft, Sampling(temperature=0)), **greedy).tokens
    assert refilled(target, EncoderDecoderDrafter(draft), gamma="auto", **greedy).tokens == made
    assert refilled(target, PromptLookupDrafter(VOCAB), **greedy).tokens == made
    for assistant in (None, draft):
        for prompt, tokens in zip(PROMPTS, made, strict=True):
            given = torch.tensor([prompt])
            found = target.generate(
                given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=9, eos_token_id=1,
                assistant_model=assistant,
            )  # fmt: skip
            assert found[0, 1:].tolist() == tokens


def test_positions_of_the_longest_row_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_decoder, "decoder_positions", lambda model: [torch.nn.Identity()])
    for name in MODELS:
        with pytest.raises(TypeError, match=r"its decoder counts positions, or masks, in a way of its own"):
            test_every_token_has_the_distribution_of_an_uncached_pass(name, "sdpa")


@pytest.mark.parametrize("kind", ENCODER_DECODERS)
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_is_exact_or_refused(kind: str) -> None:
    prompts = [[3], [4, 5, 6], [6, 3, 5, 4, 5, 5, 4]]

    def run(model: PreTrainedModel) -> Generation:
        instruments = Instruments(keep_probs=True)
        sampler = EncoderDecoderSampler(model, near(model, 0.05), gamma=3, instruments=instruments, progress=False)
        return sampler.generate(prompts, max_new_tokens=6)

    require_exact_or_refused(kind, prompts, run, exact, encodes=True, may_be_refused=kind not in EXACT.split())
