"""Load the drafter that was released for a target: an EAGLE-3 head or next-token layers.

The formats were read in SafeAILab/EAGLE and in vllm-project/speculators 0.9.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel

from specnb.distributions import Sampling
from specnb.fast import Compile
from specnb.formats import CONFIG, MTP, PICKLES, READ, advice, format_of, read_config, read_tensors
from specnb.heads import PARTS, AttentionDrafter, Eagle3Head, NextTokenHead, NextTokenLayers
from specnb.loading import HUB_FILES, Pair, folder_of, in_double, require_finite
from specnb.support import require_supported, vocabulary


def load_drafter(
    target: PreTrainedModel | Pair,
    source: str | Path | None = None,
    sampling: Sampling = Sampling(),
    *,
    compile: Compile = False,
    capturable: bool = False,
    most: int | None = None,
) -> AttentionDrafter:
    """The drafter that was released for `target`: an EAGLE-3 head, or next-token layers.

    Parameters
    ----------
    source
        A folder, or a name on the Hugging Face hub, with a head of EAGLE-3's authors or of
        `speculators`; None for the next-token layers in the target's checkpoint (DeepSeek-V3, GLM-4 MoE
        and others that transformers knows).
    compile
        On a CPU weights are packed unless it is False; layers of a head are not compiled.
    capturable
        As for `ModelDrafter`.
    most
        Draft tokens of a step, at most.

    Raises
    ------
    OSError, ValueError
        For a folder without config.json, another format, a head of another target, and tensors that are not
        those of the format, or not finite.

    Examples
    --------
    >>> target = specnb.load_model("meta-llama/Llama-3.1-8B-Instruct", dtype="bfloat16")  # doctest: +SKIP
    >>> drafter = specnb.load_drafter(target, "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B")  # doctest: +SKIP
    """
    target = target.target if isinstance(target, Pair) else target
    require_supported(target)
    if source is None:
        head = next_token_layers(target)
    else:
        folder = folder_of(source)
        if not any(folder.glob("*.safetensors")):
            folder = folder_of(source, [*HUB_FILES, PICKLES])
        head = read_head(source, folder, target)
    require_finite(str(source or target.config.name_or_path), head)
    if target.dtype == torch.float64:
        in_double(head)
    return AttentionDrafter(target, head, sampling, compile=compile, capturable=capturable, most=most)


def read_head(source: str | Path, folder: Path, target: PreTrainedModel) -> Any:
    """The head in `folder`, in the target's dtype and on its device."""
    tensors, file = read_tensors(folder)
    found = format_of(folder, tensors)
    if found is None:
        raise ValueError(f"{str(source)!r} holds no draft of a known format; a model drafts as draft=load_model(...)")
    if found not in READ:
        raise ValueError(f"{str(source)!r} holds {found}: {advice(found)}")
    config = read_config(folder)
    require_verifier(source, config, target)
    # Old files have the frequencies of positions, and speculators may save parts of the target.
    weights = {
        name.removeprefix("model.").replace("midlayer.", "layers.0."): one for name, one in tensors.items()
        if not re.search(r"rotary_emb\.inv_freq$|^verifier_", name)
        and not (found == MTP and name in ("embed_tokens.weight", "lm_head.weight"))
    }  # fmt: skip
    with torch.device("meta"):
        head: Any = NextTokenHead(layer_config(config)) if found == MTP else eagle3_head(config, weights, target, file)
    wanted = {name: tuple(one.shape) for name, one in head.state_dict().items()}
    if "d2t" in wanted:
        weights["t2d"] = require_map(weights["d2t"], weights.get("t2d"), vocabulary(target), file)
    wrong = [f"{name} is missing" for name in sorted(wanted.keys() - weights.keys())]
    for name, one in sorted(weights.items()):
        if tuple(one.shape) != wanted.get(name):
            wrong.append(f"{name} has shape {tuple(one.shape)} for {wanted.get(name, 'none: it is unknown')}")
    if wrong:
        raise ValueError(f"{file} is not {found} as its {CONFIG} describes it: {', '.join(wrong[:5])}")
    floating = {name: one.to(target.dtype) for name, one in weights.items() if one.is_floating_point()}
    head.load_state_dict(weights | floating, assign=True)
    return head.to(target.device).requires_grad_(False).eval()


