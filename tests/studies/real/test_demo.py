"""`make demo` with a tiny model in the place of the real one."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from drafter_kinds import attending, near_model

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
