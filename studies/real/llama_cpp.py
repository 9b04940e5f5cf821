"""SmolLM2 by llama.cpp, on the GGUF file that the real model is converted from, if the package
xllamacpp is installed.

It runs in a process of its own: in one process with torch, both were up to 1.6 times as slow.
llama.cpp computes with the file's weights of 4 bits and with activations of 8, so it does not
sample from exactly the distribution of the converted model. Its n-gram speculation copies `DRAFTED`
tokens that followed the newest `AGREEING` ones, the fastest of (2, 5), (3, 8), (4, 8), (4, 16) and
its own (12, 48) on the first prompts of three kinds at temperature 0; its cache of n-grams gained
nothing there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

from specnb.distributions import Sampling
from studies.real.smollm2 import fetched

AGREEING, DRAFTED = 3, 8
THREADS = 2
CONTEXT = 1024  # tokens of prompt and answer


def ways(sampling: Sampling, new_tokens: int) -> dict[str, Callable[[int, list[int]], tuple[int, list[int]]]]:
    """Plain and speculative decoding: number of a prompt and its tokens -> how many new ones. None
    without the package.

    >>> "llama.cpp" in ways(Sampling(0), 8) or find_spec("xllamacpp") is None
    True
    """
    if find_spec("xllamacpp") is None:
        return {}
    asked = {
        "n_predict": new_tokens, "temperature": sampling.temperature, "top_k": 0, "top_p": sampling.top_p, "min_p": 0.0,
        "repeat_penalty": 1.0, "samplers": ["temperature", "top_p"], "cache_prompt": False, "return_tokens": True,
        "verbose": True, "stream": False,
    }  # fmt: skip
    return {"llama.cpp": partial(_ask, False, asked), "llama.cpp, n-grams": partial(_ask, True, asked)}


@cache
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def _ask(copies: bool, asked: dict[str, Any], number: int, prompt: list[int]) -> tuple[int, list[int]]:
    return _process().submit(_answer, copies, asked | {"prompt": prompt, "seed": number}).result(), []


@cache
def _server(copies: bool) -> Any:
    import xllamacpp as engine

    params = engine.CommonParams()
    params.model.path = str(fetched())
    params.n_ctx, params.n_parallel = CONTEXT, 1
    params.n_gpu_layers, params.cache_ram_mib, params.warmup, params.verbosity = 0, 0, False, -1
    for threads in (params.cpuparams, params.cpuparams_batch):
        threads.n_threads, threads.poll = THREADS, 0  # threads that poll would slow down others
    if copies:
        params.speculative.types = [engine.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
        params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = AGREEING, DRAFTED
    return engine.Server(params)


def _answer(copies: bool, request: dict[str, Any]) -> int:
    """How many tokens it generates."""
    made = _server(copies).handle_completions(request)
    answer = json.loads(made) if isinstance(made, str | bytes) else made
    return len(answer["__verbose"]["tokens"])
