"""`make demo` with a tiny model in the place of the real one."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from drafter_kinds import attending, near_model

from studies.real import demo


@pytest.mark.parametrize("terminal", [False, True])
def test_it_prints_both_answers_as_they_are_written_and_their_speeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], terminal: bool
) -> None:
    tokenizer: Any = SimpleNamespace(eos_token_id=None)
    tokenizer.decode = lambda tokens, skip_special_tokens: "".join(f"<{token}>" for token in tokens)
    monkeypatch.setattr(demo, "model_and_tokenizer", lambda dtype: (near_model("llama"), tokenizer))
    monkeypatch.setattr(demo, "head_drafter", lambda target, sampling, most: attending(most=most))
    monkeypatch.setattr(demo, "as_chat", lambda tokenizer, question: [1, 2, 1])
    monkeypatch.setattr(demo, "colours", lambda: terminal)
    demo.run(new_tokens=8)
    said = capsys.readouterr().out
    assert ("\033[" in said) == terminal
    for kind, code in demo.COLOURS.items():
        assert (code in said) if terminal else (not code or code not in said), kind
    answers = re.findall(r"^(?:plain|speculative):\n(.*)\n$", re.sub(r"\033\[\d+m", "", said), re.MULTILINE)
    assert len(answers) == 4
    assert all(re.fullmatch(r"(<\d>){8}", answer) for answer in answers)
    assert answers[::2] == answers[1::2]
    assert len(re.findall(r"speculative +\S+ tokens/s +\d\.\d\d tokens/step", said)) == 2
    assert said.count("the tokens are the same as plain decoding") == 2


def test_a_character_is_written_when_it_is_whole(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer: Any = SimpleNamespace(decode=lambda tokens, skip_special_tokens: bytes(tokens).decode(errors="replace"))
    writer, written = demo.Writer(tokenizer), []
    for token in "aü€".encode():
        writer.write([token], ["own"])
        written.append(capsys.readouterr().out)
    assert written == ["a", "", "ü", "", "", "€"]
