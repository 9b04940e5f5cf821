"""Load a model or a pair of models of transformers, from safetensors and without executing a checkpoint's code.

transformers computes norms and rotary angles of a float64 Llama model in float32, which changes
logits by 1e-6 on another processor. Here they are computed in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding
from transformers.utils import logging

from specnb.formats import require_no_draft
from specnb.support import DTYPES

_INSTALLED, _CHECKOUT = Path(__file__).parent / "_pair", Path(__file__).parents[1] / "data" / "pair"
# The pair that this project trained: in an installed wheel, or in a checkout
TRAINED_PAIR = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT

HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights
# Of attention and experts, that transformers has itself; others are names of repositories, or need packages
IMPLEMENTATIONS = {"eager", "sdpa", "grouped_mm", "batched_mm"}


@dataclass(frozen=True, repr=False)
class Pair:
    """A target, a draft model of the same tokens, and their tokenizer.

    Examples
    --------
    >>> pair = load_pair()
    >>> pair
    target: LlamaForCausalLM, 7,870,656 weights, torch.float32 on cpu
    draft: LlamaForCausalLM, 786,816 weights, torch.float32 on cpu
    >>> pair.tokenizer.decode(pair.encode("def area("))
    '<|endoftext|>def area('
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def __repr__(self) -> str:
        return "\n".join(
            f"{name}: {type(model).__name__}, {model.num_parameters():,} weights, {model.dtype} on {model.device}"
            for name, model in (("target", self.target), ("draft", self.draft))
        )

    def encode(self, text: str) -> list[int]:
        return encoded(self.tokenizer, text)


def encoded(tokenizer: Any, text: str) -> list[int]:
    """The tokens of `text`, with the begin token once if the tokenizer adds one."""
    begin: Any = getattr(tokenizer, "bos_token", None)
    twice = bool(begin) and text.startswith(begin)
    return list(tokenizer(text, add_special_tokens=not twice)["input_ids"])


def load_pair(
    target: str | Path = TRAINED_PAIR / "target",
    draft: str | Path | None = None,
    device: str = "cpu",
    dtype: torch.dtype | str = torch.float32,
) -> Pair:
    """The pair that this project trained, or any two models, and their tokenizer.

    Parameters
    ----------
    target, draft
        Folders, or names on the Hugging Face hub. Another target than the trained one needs a draft.

    Raises
    ------
    OSError, ValueError
        For tokenizers that differ or cannot be read, and as `load_model`.

    Examples
    --------
    >>> load_pair(dtype=torch.float64).draft.dtype
    torch.float64
    """
    if draft is None:
        if Path(target) != TRAINED_PAIR / "target":
            raise TypeError(f"there is no draft for {str(target)!r}; give one, or load_model(target) alone")
        draft = TRAINED_PAIR / "draft"
    folders = [folder_of(target), folder_of(draft)]
    tokenizers = [_tokenizer(folder) for folder in folders]
    differing = {token for token, _ in tokenizers[0].get_vocab().items() ^ tokenizers[1].get_vocab().items()}
    if differing:
        raise ValueError(
            f"the tokenizers of {str(target)!r} and {str(draft)!r} differ in {len(differing):,} tokens, such as "
            f"{min(differing)!r}; choose a draft of the target's own family"
        )
    return Pair(load_model(folders[0], device, dtype), load_model(folders[1], device, dtype), tokenizers[0])


def folder_of(name: str | Path, files: list[str] = HUB_FILES) -> Path:
    if str(name) and Path(name).is_dir():
        return Path(name)
    if isinstance(name, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).is_file():
        raise FileNotFoundError(f"{str(name)!r} is no folder here; give one, or a name on the Hugging Face hub")
    try:
        # Here, because transformers would look for a conversion by others where a model has no safetensors.
        return Path(snapshot_download(str(name), allow_patterns=files, ignore_patterns=HUB_IGNORED))
    except (OSError, ValueError) as error:
        raise OSError(
            f"{str(name)!r} is no folder here, and was not fetched from the Hugging Face hub: {_one_line(error)}"
        ) from error


def _tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise OSError(
            f"{str(folder)!r} has no tokenizer that can be read; put tokenizer.json there, or load the models with "
            f"load_model and give Sampler a tokenizer ({_one_line(error)})"
        ) from error


