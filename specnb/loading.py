"""Load a model or a pair of models of transformers, from safetensors and without executing a checkpoint's code.

transformers computes norms and rotary angles of a float64 Llama model in float32, which changes
logits by 1e-6 on another processor. Here they are computed in float64, so every processor generates
the same sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.utils import logging

from specnb.support import DTYPES

_INSTALLED, _CHECKOUT = Path(__file__).parent / "_pair", Path(__file__).parents[1] / "data" / "pair"
# The pair that this project trained: in an installed wheel, or in a checkout
TRAINED_PAIR = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT

TOKENIZER_FILES = ("*token*", "vocab.*", "*.model")
HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
HUB_IGNORED = ["*/*", "consolidated*"]  # other formats of the same weights


@dataclass(frozen=True)
class Pair:
    """A target, a draft model of the same tokens, and their tokenizer.

    Examples
    --------
    >>> pair = load_pair()
    >>> pair.tokenizer.decode(pair.encode("def area("))
    '<|endoftext|>def area('
    """

    target: PreTrainedModel
    draft: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

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
        Folders, or names on the Hugging Face hub. Their tokenizers must be equal; a folder without
        one takes the other's.

    Raises
    ------
    ValueError
        For a target without a draft, for tokenizers that differ, and as `load_model`.

    Examples
    --------
    >>> load_pair(dtype=torch.float64).draft.dtype
    torch.float64
    """
    if draft is None and Path(target).resolve() != (TRAINED_PAIR / "target").resolve():
        raise ValueError(
            f"load_pair({str(target)!r}) has no draft; give both, load_pair(target, draft), or load one model with "
            "load_model"
        )
    folders = [_folder(name) for name in (target, draft or TRAINED_PAIR / "draft")]
    tokenizer = _tokenizer_of(*folders)
    return Pair(load_model(folders[0], device, dtype), load_model(folders[1], device, dtype), tokenizer)


def _folder(name: str | Path) -> Path:
    if Path(name).is_dir():
        return Path(name)
    return Path(snapshot_download(str(name), allow_patterns=HUB_FILES, ignore_patterns=HUB_IGNORED))


def _tokenizer_of(target: Path, draft: Path) -> PreTrainedTokenizerBase:
    having = [folder for folder in (target, draft) if any(map(any, map(folder.glob, TOKENIZER_FILES)))]
    if not having:
        raise FileNotFoundError(
            f"neither {str(target)!r} nor {str(draft)!r} has a tokenizer; copy tokenizer.json and its "
            "configuration into the target's folder, or load each with load_model, which needs none"
        )
    tokenizers = [AutoTokenizer.from_pretrained(folder, trust_remote_code=False) for folder in having]
    _require_same_tokens(*(tokenizers[at].get_vocab() for at in (0, -1)))
    return tokenizers[0]


def _require_same_tokens(target: dict[str, int], draft: dict[str, int]) -> None:
    differing = sorted((number, token) for token, number in target.items() ^ draft.items())
    if differing:
        token = differing[0][1]
        numbers = [f"number {vocab[token]}" if token in vocab else "missing" for vocab in (target, draft)]
        raise ValueError(
            f"the tokenizers of target and draft differ in {len({token for _, token in differing}):,} tokens, first in "
            f"{token!r}: {numbers[0]} in the target's, {numbers[1]} in the draft's; choose a draft of the target's own "
            "family, or load both with load_model and give ModelDrafter(draft, ..., vocab=..., tokens=...)"
        )


def load_model(name: str | Path, device: str = "cpu", dtype: torch.dtype | str = torch.float32) -> PreTrainedModel:
    """One model, by its folder or its name on the Hugging Face hub, as transformers makes it.

    Raises
    ------
    ValueError
        If the folder holds a draft head, a tensor of the model is missing in the file, the file has
        one that the model does not know (but those of layers that predict further tokens, such as
        `model.layers.46.eh_proj`), or a number in the weights is not finite.

    Examples
    --------
    >>> load_model("gpt2", dtype=torch.float64)  # doctest: +SKIP
    """
    folder = _folder(name)
    if head := _draft_head(folder):
        raise ValueError(
            f"{str(name)!r} is {head}: it drafts from a target's hidden states and gives no distributions by itself"
        )
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
    info["unexpected_keys"] = _without_next_token_layers(info["unexpected_keys"])
    for key, what in (("missing_keys", "missing in the file"), ("unexpected_keys", "unknown to the model")):
        if info[key]:
            raise ValueError(
                f"the weights in {str(name)!r} are not those of the model that its configuration describes: "
                f"{len(info[key])} {what}: {', '.join(sorted(info[key])[:5])}"
            )
    _require_finite(name, model)
    if model.dtype == torch.float64:
        in_double(model)
    return model.to(torch.device(device))  # type: ignore[no-any-return]


def _draft_head(folder: Path) -> str:
    """What kind of draft head a folder holds, by its configuration; empty for a model."""
    config = PreTrainedConfig.get_config_dict(folder)[0]
    architectures = " ".join(config.get("architectures") or ())
    if kind := config.get("speculators_model_type"):
        return f"a draft head in the format of vLLM's speculators ({kind})"
    if "dflash_config" in config or "DFlash" in architectures:
        return "a DFlash drafter"
    return f"an EAGLE{'-3' * ('Eagle3' in architectures)} head" if "Eagle" in architectures else ""


def _without_next_token_layers(unknown: Iterable[str]) -> list[str]:
    """The tensors `unknown` to the model but those of layers behind its last that predict further
    tokens: `eh_proj` is theirs alone, so that a layer of the model itself is never left out.

    >>> _without_next_token_layers(["model.layers.4.eh_proj.weight", "model.layers.4.enorm.weight", "model.layers.5.a"])
    ['model.layers.5.a']
    """
    layers = tuple(key.removesuffix("eh_proj.weight") for key in unknown if key.endswith(".eh_proj.weight"))
    return [key for key in unknown if not key.startswith(layers)]


def _require_finite(name: str | Path, model: PreTrainedModel) -> None:
    """Raise `ValueError` for weights or rotary frequencies that are not finite; the logits may hide them."""
    frequencies = [(key, values) for key, values in model.named_buffers() if key.endswith("inv_freq")]
    for key, values in [*model.named_parameters(), *frequencies]:
        if values.dtype in DTYPES and values.numel() and not bool(torch.stack(values.aminmax()).isfinite().all()):
            raise ValueError(f"the model in {str(name)!r} has a number in {key} that is NaN or infinite")


class DoubleRotary(LlamaRotaryEmbedding):
    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        # In double here, because a copy of the model may have been converted to another dtype since.
        angles = position_ids[..., None].double() * self.inv_freq.to(x.device, torch.float64)
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def in_double(model: PreTrainedModel) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, LlamaRMSNorm):
                norm = nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon, device="meta")
                norm.weight = child.weight
                setattr(parent, name, norm.train(child.training))
            elif isinstance(child, LlamaRotaryEmbedding) and child.rope_type == "default":
                setattr(parent, name, DoubleRotary(child.config).to(child.inv_freq.device))
