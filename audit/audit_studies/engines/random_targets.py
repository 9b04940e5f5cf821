"""Small targets with random weights, for drafters that need an architecture of their own.

    llama        Llama: a draft model, another tokenizer, its own first layers, a drafter of blocks
                 (DFlash) in the architecture of Muse Glimmer's assistant
    gemma4       Gemma 4, and its assistant, which reads the target's keys and values
    glm4-moe     GLM-4-MoE with one next-token layer
    deepseek-v3  DeepSeek-V3 with three

Each weight has a generator of its own, seeded by its name, so that every release of transformers
and every part of a model gives the same target. `save` writes the folders that an engine loads, in
the layout of a released checkpoint; next-token layers are the layers after the last one there.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

TARGETS = ("llama", "gemma4", "glm4-moe", "deepseek-v3")
VOCAB, WIDTH, LAYERS, POSITIONS = 64, 32, 2, 256
LOGITS = 2.0
"""About the standard deviation of logits: neither almost uniform nor one token."""
EMBEDDING = 5.0
"""Norm of an embedding, less the part that all have. Logits are a sum of three parts of about one
size: one for all places, one of the last token, and one of all that came before. Drafters know the
first two, so that some of their tokens are accepted."""
QUIET = 0.3  # factor of a norm after a layer, for architectures that have one
NOISE = 0.1  # of the draft model's weights, relative to the target's
LLAMA_LAYERS, EXIT_LAYER = 4, 2  # layers of the Llama, and how many draft in an early exit
NEXT_TOKEN_LAYERS = {"glm4-moe": 1, "deepseek-v3": 3}
BLOCK, MASK = 5, 1  # tokens of a block of the drafter of blocks, and its mask, which says nothing of a place
FIRST_LETTER = 0x4E00
COMMON_TOKENS, OTHERS = 56, 4  # that the two tokenizers share, and that only the drafter's has

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS,
    "num_attention_heads": 2, "max_position_embeddings": POSITIONS, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "dtype": "float32", "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": WIDTH, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_shared_experts": 1,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# Of the three layers of Gemma 4, the last reuses keys and values, as the only one of the assistant does.
GEMMA: dict[str, Any] = COMMON | {
    "num_key_value_heads": 1, "head_dim": WIDTH // 2, "global_head_dim": WIDTH // 2, "sliding_window": 128,
    "num_kv_shared_layers": 1,
}  # fmt: skip


def target(name: str) -> PreTrainedModel:
    """The target of this name, on the CPU in float32. Raises `KeyError` for another name."""
    return _randomised(_MADE[name](LLAMA_LAYERS if name == "llama" else LAYERS), name, quiet=name == "gemma4")


def draft_model(name: str, speculation: str) -> PreTrainedModel | None:
    """The model whose distribution a row's draft tokens have, or nearly; None where no model of
    tokens has it."""
    if name != "llama" or speculation == "dflash":
        return None
    own = target(name)
    if speculation == "early-exit":
        own.model.layers = own.model.layers[:EXIT_LAYER]
        own.config.num_hidden_layers = EXIT_LAYER
        return own
    return _with_noise(own)


def save(name: str, folder: Path) -> None:
    """Writes the target to `folder/target`, with its next-token layers, and each drafter to the
    folder with the name of its kind of speculation."""
    own = target(name)
    own.save_pretrained(folder / "target")
    if name in NEXT_TOKEN_LAYERS:
        _add_next_token_layers(name, folder / "target")
    elif name == "gemma4":
        _gemma4_assistant().save_pretrained(folder / "assistant")
    elif name == "llama":
        draft = _with_noise(own)
        draft.save_pretrained(folder / "stopping")
        _block_drafter().save_pretrained(folder / "dflash")
        _save_with_other_tokenizer(draft, folder / "other-tokenizer")
        _write_tokenizer(list(range(VOCAB)), folder / "target")


def weight(name: str, shape: torch.Size) -> Tensor:
    """The random matrix of this name; its rows have norms of about one."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values: Tensor = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    return values


@torch.no_grad()
def _randomised(model: PreTrainedModel, name: str, quiet: bool = False) -> PreTrainedModel:
    for where, values in model.named_parameters():
        if values.dim() > 1:
            values.copy_(weight(f"{name} {where}", values.shape))
        elif quiet and ".post_" in where:
            values.fill_(QUIET)
    head: Any = model.get_output_embeddings()
    if head is not None:
        head.weight.mul_(LOGITS)
        embeddings: Any = model.get_input_embeddings()
        embeddings.weight[MASK] = 0.0
        embeddings.weight.add_(weight(name, torch.Size([1, WIDTH])))
        embeddings.weight.mul_(EMBEDDING / float(getattr(embeddings, "embed_scale", 1)))
    model.eval()
    return model


@torch.no_grad()
def _with_noise(model: PreTrainedModel) -> PreTrainedModel:
    noisy = copy.deepcopy(model)
    for where, values in noisy.named_parameters():
        if values.dim() > 1:
            values.add_(NOISE * values.std() * values.shape[-1] ** 0.5 * weight(f"noise {where}", values.shape))
    return noisy


