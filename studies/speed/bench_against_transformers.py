"""Milliseconds per token of this package's loop and that of transformers, on the same prompts in turn, for notebook 05.

Samplers named "packed" or "plain weights" have the weights in another layout than their loop has by default.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from specnb.decoding.generate import generate
from specnb.models.loading import Pair, load_pair
from studies.speed.pairs import PAIRS, PROMPTS, prompts_of
from studies.study import Study, conditions, timed_in_turn

GAMMA = 3  # where transformers' assisted generation is fastest with the synthetic pair on a CPU
Generator = Callable[[list[int]], Any]
"""Generates a fixed number of tokens after a prompt."""


def transformers_generate(
    target: PreTrainedModel, draft: PreTrainedModel | None, gamma: int | None, new_tokens: int
) -> Generator:
    """transformers' `generate` at temperature 1, alone or assisted (`gamma` None: its own schedule)."""

    def run(prompt: list[int]) -> Any:
        if draft is not None:
            fixed = (gamma, "constant", 0.0) if gamma is not None else (None, None, None)
            names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
            for name, value in zip(names, fixed, strict=True):
                setattr(draft.generation_config, name, value)
        tokens = torch.tensor([prompt], device=target.device)
        whole = {} if target.generation_config.eos_token_id is None else {"min_new_tokens": new_tokens}
        model: Any = target
        return model.generate(
            tokens, attention_mask=torch.ones_like(tokens), assistant_model=draft, do_sample=True, top_k=0,
            max_new_tokens=new_tokens, pad_token_id=0, **whole,
        )  # fmt: skip

    return run


def specnb_generate(pair: Pair, gamma: int, new_tokens: int, compile: bool | str = False) -> Generator:
    """The loop of specnb."""
    return lambda prompt: generate(
        pair.target, [prompt], pair.draft, gamma=gamma, max_new_tokens=new_tokens, compile=compile, progress=False
    )


def generators_of(name: str, pair: Pair, saved: Pair, half: Pair, new_tokens: int) -> dict[str, Generator]:
    """What is compared with one pair: as loaded, with its weights as saved, and in bfloat16."""

    def assisted(one: Pair, gamma: int | None = GAMMA) -> Generator:
        return transformers_generate(one.target, one.draft, gamma, new_tokens)

    def ours(one: Pair, gamma: int, compile: bool = False) -> Generator:
        return specnb_generate(one, gamma, new_tokens, compile)

    common = {
        "transformers": transformers_generate(saved.target, None, None, new_tokens),
        "transformers, packed": transformers_generate(pair.target, None, None, new_tokens),
        "transformers assisted": assisted(saved),
        "target only": ours(pair, 0),
        "target only, compiled": ours(pair, 0, True),
        "speculative": ours(pair, GAMMA),
        "speculative, compiled": ours(pair, GAMMA, True),
    }
    if name == "trained":
        return common | {"target only, bfloat16": ours(half, 0), "speculative, bfloat16": ours(half, GAMMA)}
    return common | {
        "transformers assisted, defaults": assisted(saved, None),
        "transformers assisted, packed": assisted(pair),
        "target only, plain weights": ours(saved, 0),
        "speculative, plain weights": ours(saved, GAMMA),
    }


def measure(name: str, repetitions: int, new_tokens: int) -> pd.DataFrame:
    """A line for each sampler with one pair."""
    pair, saved, half = PAIRS[name](), PAIRS[name](packed=False), load_pair(dtype=torch.bfloat16)
    generators = generators_of(name, pair, saved, half, new_tokens)
    prompts = prompts_of(pair, PROMPTS[name][0], repetitions)
    seconds = timed_in_turn(lambda run, prompt, _: run(prompt), [*generators.values()], prompts)
    return pd.DataFrame(
        {"pair": name, "sampler": sampler}
        | conditions(half if "bfloat16" in sampler else pair, "compiled" in sampler)
        | {"ms_per_token": 1e3 * float(np.median(times)) / new_tokens, "runs": len(times)}
        for sampler, times in zip(generators, seconds.T, strict=True)
    )


STUDY = Study(
    measure,
    settings={"repetitions": 11, "new_tokens": 128},
    small={"repetitions": 2, "new_tokens": 8},
    items=tuple(PAIRS),
    small_items=("trained",),
)