def layer_config(config: Mapping[str, Any]) -> PreTrainedConfig:
    """The configuration of the head's layers; that of EAGLE-3's authors is the one of a Llama."""
    inner = dict(config.get("transformer_layer_config") or {**config, "model_type": "llama", "num_hidden_layers": 1})
    kind = inner.pop("model_type", "llama")
    if kind not in PARTS:
        raise ValueError(f"the head has layers of a {kind!r} model; known are those of {' and '.join(PARTS)}")
    made: PreTrainedConfig = AutoConfig.for_model(kind, **inner)
    rope = made.rope_parameters or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        raise ValueError(f"the head has {rope['rope_type']} positions, which depend on the longest row of a batch")
    if "sliding_attention" in (getattr(made, "layer_types", None) or ()):
        raise ValueError("the head has a layer with a sliding window, which load_drafter does not run")
    return made


def require_verifier(source: str | Path, config: Mapping[str, Any], target: PreTrainedModel) -> None:
    """Raise `ValueError` if the head was made for other models, or for states of another width."""
    verifier = (config.get("speculators_config") or {}).get("verifier") or {}
    families = sorted({name.split("For")[0] for name in verifier.get("architectures") or []})
    inner = config.get("transformer_layer_config") or config
    width, own = config.get("target_hidden_size") or inner.get("hidden_size"), target.config.get_text_config()
    if (families and type(target).__name__.split("For")[0] not in families) or width != own.hidden_size:
        made_for = " or ".join([*families, verifier.get("name_or_path") or "another model"])
        raise ValueError(
            f"the head in {str(source)!r} was made for {made_for} with states of width {width}, and the target is a "
            f"{type(target).__name__} with {own.hidden_size}: give the target that it was made for"
        )


def require_map(d2t: Tensor, t2d: Tensor | None, vocab: int, file: Path) -> Tensor:
    """The `t2d` of the offsets `d2t`; `ValueError` for a map that is none."""
    if d2t.is_floating_point():
        raise ValueError(f"d2t in {file} has {d2t.dtype} numbers; they must be whole")
    tokens = d2t + torch.arange(len(d2t))
    inside = bool(((tokens >= 0) & (tokens < vocab)).all())
    made = torch.zeros(vocab, dtype=torch.bool)
    if inside:
        made[tokens] = True
    if not inside or int(made.sum()) != len(tokens) or (t2d is not None and not torch.equal(made, t2d.bool())):
        wrong = "points outside" if not inside else "does not give each token once, or not those of t2d"
        raise ValueError(f"d2t in {file} {wrong}: token i of the draft is i + d2t[i] of the target's {vocab} tokens")
    return made


def eagle3_head(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], target: PreTrainedModel, file: Path
) -> Eagle3Head:
    inner, own = layer_config(config), target.config.get_text_config()
    layers = config.get("eagle_aux_hidden_state_layer_ids")
    if layers is None:
        # Such lists, [1, 46, 90] for 94 layers, number what a layer returns: the hidden state of the next number.
        outputs = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        count = own.num_hidden_layers
        layers = [number + 1 for number in outputs] if outputs else [2, count // 2, count - 3]
    if len(set(layers)) < len(layers) or not all(0 <= number < own.num_hidden_layers for number in layers):
        raise ValueError(
            f"the head in {file} reads hidden states {list(layers)}, and this target of {own.num_hidden_layers} layers "
            f"has 0 to {own.num_hidden_layers - 1} before its last norm: give the target that it was made for"
        )
    rows, vocab = config.get("draft_vocab_size") or inner.vocab_size, vocabulary(target)
    if inner.vocab_size != vocab or ("d2t" not in weights and rows != vocab):
        given = f"{rows} of {inner.vocab_size}" if "d2t" in weights else f"{rows}, without a map d2t,"
        raise ValueError(f"the head in {file} drafts {given} tokens, and the target has {vocab}: give its own target")
    width = config.get("target_hidden_size")
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    return Eagle3Head(
        inner, layers, rows if "d2t" in weights else None, target_width=width,
        own_embedding="embed_tokens.weight" in weights or width not in (None, inner.hidden_size),
        **{flag: bool(config.get(flag)) for flag in flags},
    )  # fmt: skip


def next_token_layers(target: PreTrainedModel) -> NextTokenLayers:
    """The next-token layers in the checkpoint of `target`, loaded by transformers."""
    name, folder = type(target).__name__, target.config.name_or_path
    if not getattr(target.config.get_text_config(), "num_mtp_layers", None) or not folder:
        raise ValueError(f"transformers loads no next-token layers from the checkpoint of this {name}; give a source")
    try:
        loaded = MtpModel.from_pretrained(target, device_map={"": target.device})
    except RuntimeError as error:
        raise ValueError(f"the checkpoint in {folder!r} lacks next-token layers of {name}, or parts of them") from error
    return NextTokenLayers(loaded).eval()
