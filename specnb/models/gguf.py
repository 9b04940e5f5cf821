"""Models in GGUF files.

A GGUF file holds weights of 4 to 8 bits, the tokenizer and the chat template. It is converted once,
by transformers with the `gguf` package, to a folder of safetensors in the user's cache, which loads
like any other. What is decoded then is the dequantised model: these weights define its
distribution, whatever the arithmetic of other engines on the same file.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from specnb.models.checkpoints import require_complete, sha256_of
from specnb.number_checks import reason

ARCHITECTURES = ("LlamaForCausalLM", "Gemma3ForCausalLM")
NEEDED = ("gguf", "accelerate")


def cache_folder() -> Path:
    """Where converted models are kept: `$SPECNB_CACHE`, else `specnb` in the user's cache
    folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SPECNB_CACHE") or base / "specnb")


def converted(file: Path, sha256: str | None = None) -> Path:
    """The folder of safetensors that the GGUF `file` is converted to, in the user's cache; made
    once for each content.

    Raises `OSError` if the file cannot be read, its SHA-256 is not `sha256` or there is no room for
    what it becomes, `ValueError` if it lacks tensors or has another architecture than Llama's or
    Gemma 3's, `ImportError` without the packages that read GGUF files. Nothing half-written stays.

    >>> converted(Path("model.gguf"))
    Traceback (most recent call last):
    FileNotFoundError: there is no file 'model.gguf'; give the path of a GGUF file
    """
    if not file.is_file():
        raise FileNotFoundError(f"there is no file {str(file)!r}; give the path of a GGUF file")
    found = sha256_of(file)
    if sha256 and found != sha256:
        raise OSError(
            f"{str(file)!r} is not the file that was expected: its SHA-256 is {found}, not {sha256}; get it again"
        )
    folder = cache_folder() / found[:16]
    if folder.is_dir():
        return folder
    require_packages()
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        with quiet():
            _convert(file, partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process has just made the same
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def require_packages() -> None:
    """Raises `ImportError` without the packages that read GGUF files."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"reading a GGUF file needs {' and '.join(missing)}: pip install 'specnb[real]'")


def _convert(file: Path, folder: Path) -> None:
    """Dequantises `file` into `folder`, in float32: products of its scales and integers are not
    exact in 16 bits."""
    model, tokenizer = _read(file)
    # transformers saves no model that it takes for a quantised one; its weights in a plain model of
    # the same shape are.
    del model.config.quantization_config
    with torch.device("meta"):
        plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict(), assign=True)
    try:
        plain.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{str(file)!r} cannot be converted into {str(folder.parent)!r} ({reason(error)}); make room there, or set "
            "SPECNB_CACHE to another folder"
        ) from error


def _read(file: Path) -> tuple[Any, Any]:
    """The model and the tokenizer of a GGUF file."""
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    with _as_os_error(file):
        blocks = {name.split(".")[1] for name, *_ in GGUFReader(file).tensors if name.startswith("blk.")}
        config = AutoConfig.from_pretrained(**where)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, config.model_type)
    if architecture not in ARCHITECTURES:
        raise ValueError(
            f"{str(file)!r} holds a model of the kind {architecture}; only {', '.join(ARCHITECTURES)} are read"
        )
    with _as_os_error(file):
        loaded: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(**where)
    model, info = loaded
    # Of those beyond the header's number nothing is said.
    if len(blocks) != config.num_hidden_layers:
        raise ValueError(
            f"{str(file)!r} holds {len(blocks)} layers, and its header says {config.num_hidden_layers}; get it again"
        )
    require_complete(file, info)
    return model, tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars of transformers, and without its report on unsuitable tensors, which
    are errors here."""
    shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _as_os_error(file: Path) -> Iterator[None]:
    """Whatever the readers raise for bytes that are no GGUF file, or a part of one, is one
    `OSError`."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{str(file)!r} cannot be read as a GGUF file ({reason(error)}); get it again") from error
