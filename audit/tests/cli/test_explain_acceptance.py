"""The command on logs in files: with steps, with averages, and without either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specnb import generate, load_pair
from specnb.drafters import ModelDrafter
from specnb.loading import TRAINED_PAIR
from specnb_audit.cli import main

MODELS = ["--target", str(TRAINED_PAIR / "target"), "--draft", str(TRAINED_PAIR / "draft"), "--gamma", "2"]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pair, file = load_pair(), tmp_path_factory.mktemp("log") / "tokens.jsonl"
    prompts = [[0, 300 + 7 * row] for row in range(8)]
    generate(pair.target, prompts, ModelDrafter(pair.draft), gamma=2, max_new_tokens=9, progress=False).to_jsonl(file)
    return file


def test_a_log_with_steps_is_explained(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-acceptance", str(log), *MODELS]) == 0
    assert capsys.readouterr().out.startswith("no known mistake is needed")


def test_steps_may_leave_the_bonus_token_out(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    without = tmp_path / "without.jsonl"
    changed = (line | {"steps": [size - 1 for size in line["steps"]], "kind": "code"} for line in lines)
    without.write_text("".join(json.dumps(line) + "\n" for line in changed))
    assert main(["explain-acceptance", str(without), *MODELS]) == 2
    assert "steps add up to" in capsys.readouterr().err
    assert main(["explain-acceptance", str(without), *MODELS, "--no-bonus"]) == 0
    assert "  code: " in capsys.readouterr().out


def test_averages_that_no_mistake_has_fit_nothing(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--per-position", "1", "0.01", "--conditional", "--over", "requests", "--logged-steps", "100000"]
    assert main(["explain-acceptance", str(log), *MODELS, *rates]) == 3
    assert "none of the known mistakes fits" in capsys.readouterr().out


def test_a_log_without_steps_gets_one_line_that_names_them(
    log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps({name: line[name] for name in ("prompt", "tokens")}) + "\n" for line in lines))
    assert main(["explain-acceptance", str(bare), *MODELS]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has no 'steps', the tokens that each step emitted" in line
