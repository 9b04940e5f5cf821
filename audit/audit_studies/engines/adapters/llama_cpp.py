"""llama.cpp: its own server in this process, through the package xllamacpp, with a draft model,
n-grams, or neither.

Requests name the filters in llama.cpp's own order, the temperature last (`llama.cpp` in
`ENGINE_ORDERS` of `specnb_audit.setting_names`). In the order of transformers, temperature first,
top-p keeps other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from audit_studies.engines.adapters import Models
from audit_studies.engines.adapters.gguf import write_gguf
from specnb_audit.cli.settings import Request, Settings

PACKAGE = "xllamacpp"
SUPPORTED = ("none", "draft", "probabilistic", "lookup")
BATCH = 8
CONTEXT = 256  # tokens of a row: prompt and completion
FILTERS = ("top_k", "top_p", "temperature")


def convert(model: Path, out: Path) -> Path:
    """Writes the model in folder `model` as the float32 GGUF file `out` and returns it; an existing
    one is kept."""
    return out if out.exists() else write_gguf(model, out, "f32")


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """The tokens that continue the prompt of each request; requests run side by side in the
    server's slots."""
    target = convert(models.target, models.cache / "llama_cpp" / "target.gguf")
    drafts = settings.speculation in ("draft", "probabilistic")
    draft = convert(models.require_draft(), models.cache / "llama_cpp" / "draft.gguf") if drafts else None
    server = _server(models, settings, target, draft)
    with ThreadPoolExecutor(BATCH) as pool:
        for answer in pool.map(lambda one: _answer(server, _request(one, settings)), requests):
            yield answer["__verbose"]["tokens"]


def default_dtype(_target: str) -> str:
    """The name of the dtype of attention and of the key-value cache unless llama.cpp is told one;
    weights keep that of their file, which is float32 here."""
    return "float16"


def _server(models: Models, settings: Settings, target: Path, draft: Path | None) -> Any:
    import xllamacpp as engine

    params = engine.CommonParams()
    params.model.path = str(target)
    params.n_ctx, params.n_parallel = CONTEXT * BATCH, BATCH
    params.n_gpu_layers, params.cache_ram_mib, params.warmup, params.verbosity = 0, 0, False, -1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    if settings.dtype == "float32":  # flash attention computes with float16
        params.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.cache_type_k = params.cache_type_v = engine.ggml_type.GGML_TYPE_F32
    kinds = engine.common_speculative_type
    if draft is not None:
        speculation = params.speculative.draft
        speculation.mparams.path = str(draft)
        speculation.n_max, speculation.n_min, speculation.p_min = settings.gamma, 0, 0.0
        speculation.probabilistic = settings.speculation == "probabilistic"
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    elif settings.speculation == "lookup":
        params.speculative.types = [kinds.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
    return engine.Server(params)


def _request(request: Request, settings: Settings) -> dict[str, Any]:
    return {
        "prompt": request.prompt,
        "seed": request.seed,
        "n_predict": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "samplers": list(FILTERS),
        "ignore_eos": False,  # true would take the end token out of the distribution
        "cache_prompt": False,
        "return_tokens": True,
        "verbose": True,
        "stream": False,
    }


def _answer(server: Any, request: dict[str, Any]) -> dict[str, Any]:
    made = server.handle_completions(request)
    answer: dict[str, Any] = json.loads(made) if isinstance(made, str | bytes) else made
    if "error" in answer:
        raise ValueError(f"llama.cpp refused the request: {answer['error']}")
    return answer