def _require_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        found = torch.accelerator.current_accelerator()
        usable = '"cpu"' if found is None else f'"cpu" or "{found.type}"'
        raise ValueError(f"device is {device!r}; torch can use {usable} here ({_one_line(error)})") from error


def _require_dtype(dtype: torch.dtype | str) -> None:
    if dtype != "auto" and (getattr(torch, dtype, None) if isinstance(dtype, str) else dtype) not in DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise ValueError(f"dtype is {dtype!r}; it must be one of {names}, or auto, the one of the file")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def load_model(name: str | Path, device: str = "cpu", dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
    """One model, by its folder or its name on the Hugging Face hub, as transformers makes it.

    Raises
    ------
    OSError
        If there is no such folder or model.
    ValueError
        For a dtype or device that is not there; for a draft, which `load_drafter` takes; for a file that is
        cut off; for tensors that are missing, unknown or not finite; for an adapter without peft; for a
        configuration that names attention or experts of another package.

    Examples
    --------
    >>> load_model(TRAINED_PAIR / "draft").num_parameters()
    786816
    """
    _require_dtype(dtype)
    _require_device(device)
    folder = folder_of(name)
    require_no_draft(name, folder)
    config = PreTrainedConfig.get_config_dict(folder)[0]
    if others := sorted(set(_implementations(config)) - IMPLEMENTATIONS):
        raise ValueError(
            f"the configuration of {str(name)!r} names {', '.join(others)}, which transformers may fetch and execute; "
            "take attn_implementation and experts_implementation out of its config.json"
        )
    if (folder / "adapter_config.json").is_file() and find_spec("peft") is None:
        raise ValueError(f"{str(name)!r} has an adapter, which transformers leaves out without peft; merge it first")
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    finally:
        if bar:
            logging.enable_progress_bar()
    model, info = loaded
    for key, what in (("missing_keys", "missing in the file"), ("unexpected_keys", "unknown to the model")):
        if info[key]:
            raise ValueError(
                f"the weights in {str(name)!r} are not those of the model that its configuration describes: "
                f"{len(info[key])} {what}: {', '.join(sorted(info[key])[:5])}"
            )
    require_finite(name, model)
    if model.dtype == torch.float64:
        in_double(model)
    return model.to(torch.device(device))  # type: ignore[no-any-return]


def _implementations(entries: dict[str, Any], named: bool = False) -> Iterator[str]:
    """The implementations of attention and experts that a configuration, or a part of it, names."""
    for key, value in entries.items():
        if isinstance(value, dict):
            yield from _implementations(value, named or key.endswith("_implementation"))
        elif value is not None and (named or key.endswith("_implementation")):
            yield str(value)


def require_finite(name: str | Path, model: nn.Module) -> None:
    """Raise `ValueError` for weights or rotary frequencies that are not finite; the logits may hide them."""
    frequencies = [(key, values) for key, values in model.named_buffers() if key.endswith("inv_freq")]
    for key, values in [*model.named_parameters(), *frequencies]:
        if values.dtype in DTYPES and values.numel() and not bool(torch.stack(values.aminmax()).isfinite().all()):
            raise ValueError(f"{str(name)!r} has a number in {key} that is NaN or infinite")


STATIC = ("default", "linear", "llama3", "yarn")  # rotary embeddings whose frequencies do not depend on the lengths


class DoubleRotary(LlamaRotaryEmbedding):
    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # In double here, because a copy of the model may have been converted to another dtype since.
        angles = position_ids[..., None].double() * self.inv_freq.to(x.device, torch.float64)
        angles = torch.cat((angles, angles), dim=-1)
        cosines, sines = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cosines.to(x.dtype), sines.to(x.dtype)


def in_double(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm | Qwen3RMSNorm):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, device="meta")
                norm.weight = child.weight
                setattr(parent, name, norm.train(child.training))
            elif isinstance(child, LlamaRotaryEmbedding | Qwen3RotaryEmbedding) and child.rope_type in STATIC:
                config: Any = child.config
                setattr(parent, name, DoubleRotary(config).to(child.inv_freq.device))
