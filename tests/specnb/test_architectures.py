"""Every causal architecture of transformers is decoded exactly or refused; none wrongly, on either
side of the lengths at which it changes what it computes."""

from __future__ import annotations

import pytest
import torch
from architectures import KINDS, THRESHOLD, require_exact_or_refused
from tiny import near_copy
from transformers import PreTrainedModel

from specnb import generate, standardise
from specnb.record import Generation
from specnb.sampler import Instruments

TEXT = torch.randint(3, 24, (60,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [TEXT[:1], TEXT[: THRESHOLD - 3], TEXT]
EXACT = (
    "bert biogpt cohere cohere2 deepseek_v3 exaone4 falcon gemma gemma2 gemma3 gemma3_text gemma4 glm4 gpt2 "
    "gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe llama mistral mixtral nemotron olmo olmo3 opt phi phi3 "
    "qwen2 qwen2_moe qwen3 qwen3_moe smollm3 stablelm starcoder2"
)


@torch.inference_mode()
def _own(model: PreTrainedModel, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    return standardise(model(input_ids=torch.tensor([prompt + tokens]), use_cache=False).logits[0, -1])


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.filterwarnings("ignore")
def test_an_architecture_is_exact_or_refused(kind: str) -> None:
    def run(model: PreTrainedModel) -> Generation:
        instruments = Instruments(keep_probs=True)
        return generate(model, PROMPTS, near_copy(model, 0.05), gamma=3, max_new_tokens=6, instruments=instruments)

    require_exact_or_refused(kind, PROMPTS, run, _own, may_be_refused=kind not in EXACT.split())
