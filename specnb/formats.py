"""Formats in which drafts are released: which one a folder holds, and its tensors.

Nothing in a folder is executed: tensors come from safetensors, or from a pickle that may hold
nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm.auto import tqdm

CONFIG = "config.json"
EAGLE3, SPECULATORS, MTP = (
    "an EAGLE-3 head of its authors", "an EAGLE-3 head of speculators", "a next-token layer of speculators",
)  # fmt: skip
READ = (EAGLE3, SPECULATORS, MTP)
EXTRACT = "next-token layers cut out of a checkpoint"
PICKLES = "pytorch_model*.bin"
NO_TENSORS = (RuntimeError, OSError, UnpicklingError, EOFError)  # of torch, for a file that is cut off or holds more
SECONDS = 1  # of reading, after which a bar is shown


def format_of(folder: Path, names: Collection[str]) -> str | None:
    """The format of the draft in `folder`, whose tensors have `names`; None for a model and for what is not known."""
    config = read_config(folder)
    kind = config.get("speculators_model_type")
    if kind is not None:
        return {"eagle3": SPECULATORS, "mtp": MTP}.get(kind, f"a {kind} draft of speculators")
    said = " ".join([*(config.get("architectures") or []), str(config.get("model_type")), *config]).lower()
    layers = [name for name in names if re.match(r"(model\.)?layers\.", name)]
    marks = {
        "a DSpark draft": "dspark" in said,
        "a DFlash draft": "dflash" in said or {"fc.weight", "hidden_norm.weight"} <= set(names),
        "Medusa heads": "medusa" in said or any(re.match(r"\d+\.\d+\.(linear\.)?weight", name) for name in names),
        EAGLE3: "draft_vocab_size" in config or any("midlayer." in name for name in names),
        EXTRACT: "nextn " in said or "model.layers.0.eh_proj.weight" in names,
        "an EAGLE-1 or EAGLE-2 head": "fc.weight" in names and bool(layers),
        "a draft head": any(word in said for word in ("eagle", "draftmodel")),
    }
    return next((name for name, found in marks.items() if found), None)


def draft_in(folder: Path) -> str | None:
    """The format of the draft in `folder`; None for a model and for what is not known."""
    return format_of(folder, _names(folder))


def require_no_draft(name: str | Path, folder: Path) -> None:
    """Raise `ValueError` for the folder of a draft."""
    found = draft_in(folder)
    if found in READ:
        raise ValueError(f"{str(name)!r} is no model but {found}: give it to load_drafter(target, {str(name)!r})")
    if found is not None:
        raise ValueError(f"{str(name)!r} is no model but {found}: {advice(found)}")


def advice(found: str) -> str:
    if found == EXTRACT:
        return "load the whole checkpoint as the target, and draft with load_drafter(target), without a source"
    return "load_drafter cannot read that; take an EAGLE-3 head that was released for the same target as its draft"


def read_config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / CONFIG).read_text(encoding="utf-8")))


def _names(folder: Path) -> set[str]:
    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with opened(file) as tensors:
            names.update(tensors.keys())
    if not names and (folder / "pytorch_model.bin").is_file():
        with suppress(*NO_TENSORS):  # transformers says what a model needs instead
            names.update(torch.load(folder / "pytorch_model.bin", map_location="meta", weights_only=True))
    return names


def opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise _unreadable(file) from error


def _unreadable(file: Path) -> ValueError:
    return ValueError(f"{file} is cut off, or holds something else than tensors: download it again")


def read_tensors(folder: Path) -> tuple[dict[str, Tensor], Path]:
    """The tensors in `folder`, and the file that errors name."""
    tensors: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob(PICKLES))
    if not files:
        raise ValueError(f"{folder} holds neither safetensors nor a pytorch_model.bin, so there is no draft to load")
    for file in files:
        if file.suffix == ".safetensors":
            with opened(file) as stored:
                names = tqdm(stored.keys(), desc=f"reading {file.name}", delay=SECONDS, leave=False)
                read = {name: stored.get_tensor(name) for name in names}
        else:
            try:
                read = torch.load(file, map_location="cpu", weights_only=True)
            except NO_TENSORS as error:
                raise _unreadable(file) from error
        if again := sorted(set(read) & set(tensors)):
            raise ValueError(f"{file} has {', '.join(again[:3])}, which another file has, too; keep one of them")
        tensors |= read
    return tensors, files[0]