def _llama(layers: int) -> PreTrainedModel:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON | {"num_hidden_layers": layers}))


def _gemma4(layers: int) -> PreTrainedModel:
    from transformers.models.gemma4 import Gemma4ForCausalLM, Gemma4TextConfig

    types = ["sliding_attention", *["full_attention"] * layers]
    own = {"num_hidden_layers": len(types), "layer_types": types}
    own |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB}
    return Gemma4ForCausalLM(Gemma4TextConfig(**GEMMA | own))


def _glm4_moe(layers: int) -> PreTrainedModel:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    own = {"num_hidden_layers": layers, "num_nextn_predict_layers": NEXT_TOKEN_LAYERS["glm4-moe"]}
    heads = {"num_key_value_heads": 1, "head_dim": WIDTH // 2}
    return Glm4MoeForCausalLM(Glm4MoeConfig(**COMMON | EXPERTS | heads | own))


def _deepseek_v3(layers: int) -> PreTrainedModel:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    own = {"num_hidden_layers": layers, "num_nextn_predict_layers": NEXT_TOKEN_LAYERS["deepseek-v3"]}
    heads = {"num_key_value_heads": 2, "kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 16}
    heads |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    return DeepseekV3ForCausalLM(DeepseekV3Config(**COMMON | EXPERTS | heads | own))


_MADE: dict[str, Callable[[int], PreTrainedModel]] = dict(
    zip(TARGETS, (_llama, _gemma4, _glm4_moe, _deepseek_v3), strict=True)
)


def _gemma4_assistant() -> PreTrainedModel:
    # transformers 5.23.0 refuses a configuration whose layers all reuse keys and values; 5.24.0 does not.
    from transformers.models.gemma4 import Gemma4TextConfig
    from transformers.models.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

    layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    text = Gemma4TextConfig(**GEMMA | layer | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0})
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=WIDTH, tie_word_embeddings=False)
    assistant: Any = _randomised(Gemma4AssistantForCausalLM(config), "gemma4 assistant", quiet=True)
    assistant.pre_projection.weight.data = _joining("gemma4 assistant")
    own: Any = target("gemma4")
    assistant.lm_head.weight.data = own.lm_head.weight.data
    made: PreTrainedModel = assistant
    return made


def _block_drafter() -> PreTrainedModel:
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel

    own = {"num_key_value_heads": 1, "head_dim": WIDTH // 2, "block_size": BLOCK, "mask_token_id": MASK}
    config = MuseGlimmerAssistantConfig(**COMMON | own | {"target_layer_ids": [0, LLAMA_LAYERS - 1]})
    return _randomised(MuseGlimmerAssistantModel(config), "llama blocks", quiet=True)


def _joining(name: str) -> Tensor:
    """A matrix that joins an embedding, nearly unchanged, and a hidden state."""
    return torch.cat([torch.eye(WIDTH), QUIET * weight(f"{name} joining", torch.Size([WIDTH, WIDTH]))], dim=1)


def _add_next_token_layers(name: str, folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    more = NEXT_TOKEN_LAYERS[name]
    with TemporaryDirectory() as beside:  # the layers in the layout of the checkpoint
        _randomised(_MADE[name](LAYERS + more), name).save_pretrained(beside)
        weights = load_file(Path(beside) / "model.safetensors")
    for layer in range(LAYERS, LAYERS + more):
        at = f"model.layers.{layer}"
        weights[f"{at}.eh_proj.weight"] = _joining(f"{name} {layer}")
        weights |= {f"{at}.{part}.weight": torch.ones(WIDTH) for part in ("enorm", "hnorm", "shared_head.norm")}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def _save_with_other_tokenizer(draft: PreTrainedModel, folder: Path) -> None:
    """The draft model with the first `COMMON_TOKENS` tokens in reverse order, and others after
    them."""
    characters = [*range(COMMON_TOKENS - 1, -1, -1), *range(VOCAB, VOCAB + OTHERS)]
    rows = [number % VOCAB for number in characters]
    other: Any = copy.deepcopy(draft)
    old = [embeddings.weight[rows].clone() for embeddings in (other.get_input_embeddings(), other.lm_head)]
    other.resize_token_embeddings(len(rows), mean_resizing=False)
    for embeddings, values in zip((other.get_input_embeddings(), other.lm_head), old, strict=True):
        embeddings.weight.copy_(values)
    other.save_pretrained(folder)
    _write_tokenizer(characters, folder)


def _write_tokenizer(characters: list[int], folder: Path) -> None:
    """A tokenizer whose tokens are single letters: token i is letter `characters[i]`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocab = {chr(FIRST_LETTER + letter): number for number, letter in enumerate(characters)}  # none is a space
    made = Tokenizer(models.WordLevel(vocab, unk_token=chr(FIRST_LETTER)))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
