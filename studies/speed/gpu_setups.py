"""What is measured on a GPU: models with their drafters and prompts, on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from specnb.copies import PromptLookupDrafter
from specnb.distributions import Sampling
from specnb.drafters import ModelDrafter, TreeDrafter
from specnb.loading import load_pair
from studies.real.smollm2 import head_drafter, model_and_tokenizer, prompts_of
from studies.speed import pairs
from studies.speed.synthetic import Shape, synthetic_pair

CUDA = "cuda"
ALPHA = 0.8  # of pairs with random weights
GAMMAS = (4, 1, 2, 3, 5, 6, 8)  # of a draft model; the first is audited and taken apart
TREE = (-1, -1, 0, 0, 1)
SHAPES = {"6b": (Shape(32, 4096, 14336, 32), Shape(16, 2048, 8192, 32)), "tiny": (Shape(2, 8, 8, 2), Shape(1, 8, 8, 2))}
"""Layers and widths of Llama 3.1 8B and Llama 3.2 1B, as GPT-NeoX: two matrices in a block instead
of three."""


class Setup(NamedTuple):
    """A target on the device, its draft model if any, and what is asked of them.

    drafters  name -> makes a drafter for one batch, sampled as given, and numbers of draft tokens
    prompts   at least as many as are timed
    eos       the end of a text, or None
    """

    target: PreTrainedModel
    draft: PreTrainedModel | None
    drafters: dict[str, tuple[Callable[[Sampling], Any], tuple[int, ...]]]
    prompts: list[list[int]]
    eos: int | None = None


def setup(name: str, dtype: torch.dtype, kind: str = "chat") -> Setup:
    """`pair` (the trained pair), `smollm2` with prompts of a `kind`, or one of `SHAPES`, as `6b` or,
    with an acceptance probability, `6b_0.6`; the models are made once."""
    return smollm2(dtype, kind) if name == "smollm2" else of_a_pair(name, dtype)


@cache
def of_a_pair(name: str, dtype: torch.dtype) -> Setup:
    """A target with a draft model."""
    if name == "pair":
        pair = load_pair(device=CUDA, dtype=dtype)
        prompts = pairs.prompts_of(pair, "stdlib", len(pairs.MODULES))
    else:
        name, _, alpha = name.partition("_")
        vocab, place = (64, "cpu") if name == "tiny" else (32_000, CUDA)
        pair = synthetic_pair(float(alpha or ALPHA), *SHAPES[name], vocab=vocab, device=place, dtype=dtype)
        prompts = np.random.default_rng(0).integers(vocab, size=(64, 32)).tolist()
    models: list[Any] = [pair.target, pair.draft]
    target, draft = (model.to(torch.device(CUDA)) for model in models)
    drafters: dict[str, Any] = {"model": (lambda sampling: ModelDrafter(draft, sampling, capturable=True), GAMMAS)}
    if name == "pair":
        drafters["tree"] = (lambda sampling: TreeDrafter(draft, TREE, sampling, capturable=True), (len(TREE),))
    return Setup(target, draft, drafters, prompts)


def smollm2(dtype: torch.dtype, kind: str) -> Setup:
    """The real model: copies, and the head that was trained for it."""
    target, tokenizer = model_and_tokenizer(str(dtype).removeprefix("torch."), CUDA)
    drafters: dict[str, Any] = {
        "copies": (lambda _: PromptLookupDrafter(target.config.vocab_size), (4, 8, 10)),
        "head": (lambda sampling: head_drafter(target, sampling, capturable=True), (2, 4)),
    }
    return Setup(target, None, drafters, prompts_of(tokenizer, kind, 12), tokenizer.eos_token_id)
