"""The command: exit statuses, JSON, and clear words about bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specnb.audit.token_file import Sequence, read_tokens
from specnb.cli import main
from specnb.decode import generate
from specnb.models import PAIR, load_pair

TARGET, DRAFT = str(PAIR / "target"), str(PAIR / "draft")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Exact texts of the trained pair, as a file."""
    pair = load_pair()
    prompts = [pair.encode("def "), pair.encode("class ")] * 2
    made = generate(pair.target, prompts, pair.draft, max_new_tokens=10, progress=False)
    steps = [[size for size in row if size] for row in made.record.emitted.tolist()]
    lines = [
        json.dumps({"prompt": prompt, "tokens": tokens, "steps": sizes})
        for prompt, tokens, sizes in zip(prompts, made.tokens, steps, strict=True)
    ]
    file = tmp_path_factory.mktemp("cli") / "tokens.jsonl"
    file.write_text("\n".join(lines) + "\n\n")
    return file


def test_exact_texts_exit_with_0(texts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(texts), "--target", TARGET, "--draft", DRAFT]) == 0
    assert "no deviation was found" in capsys.readouterr().out


def test_a_rejection_exits_with_1_and_names_the_token(
    texts: Path, capsys: pytest.CaptureFixture[str], tmp_path
) -> None:
    """The texts were sampled at temperature 1, and are claimed to be greedy."""
    page = tmp_path / "report.html"
    arguments = ["audit", str(texts), "--target", TARGET, "--temperature", "0", "--json", "--html", str(page)]
    assert main(arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "rejected"
    assert report["kind"] == "impossible"
    assert report["impossible"][0]["logit"] > 0
    assert "rejected" in page.read_text()


def test_the_command_is_installed_and_says_what_it_takes() -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "specnb.cli", "audit", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in ("TOKENS.jsonl", "--target", "--draft", "--temperature", "--top-k", "--top-p", "--delta", "--json"):
        assert option in asked


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("{", "line 1 is no JSON"),
        ("[1, 2]", "line 1 is [1, 2]"),
        ('{"prompt": [1]}', "no 'tokens'"),
        ('{"tokens": [1]}', "no 'prompt'"),
        ('{"prompt": [1], "tokens": "abc"}', "'tokens' is no list of whole numbers"),
        ('{"prompt": [1], "tokens": [1.5]}', "'tokens' is no list of whole numbers"),
        ('{"prompt": [true], "tokens": [1]}', "'prompt' is no list of whole numbers"),
        ('{"prompt": [1], "tokens": [1]}\n{"prompt": [1], "tokens": [1], "steps": [1]}', "line 2: give steps"),
        ('{"prompt": [1], "tokens": []}', "no tokens to judge"),
        ('{"prompt": [1], "tokens": [4096]}', "has the token 4096"),
        ('{"prompt": [], "tokens": [5]}', "no prompt"),
        ('{"prompt": [1], "tokens": [5], "steps": [3]}', "steps add up to 3"),
    ],
)
def test_bad_files_exit_with_2(content: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.jsonl"
    file.write_text(content)
    assert main(["audit", str(file), "--target", TARGET]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("more", [["--temperature", "-1"], ["--top-p", "0"], ["--top-k", "0"], ["--delta", "3"]])
def test_bad_settings_exit_with_2(texts: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(texts), "--target", TARGET, *more]) == 2
    assert more[1] in capsys.readouterr().err


def test_files_and_models_that_are_not_there_exit_with_2(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(tmp_path / "none.jsonl"), "--target", TARGET]) == 2
    assert main(["audit", str(texts), "--target", str(tmp_path)]) == 2
    assert main(["audit", str(texts), "--target", str(tmp_path / "none")]) == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as bad:
        main(["audit", str(texts)])
    assert bad.value.code == 2


def test_lines_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "tokens.jsonl"
    file.write_text('{"prompt": [1], "tokens": [2, 3], "note": "ignored"}\n')
    assert read_tokens(file) == [Sequence("tokens.jsonl, line 1", [1], [2, 3])]
