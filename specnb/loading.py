"""Load a model or a pair of models of transformers.

Weights are read from safetensors only, and code that comes with a checkpoint is never executed. In
float64 a Llama model computes in float64 from end to end: transformers computes its norms and
rotary angles in float32 even then, and a sum in another order, as on another processor, changes
logits by 1e-6. With these two steps in float64 it changes them by 1e-14, so every processor
generates the same sequences and prints the same digits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from specnb.fast import pack
from specnb.models.checkpoints import require_checksums, require_complete, require_safetensors
from specnb.models.gguf import converted, quiet
from specnb.number_checks import reason, shown
from specnb.support import DTYPES

_PACKAGE = Path(__file__).parents[1]


def shipped_folder(in_wheel: str, in_checkout: str) -> Path:
    """The folder of weights that come with this package: in an installed wheel, or in data/ of a
    checkout."""
    installed = _PACKAGE / in_wheel
    return installed if installed.is_dir() else _PACKAGE.parent / "data" / in_checkout


TRAINED_PAIR = shipped_folder("_pair", "pair")
"""The folder of the pair of models that this project trained: in an installed wheel, or in a
checkout."""

FASTEST, CANDIDATES = "fastest", (torch.float32, torch.bfloat16)
ROUNDS = 5  # of timing; the least time of each counts

TOKENIZER_FILES = ("*token*", "vocab.*", "*.model")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights


@dataclass(frozen=True)
class Pair:
    """A target, a draft model of the same tokens, and their tokenizer.

    >>> pair = load_pair()
    >>> pair.target.config.vocab_size == pair.draft.config.vocab_size == len(pair.tokenizer)
    True
    >>> pair.tokenizer.decode(pair.encode("def area(")[1:])
    'def area('
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def encode(self, text: str) -> list[int]:
        """The prompt of `text`: its tokens, after the begin-of-sequence token if the tokenizer has
        one."""
        begin, tokens = self.tokenizer.bos_token_id, self.tokenizer.encode(text, add_special_tokens=False)
        return ([] if begin is None else [begin]) + list(tokens)


def load_pair(
    target: str | Path = TRAINED_PAIR / "target",
    draft: str | Path | None = None,
    device: str = "cpu",
    dtype: torch.dtype | str = torch.float32,
    packed: bool = True,
) -> Pair:
    """The pair that this project trained, or any two models by folder or by name on the Hugging
    Face hub.

    Both need equal tokenizers, a folder without one takes the other's; embeddings may be padded to
    different sizes. `dtype` is one of `DTYPES`, or its name; or "fastest": float32 or bfloat16,
    whichever the target needs less time for a token in, on this machine. That takes some seconds
    and, meanwhile, the memory of both; `pair.target.dtype` says what was chosen.

    `packed` also keeps copies of weights in other layouts where these are faster on this machine,
    which is measured in a fraction of a second per model (`specnb.fast.pack`); the
    weights then take up to three times the memory. On other devices and in float64 it does nothing.
    In float32 the last bits of the logits depend on that measurement and on the number of rows; for
    results that must not, use float64, in which every processor generates the same sequences, or
    `packed=False`, the weights as saved.

    Raises `OSError` if there is no such model, its weights are not safetensors, there is no
    tokenizer, or a file of the trained pair is not the committed one; `ValueError` for a target
    without a draft, for a device that is not there and another dtype, if the tensors of a file are
    not those of the model, if a number in them or in the configuration is not finite, or if the
    tokenizers differ, with the first token that does.

    >>> pair = load_pair()  # doctest: +SKIP
    >>> pair.tokenizer.decode(pair.encode("To be"))  # doctest: +SKIP
    'To be'
    """
    folders = [_checked_folder(name) for name in (target, _draft_of(target) if draft is None else draft)]
    tokenizer = _tokenizer_of(*folders)
    first = _load_as(folders[0], device, dtype, packed)
    return Pair(first, _load(folders[1], device, first.dtype, packed), tokenizer)


