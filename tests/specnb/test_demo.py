"""`specnb demo` with a tiny model in the place of the real one, and its questions among those of
the workloads."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from script_files import ROOT
from tiny import llama
from transformers import AutoTokenizer

import specnb
from specnb import PromptLookupDrafter, demo
from specnb.drafting import choice
from specnb.support import vocabulary
from specnb_cli import main

# What the tiny model continues with, or not.
COPIED, NOT_COPIED = [1, 2, 1], [3, 3, 0, 1, 3, 0, 2, 1]


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[int]]:
    """Replaces model, tokenizer and sizes; the prompt of a question is what the test puts here."""
    given: dict[str, list[int]] = {}
    tokenizer: Any = SimpleNamespace(eos_token_id=None)
    tokenizer.apply_chat_template = lambda turns, **how: given.get(turns[0]["content"], COPIED)
    tokenizer.decode = lambda tokens, skip_special_tokens=False: "".join(f"<{token}>" for token in tokens)
    monkeypatch.setattr(demo, "load_model", lambda name, dtype: llama())
    monkeypatch.setattr(specnb, "load_model", lambda name, dtype: llama())
    monkeypatch.setattr(demo, "smollm2", lambda: tmp_path)
    monkeypatch.setattr(choice, "copies_or_head", lambda target, *_, **__: PromptLookupDrafter(vocabulary(target)))
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder: tokenizer)
    monkeypatch.setattr(demo, "run", partial(demo.run, new_tokens=4, rounds=3))
    return given


def test_it_prints_both_answers_their_speeds_and_the_call(
    prompts: dict[str, list[int]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(2_000_000))
    assert main(["demo"]) == 0
    said = capsys.readouterr().out
    assert all(re.search(rf"{kind}: .*\n\n(<\d>){{4}}\n\nplain ", said, re.DOTALL) for kind in demo.QUESTIONS)
    assert len(re.findall(r"speculative +\S+ tokens/s +\d\.\d\d tokens/step", said)) == 2
    assert said.count("the tokens are the same as plain decoding") == 2
    assert "(2 MB)" in said
    call = said.partition("The same in Python:\n")[2].partition("The model stays")[0]
    exec(compile(call, "demo", "exec"), {})  # what is printed to be copied runs


@pytest.mark.parametrize(("prompt", "accepts"), [(COPIED, True), (NOT_COPIED, False)])
def test_without_an_accepted_token_the_ratio_is_called_noise(
    prompt: list[int], accepts: bool, prompts: dict[str, list[int]], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    prompts["why"] = prompt
    monkeypatch.setattr(demo, "is_terminal", lambda: True)
    demo.run(questions={"An answer": "why"})
    said = capsys.readouterr().out
    assert ("times as fast as plain decoding" in said) == (demo.GREEN in said) == accepts
    assert (
        ("No draft token was accepted" in said) == ("1.00 tokens/step" in said.partition("speculative")[2]) != accepts
    )


def test_its_questions_are_of_the_workloads() -> None:
    """On these, copied tokens are accepted at temperature 0."""
    lines = (ROOT / "data/workloads.jsonl").read_text(encoding="utf-8").splitlines()
    assert set(demo.QUESTIONS.values()) <= {json.loads(line)["prompt"] for line in lines}
