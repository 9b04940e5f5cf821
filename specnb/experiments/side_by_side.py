"""Our loop and transformers' on the same prompts, in turn: what a comparison of speeds needs.

The baseline gets the care that the method gets: its best settings, and on request the same packed weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decoding.loop import generate
from specnb.experiments import corpus
from specnb.models.loading import Pair
from specnb.sampling.distributions import Sampling

PROMPT_TOKENS = 32
GenerateFunction = Callable[[list[int]], Any]


def prompts_for(pair: Pair, name: str, count: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """Beginnings of held-out files for the trained pair, any tokens for a synthetic one; `length` tokens each."""
    if name == "trained":
        sequences = corpus.read("held-out", limit=count)
        return [pair.encode(text[:4000])[:length] for text in sequences]
    return np.random.default_rng(0).integers(pair.target.config.vocab_size, size=(count, length)).tolist()


def time_side_by_side(
    samplers: dict[str, GenerateFunction], prompts: Sequence[list[int]], seed: int = 0
) -> pd.DataFrame:
    """Seconds of each entrant `(columns)` on each prompt `(rows)`, after one run of each that does not count."""
    order = np.random.default_rng(seed)
    seconds = pd.DataFrame(np.nan, index=range(len(prompts)), columns=list(samplers))
    for run in tqdm(samplers.values(), desc="warming up", delay=3, leave=False):
        run(prompts[0])
    for row, prompt in enumerate(tqdm(prompts, desc="racing", delay=3, leave=False)):
        for name in order.permutation(list(samplers)):
            began = time.perf_counter()
            samplers[name](prompt)
            seconds.loc[row, name] = time.perf_counter() - began
    return seconds


def transformers_generate(
    target: PreTrainedModel, draft: PreTrainedModel | None, gamma: int | None, new_tokens: int
) -> GenerateFunction:
    """Its `generate` at temperature 1, alone or assisted: by `gamma` drafts each time, or (None) as it pleases."""

    def run(prompt: list[int]) -> Any:
        if draft is not None and gamma is not None:
            draft.generation_config.num_assistant_tokens = gamma
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
        elif draft is not None:
            for name in ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"):
                setattr(draft.generation_config, name, None)
        tokens = torch.tensor([prompt], device=target.device)
        whole = {} if target.generation_config.eos_token_id is None else {"min_new_tokens": new_tokens}
        model: Any = target
        return model.generate(
            tokens, attention_mask=torch.ones_like(tokens), assistant_model=draft, do_sample=True, top_k=0,
            max_new_tokens=new_tokens, pad_token_id=0, **whole,
        )  # fmt: skip

    return run


def specnb_generate(
    pair: Pair, gamma: int, new_tokens: int, compile: bool | str = False, rows: int = 1, sampling: Sampling = Sampling()
) -> GenerateFunction:
    """Our loop, the prompt alone in its batch or there `rows` times."""

    def run(prompt: list[int]) -> Any:
        return generate(
            pair.target, [prompt] * rows, pair.draft, gamma=gamma, max_new_tokens=new_tokens, sampling=sampling,
            compile=compile, progress=False,
        )  # fmt: skip

    return run
