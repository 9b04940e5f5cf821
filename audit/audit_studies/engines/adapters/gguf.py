"""A Llama model of transformers as a GGUF file, written with the package `gguf`, without torch.

Two differences matter. llama.cpp rotates neighbouring components of queries and keys, transformers
the two halves of a head, so the rows of both projections are reordered. And an output matrix tied
to the embedding is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FILE_TYPES = {"f32": 0, "f16": 1}


def gguf_name(name: str) -> str:
    """The name in a GGUF file of a weight of transformers.

    >>> gguf_name("model.layers.3.self_attn.q_proj.weight")
    'blk.3.attn_q.weight'
    """
    stem = name.removesuffix(".weight")
    if stem in OUTER:
        return f"{OUTER[stem]}.weight"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}.weight"


def interleaved(weight: Any, heads: int) -> Any:
    """`weight` `(heads * size, ...)` with the two halves of each head's rows interleaved.

    >>> import numpy as np
    >>> interleaved(np.arange(8), heads=2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    size, rest = weight.shape[0] // heads, weight.shape[1:]
    return weight.reshape(heads, 2, size // 2, *rest).swapaxes(1, 2).reshape(weight.shape)


def safetensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Name and float32 values of every tensor in a safetensors file, bfloat16 included, which numpy
    lacks."""
    import numpy as np

    content = file.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8:start]).items():
        if name != "__metadata__":
            low, high = entry["data_offsets"]
            raw = content[start + low : start + high]
            kinds = {"F32": np.float32, "F16": np.float16}
            if entry["dtype"] == "BF16":
                values: Any = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = np.frombuffer(raw, kinds[entry["dtype"]]).astype(np.float32)
            yield name, values.reshape(entry["shape"])


def write_gguf(model: Path, out: Path, kind: str = "f32") -> Path:
    """Writes the model in folder `model` to the GGUF file `out`, matrices as `f32` or `f16`;
    returns `out`.

    Raises `ValueError` for another architecture than Llama, `KeyError` for weights that Llama does
    not have.
    """
    import numpy as np
    from gguf import GGUFWriter

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["architectures"] != ["LlamaForCausalLM"]:
        raise ValueError(f"{model} is {config['architectures']}; only LlamaForCausalLM can be written as GGUF here")
    out.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(out, "llama")
    _add_shape(writer, config, kind)
    _add_vocabulary(writer, config, json.loads((model / "tokenizer.json").read_text(encoding="utf-8")))
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in safetensors(model / "model.safetensors"):
        for projection, count in heads.items():
            if projection in name:
                values = interleaved(values, count)
        wide = np.float16 if kind == "f16" and values.ndim > 1 else np.float32
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values, dtype=wide))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _add_shape(writer: Any, config: dict[str, Any], kind: str) -> None:
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _add_vocabulary(writer: Any, config: dict[str, Any], tokenizer: dict[str, Any]) -> None:
    ids = {number: token for token, number in tokenizer["model"]["vocab"].items()}
    ids |= {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    special = {entry["id"] for entry in tokenizer["added_tokens"] if entry["special"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([ids[number].encode() for number in range(config["vocab_size"])])
    writer.add_token_types([3 if number in special else 1 for number in range(config["vocab_size"])])  # 3: control
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_pad_token_id(config["pad_token_id"])
    writer.add_add_bos_token(False)
