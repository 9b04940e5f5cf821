"""`make demo` with a tiny model in the place of the real one."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
from drafter_kinds import attending, near_model
from script_files import ROOT

from studies.real import demo


def test_it_prints_both_answers_and_their_speeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer: Any = SimpleNamespace(eos_token_id=None)
    tokenizer.decode = lambda tokens, skip_special_tokens: "".join(f"<{token}>" for token in tokens)
    monkeypatch.setattr(demo, "model_and_tokenizer", lambda dtype: (near_model("llama"), tokenizer))
    monkeypatch.setattr(demo, "head_drafter", lambda target, sampling, most: attending(most=most))
    monkeypatch.setattr(demo, "as_chat", lambda tokenizer, question: [1, 2, 1])
    demo.run(new_tokens=4)
    said = capsys.readouterr().out
    assert all(re.search(rf"{kind}: .*\n\n(<\d>){{4}}\n\nplain ", said, re.DOTALL) for kind in demo.QUESTIONS)
    assert len(re.findall(r"speculative +\S+ tokens/s +\d\.\d\d tokens/step", said)) == 2
    assert said.count("the tokens are the same as plain decoding") == 2


def test_its_questions_are_of_the_workloads() -> None:
    lines = (ROOT / "data/workloads.jsonl").read_text(encoding="utf-8").splitlines()
    assert set(demo.QUESTIONS.values()) <= {json.loads(line)["prompt"] for line in lines}
