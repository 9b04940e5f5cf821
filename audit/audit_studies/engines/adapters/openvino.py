"""OpenVINO GenAI: continuous batching with a draft model, prompt lookup, or neither.

The models are converted through a GGUF file, which OpenVINO GenAI reads itself, so that neither
torch nor optimum is needed; a draft model cannot be given as GGUF, so the converted model is stored
and both are loaded from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from audit_studies.engines.adapters import Models, batches
from audit_studies.engines.adapters.gguf import write_gguf
from specnb_audit.cli.settings import Request, Settings

PACKAGE = "openvino-genai"
SUPPORTED = ("none", "draft", "lookup")
BATCH = 16
NGRAM = 3  # longest n-gram that prompt lookup compares
# With one thread; in bfloat16, release 2026.4.1 dies of a division by zero with one thread.
FLOAT32: dict[str, Any] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0",
}


def convert(model: Path, out: Path) -> Path:
    """Writes the model in folder `model` as OpenVINO IR to folder `out` and returns it; an existing
    one is kept."""
    import openvino_genai

    if not (out / "openvino_model.bin").exists():
        file = write_gguf(model, out / "model.gguf", "f16")
        openvino_genai.LLMPipeline(str(file), "CPU", enable_save_ov_model=True)
        file.unlink()
    for name in ("config.json", "generation_config.json"):
        shutil.copy(model / name, out / name)
    return out


def default_dtype(_target: str) -> str:
    """The name of the dtype that OpenVINO computes in on this processor unless it is told one; no
    model changes it.

    The key-value cache has a precision of its own, in `KV_CACHE_PRECISION`, which may have fewer
    bits.
    """
    import openvino

    name = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
    return {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[name]


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """The tokens that continue the prompt of each request. Rows of a batch have seeds of their
    own."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": 1} | FLOAT32 if settings.dtype == "float32" else {}
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.max_num_seqs = 1, BATCH  # gigabytes, rows
    speculation: dict[str, Any] = {}
    if settings.speculation == "draft":
        draft = convert(models.require_draft(), models.cache / "openvino" / "draft")
        speculation["draft_model"] = genai.draft_model(str(draft), "CPU", **properties)
    elif settings.speculation == "lookup":
        speculation["prompt_lookup"] = True
    target = convert(models.target, models.cache / "openvino" / "target")
    pipeline = genai.ContinuousBatchingPipeline(
        str(target), scheduler_config=scheduler, device="CPU", properties=properties | speculation
    )
    for group in batches(requests, BATCH):
        made = pipeline.generate(
            [openvino.Tensor(np.array([one.prompt], dtype=np.int64)) for one in group],
            [_config(genai, settings, one.seed) for one in group],
        )
        for one in made:
            yield list(one.m_generation_ids[0])


def _config(genai: Any, settings: Settings, seed: int) -> Any:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.apply_chat_template = settings.max_new_tokens, True, False
    config.do_sample = settings.temperature > 0
    if config.do_sample:
        config.temperature, config.top_p, config.rng_seed = settings.temperature, settings.top_p, seed
        if settings.top_k:
            config.top_k = settings.top_k
    if settings.speculation != "none":
        config.num_assistant_tokens = settings.gamma
    if settings.speculation == "lookup":
        config.max_ngram_size = NGRAM
    return config