def _draft_of(target: str | Path) -> Path:
    """The draft of the trained pair, for its own target only."""
    if Path(target).resolve().parent != TRAINED_PAIR.resolve():
        raise ValueError(
            f"load_pair({str(target)!r}) has no draft; give both, load_pair(target, draft), or load one model with "
            "load_model"
        )
    return TRAINED_PAIR / "draft"


def _tokenizer_of(target: Path, draft: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of both folders, or of the one that has any."""
    found = [_tokenizer(folder) for folder in (target, draft) if any(map(any, map(folder.glob, TOKENIZER_FILES)))]
    if not found:
        raise FileNotFoundError(
            f"neither {str(target)!r} nor {str(draft)!r} has a tokenizer; copy tokenizer.json and its "
            "configuration into the target's folder, or load each with load_model, which needs none"
        )
    if len(found) == 2:
        _require_same_tokens(*(tokenizer.get_vocab() for tokenizer in found))
    return found[0]


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many kinds, by the kind of tokenizer
        raise OSError(
            f"the tokenizer in {str(folder)!r} cannot be read ({reason(error)}); copy its files again"
        ) from error
    return found


def _require_same_tokens(target: dict[str, int], draft: dict[str, int]) -> None:
    """Raises `ValueError`, with the first token that has not the same number in both
    vocabularies."""
    differing = [(number, token) for token, number in target.items() ^ draft.items()]
    if differing:
        _, token = min(differing)
        numbers = [f"number {own[token]}" if token in own else "missing" for own in (target, draft)]
        raise ValueError(
            f"the tokenizers of target and draft differ in {len({token for _, token in differing}):,} tokens, first in "
            f"{token!r}: {numbers[0]} in the target's, {numbers[1]} in the draft's; choose a draft of the target's own "
            "family, or load both with load_model and give ModelDrafter(draft, ..., vocab=..., tokens=...)"
        )


def load_model(
    name: str | Path, device: str = "cpu", dtype: torch.dtype | str = torch.float32, packed: bool = True
) -> PreTrainedModel:
    """One model, by its folder or its name on the Hugging Face hub; arguments and errors as in
    `load_pair`.

    >>> load_model("gpt2", dtype=torch.float64)  # doctest: +SKIP
    """
    return _load_as(_checked_folder(name), device, dtype, packed)


def _load_as(folder: Path, device: str, dtype: Any, packed: bool) -> PreTrainedModel:
    """The model in `dtype`, or in the fastest of `CANDIDATES`."""
    if dtype != FASTEST:
        return _load(folder, device, dtype, packed)
    models = [_load(folder, device, candidate, packed) for candidate in CANDIDATES]
    seconds = [[seconds_of_a_token(model) for model in models] for _ in range(ROUNDS)]
    return models[int(np.min(seconds, axis=0).argmin())]


@torch.inference_mode()
def seconds_of_a_token(model: PreTrainedModel) -> float:
    """The time of a forward pass over one token, which reads every weight."""
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    began = time.perf_counter()
    model(token, use_cache=False).logits[0, 0, 0].item()  # waits for a device
    return time.perf_counter() - began


def _checked_folder(name: str | Path) -> Path:
    """The folder of the model `name`, after the checks of its files that need no model."""
    if Path(name).resolve().parent == TRAINED_PAIR.resolve():
        if not Path(name).is_dir():
            raise FileNotFoundError(
                f"the trained pair is not installed: there is no folder {str(name)!r}. Install specnb from its "
                "wheel, which contains the pair, or work in a checkout of the repository with data/pair; or give "
                "load_pair two folders, or two names on the Hugging Face hub"
            )
        require_checksums(Path(name))
    folder = folder_of(name)
    require_safetensors(folder)
    return folder


def folder_of(name: str | Path) -> Path:
    """The folder of the model `name`: that folder, or the local copy of the model of that name on
    the Hugging Face hub.

    A path ending in `.gguf` is converted (`specnb.models.gguf`).

    Raises `FileNotFoundError` if there is neither, and `NotADirectoryError` for a file.

    >>> folder_of(Path("."))
    PosixPath('.')
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        return converted(folder)
    if folder.exists():
        raise NotADirectoryError(f"{str(name)!r} is a file; give the folder that holds config.json and the weights")
    wanted = "give a folder with config.json and *.safetensors, or the name of a model on the Hugging Face hub"
    if isinstance(name, Path):
        raise FileNotFoundError(f"there is no folder {str(name)!r}; {wanted} as a str")
    try:
        return Path(snapshot_download(name, allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))
    except HFValidationError as error:
        raise FileNotFoundError(f"there is no folder {str(name)!r}, and the hub has no such names; {wanted}") from error
    except OSError as error:
        raise FileNotFoundError(
            f"there is no folder {str(name)!r}, and no model of that name came from the hub ({reason(error)}); {wanted}"
        ) from error


def _dtype(dtype: Any) -> torch.dtype:
    named = {str(one).removeprefix("torch."): one for one in DTYPES}
    found = named.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in DTYPES:
        raise ValueError(
            f'dtype is {shown(dtype)}; it must be one of {", ".join(named)}, or its torch.dtype, or "fastest"'
        )
    return found


def _require_device(device: Any) -> None:
    try:
        torch.empty(0, device=device)
    except Exception as error:  # of many kinds, by the kind of device
        raise ValueError(f"device is {device!r}, which torch cannot use here; give 'cpu', for example") from error


def _load(folder: Path, device: str, dtype: torch.dtype | str, packed: bool) -> PreTrainedModel:
    dtype = _dtype(dtype)
    _require_device(device)
    try:
        with quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, trust_remote_code=False,
                ignore_mismatched_sizes=True, output_loading_info=True,
            )  # fmt: skip
    except SafetensorError as error:
        raise OSError(f"the weights in {str(folder)!r} cannot be read ({error}); get the files again") from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise ValueError(f"{str(folder)!r} comes with code of its own, which is never executed here") from None
        if "Unrecognized configuration class" not in str(error):
            raise
        raise ValueError(
            f"the model in {str(folder)!r} is no decoder of tokens; only models without an encoder are decoded"
        ) from None
    model, info = loaded
    require_complete(folder, info)
    _require_finite(folder, model)
    if dtype == torch.float64:
        in_double(model)
    finished: PreTrainedModel = model.to(torch.device(device)).eval()
    return pack(finished) if packed else finished


