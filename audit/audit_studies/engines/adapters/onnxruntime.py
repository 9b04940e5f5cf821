"""ONNX Runtime GenAI: a draft model, n-grams, or neither, one prompt a call, which is all that its
speculation takes.

Its own model builder converts the models; for that its environment has torch and transformers.
Completions end at the end token: the generator has no setting to go on after it, and an empty list
of end tokens in the configuration is not obeyed. The sequence is returned without that token, so it
is added here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from audit_studies.engines.adapters import Models
from specnb_audit.cli.settings import Request, Settings

PACKAGE = "onnxruntime-genai"
SUPPORTED = ("none", "draft", "lookup")
NGRAM = 3  # tokens of an n-gram: the last of them is the proposal
CONFIG = "genai_config.json"


def convert(model: Path, out: Path) -> Path:
    """Writes the model in folder `model` in float32 to folder `out` and returns it; an existing one
    is kept."""
    if not (out / "model.onnx").exists():
        options = {"-i": model, "-o": out, "-p": "fp32", "-e": "cpu", "-c": out / "cache"}
        words = [str(word) for option in options.items() for word in option]
        subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", *words], check=True)
    return out


def generate(models: Models, requests: Sequence[Request], settings: Settings) -> Iterator[list[int]]:
    """The tokens that continue the prompt of each request."""
    import numpy as np
    import onnxruntime_genai as genai

    folder = models.cache / "onnxruntime"
    convert(models.target, folder / "target")
    draft = settings.speculation == "draft"
    if draft:
        convert(models.require_draft(), folder / "draft")
    model = genai.Model(str(composite(folder, draft)))
    end = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["model"]["eos_token_id"]
    for request in requests:
        params = genai.GeneratorParams(model)
        params.set_search_options(**search_options(request, settings))
        if settings.speculation != "none":
            more = {"ngram_size": NGRAM} if settings.speculation == "lookup" else {}
            params.set_speculative_options(max_draft_tokens=settings.gamma, **more)
        generator = genai.Generator(model, params)
        generator.append_tokens(np.array([request.prompt], dtype=np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        made = [int(token) for token in generator.get_sequence(0)[len(request.prompt) :]]
        yield made if len(made) == settings.max_new_tokens else [*made, end]


def composite(folder: Path, draft: bool) -> Path:
    """Writes to `folder` a configuration of the model in its folder target, and of that in draft;
    returns `folder`.

    The release refuses paths with "..", so the configuration lies above the models.
    """
    config = json.loads((folder / "target" / CONFIG).read_text(encoding="utf-8"))
    model = config["model"]
    model["decoder"]["filename"] = "target/model.onnx"
    if draft:
        own = json.loads((folder / "draft" / CONFIG).read_text(encoding="utf-8"))["model"]["decoder"]
        model["draft"] = own | {"filename": "draft/model.onnx"}
    (folder / CONFIG).write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def search_options(request: Request, settings: Settings) -> dict[str, Any]:
    """The options of one generation; filters that are off are given as off, because top-k is 50 by
    default.

    >>> search_options(Request([0, 5], 7), Settings(temperature=0.7))["max_length"]
    66
    """
    options: dict[str, Any] = {"max_length": len(request.prompt) + settings.max_new_tokens, "repetition_penalty": 1.0}
    if settings.temperature == 0:
        return options | {"do_sample": False}
    options |= {"do_sample": True, "temperature": settings.temperature, "random_seed": request.seed}
    return options | {"top_k": settings.top_k, "top_p": settings.top_p}
