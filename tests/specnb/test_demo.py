"""`specnb demo` with a tiny model in the place of the real one."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import llama
from transformers import AutoTokenizer

from specnb import demo
from specnb_audit.cli import main


def test_it_prints_both_answers_and_how_fast_they_were(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer: Any = SimpleNamespace(eos_token_id=None)
    tokenizer.apply_chat_template = lambda turns, **how: [1, 2, 1]
    tokenizer.decode = lambda tokens, skip_special_tokens: f"{len(tokens)} tokens"
    monkeypatch.setattr(demo, "load_model", lambda name: llama())
    monkeypatch.setattr(demo, "smollm2", lambda: "folder")
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder: tokenizer)
    monkeypatch.setattr(demo, "run", partial(demo.run, new_tokens=6, rounds=1))
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    assert all(f"{kind}: {question}\n\n6 tokens\n" in said for kind, question in demo.QUESTIONS.items())
    assert said.count("times as fast as plain decoding") == said.count("the tokens are the same as plain decoding") == 2
