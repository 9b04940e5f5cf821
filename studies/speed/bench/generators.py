"""The decoding loops of specnb and transformers as functions of a prompt, and their interleaved timing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from specnb.decoding.generate import generate
from specnb.distributions import Sampling
from specnb.measure.timing import Job, device_clock, time_rounds
from specnb.models.loading import Pair, load_pair
from specnb.notebook import corpus
from studies.speed.synthetic import synthetic_pair

PAIRS = ("synthetic", "trained")
PROMPT_TOKENS = 32
Generator = Callable[[list[int]], Any]
"""Generates a fixed number of tokens after a prompt."""


def pair_named(name: str, **how: Any) -> Pair:
    """The pair of this name of `PAIRS`, loaded with `how` (`dtype`, `packed`)."""
    loaders: dict[str, Callable[..., Pair]] = {"synthetic": synthetic_pair, "trained": load_pair}
    return loaders[name](**how)


def pairs_named(names: Sequence[str], **how: Any) -> dict[str, Pair]:
    """The pairs of these names by name, each as `pair_named` loads it."""
    return {name: pair_named(name, **how) for name in names}


def prompts_for(pair: Pair, name: str, count: int, length: int = PROMPT_TOKENS) -> list[list[int]]:
    """Prompts of `length` tokens: beginnings of held-out files for the trained pair, otherwise random tokens.

    Raises `ValueError` for more prompts than there are held-out files.
    """
    if name == "trained":
        sequences = corpus.read("held-out", limit=count)
        if len(sequences) < count:
            raise ValueError(f"{count} prompts were asked for, but {len(sequences)} files are held out; ask for fewer")
        return [pair.encode(text[:4000])[:length] for text in sequences]
    random = np.random.default_rng(0)
    prompts: list[list[int]] = random.integers(pair.target.config.vocab_size, size=(count, length)).tolist()
    return prompts


def time_generators(
    generators: dict[str, Generator], prompts: Sequence[list[int]], device: torch.device, seed: int = 0
) -> pd.DataFrame:
    """Seconds of each generator (columns) on each prompt (rows), in a random order for each prompt, after a warm-up."""
    rounds = [[Job(partial(run, prompt)) for run in generators.values()] for prompt in [prompts[0], *prompts]]
    seconds = time_rounds(rounds, device_clock(device), np.random.default_rng(seed))
    return pd.DataFrame(seconds, columns=list(generators))


def transformers_generate(
    target: PreTrainedModel, draft: PreTrainedModel | None, gamma: int | None, new_tokens: int
) -> Generator:
    """transformers' `generate` at temperature 1, alone or assisted (`gamma` None: its own schedule)."""

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
) -> Generator:
    """specnb's loop, on a batch of `rows` copies of the prompt."""

    def run(prompt: list[int]) -> Any:
        return generate(
            pair.target, [prompt] * rows, pair.draft, gamma=gamma, max_new_tokens=new_tokens, sampling=sampling,
            compile=compile, progress=False,
        )  # fmt: skip

    return run
