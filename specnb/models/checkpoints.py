"""The checks of a model's files before and after they are read.

Weights are read from safetensors only: the other formats are pickles, which can execute any code
when they are opened. This module does not use transformers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CHECKSUMS = "SHA256SUMS"  # the file of a folder's checksums, as `sha256sum -c` reads it
SHARD = re.compile(r"[^/\\]+\.safetensors")


def require_safetensors(folder: Path) -> None:
    """Raises `OSError` unless `folder` has a configuration and only safetensors would be loaded
    from it."""
    config = folder / "config.json"
    if not config.is_file():
        raise FileNotFoundError(f"{str(folder)!r} has no config.json; give the folder that a model was saved to")
    if (folder / "adapter_config.json").is_file():
        raise OSError(f"{str(folder)!r} holds an adapter (adapter_config.json); merge it into its model and save that")
    chosen = _read_json(config).get("transformers_weights")
    if chosen is not None and not re.fullmatch(SHARD.pattern + r"(\.index\.json)?", str(chosen)):
        raise OSError(f"{str(config)!r} names the weights {chosen!r}; only safetensors are loaded")
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if not indices and not any(folder.glob("*.safetensors")):
        pickles = sorted(file.name for file in folder.glob("*.bin"))
        advice = "save the model with save_pretrained"
        if pickles:
            advice = f"{pickles[0]} can execute code; if you trust it, load it with transformers and {advice}"
        raise FileNotFoundError(f"{str(folder)!r} has no model.safetensors; only safetensors are loaded: {advice}")
    for index in indices:
        _require_shards(index)


def _require_shards(index: Path) -> None:
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict):
        raise OSError(f"{str(index)!r} has no weight_map; save the model again with save_pretrained")
    for shard in sorted(set(map(str, shards.values()))):
        if not SHARD.fullmatch(shard):
            raise OSError(f"{str(index)!r} names {shard!r}; only safetensors beside it are loaded: convert the weights")
        if not (index.parent / shard).is_file():
            raise FileNotFoundError(f"{str(index)!r} names {shard!r}, which is not there; copy it beside the index")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OSError(f"{str(file)!r} is not JSON: {error}") from error
    if not isinstance(read, dict):
        raise OSError(f"{str(file)!r} must hold a JSON object and holds a {type(read).__name__}")
    return read


def require_complete(folder: Path, info: Mapping[str, Iterable[Any]]) -> None:
    """Raises `ValueError` unless the file's tensors are those of the model, by the loading `info`
    of transformers.

    Tied tensors, such as a tied output layer, may be missing in the file.

    >>> require_complete(Path("model"), {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": []})
    """
    sizes = [f"{name} ({[*own]} in the file, {[*its]} in the model)" for name, own, its in info["mismatched_keys"]]
    found = {"missing in the file": info["missing_keys"], "unknown to the model": info["unexpected_keys"]}
    wrong = [
        f"{len([*names])} {what}: {', '.join(sorted(names)[:5])}"
        for what, names in (found | {"of another size": sizes}).items()
        if names
    ]
    if wrong:
        raise ValueError(
            f"the weights in {str(folder)!r} are not those of the model that its configuration describes: "
            f"{'; '.join(wrong)}. Get both from the same source, or save the model again with save_pretrained"
        )


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def write_checksums(folder: Path) -> None:
    """Writes the SHA-256 of every file in `folder` to `folder`/`CHECKSUMS`, sorted by name."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and file.name != CHECKSUMS)
    lines = [f"{sha256_of(file)}  {file.name}\n" for file in files]
    (folder / CHECKSUMS).write_text("".join(lines), encoding="utf-8")


def require_checksums(folder: Path) -> None:
    """Raises `OSError` unless every file that `folder`/`CHECKSUMS` names exists and is
    unchanged."""
    remedy = "restore it, for example with git checkout, or train the pair again (make models)"
    checksums = folder / CHECKSUMS
    if not checksums.is_file():
        raise FileNotFoundError(f"{str(checksums)!r} is missing; {remedy}")
    for line in checksums.read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        file = folder / name
        if not file.is_file():
            raise FileNotFoundError(f"{str(file)!r} is missing; {remedy}")
        if sha256_of(file) != digest:
            raise OSError(
                f"{str(file)!r} is not the one that was committed (its SHA-256 differs from {CHECKSUMS}); {remedy}"
            )
