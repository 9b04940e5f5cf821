"""GGUF files: a Llama written to one comes back with its logits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from audit_studies.engines.adapters.gguf import write_gguf

pytest.importorskip("gguf")
CONFIG = LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip
WORDS = [f"<{i}>" for i in range(3)] + ["ab"] + [chr(93 + i) for i in range(4, CONFIG.vocab_size)]


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    made: LlamaForCausalLM = LlamaForCausalLM(CONFIG).bfloat16().eval()
    return made


@pytest.fixture
def path(tmp_path: Path, model: LlamaForCausalLM) -> Path:
    """`model` as a GGUF file, written from its folder."""
    model.save_pretrained(tmp_path / "tiny")
    special = [{"id": number, "content": WORDS[number], "special": True} for number in range(3)]
    tokenizer = {"model": {"vocab": {word: at for at, word in enumerate(WORDS)}, "merges": ["a b"]}}
    (tmp_path / "tiny" / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": special}))
    return write_gguf(tmp_path / "tiny", tmp_path / "tiny.gguf")


def test_a_llama_comes_back_with_its_logits(path: Path, model: LlamaForCausalLM) -> None:
    tokens = torch.tensor([[1, 5, 9, 3, 3, 8]])
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    torch.testing.assert_close(loaded(tokens).logits, model.float()(tokens).logits)