def _require_finite(folder: Path, model: PreTrainedModel) -> None:
    """Raises `ValueError` for weights, or frequencies of rotary positions, that are NaN or
    infinite.

    The logits may be finite in spite of them: torch's attention takes scores of NaN for masked ones
    and returns zeros.
    """
    weights = dict(model.named_parameters())
    frequencies = {name: values for name, values in model.named_buffers() if name.endswith("inv_freq")}
    for tensors, where in ((frequencies, "config.json (its rope_parameters)"), (weights, "weights")):
        for name, values in tensors.items():
            if values.dtype in DTYPES and values.numel() and not bool(torch.stack(values.aminmax()).isfinite().all()):
                raise ValueError(
                    f"the model in {str(folder)!r} has a number in {name} that is NaN or infinite; "
                    f"the {where} must be corrected, or copied again"
                )


class DoubleRotary(LlamaRotaryEmbedding):
    """Cosines and sines of the angles `position * inv_freq`, computed in float64."""

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Both `(batch, n, head_dim)` for `position_ids` `(batch, n)`, with the device and dtype of
        `x`.

        A copy of the model may have been converted to another dtype since.
        """
        angles = position_ids[..., None].double() * self.inv_freq.to(x.device, torch.float64)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def in_double(model: PreTrainedModel) -> None:
    """Replaces, in place, the modules of a float64 Llama model that compute in float32.

    Other models, and rotary embeddings of another type than "default", are not changed.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, device="meta")
                norm.weight = child.weight
                setattr(parent, name, norm.train(child.training))
            elif isinstance(child, LlamaRotaryEmbedding) and child.rope_type == "default":
                setattr(parent, name, DoubleRotary(child.config).to(child.inv_freq.device))
