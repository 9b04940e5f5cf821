"""The skeleton for engines that have no adapter."""

import json
from pathlib import Path

import pytest
from script_files import script

from specnb_audit.cli import main

ROOT = Path(__file__).parents[2]
PAIR = f"{ROOT}/data/pair"


def test_the_skeleton_collects_compares_and_its_files_are_audited(tmp_path: Path) -> None:
    """A target other than the engine's is found by the logits."""
    skeleton = script("audit/docs/any_engine.py")
    vars(skeleton)["NEW_TOKENS"] = 4
    given, plain, tokens = (str(tmp_path / name) for name in ("prompts.jsonl", "plain.jsonl", "tokens.jsonl"))
    skeleton.prompts(ROOT / "README.md", given, f"{PAIR}/target", 9)
    skeleton.collect(given, plain)
    skeleton.collect(given, tokens, "speculate")
    skeleton.compare(tokens, f"{PAIR}/target", "1e-4")
    with pytest.raises(SystemExit, match="not the target"):
        skeleton.compare(plain, f"{PAIR}/draft")
    lines = [json.loads(line) for file in (plain, tokens) for line in Path(file).read_text().splitlines()]
    assert len({line["seed"] for line in lines}) == len(lines) == 18
    assert main(["audit", tokens, "--control", plain, "--target", f"{PAIR}/target"]) in (0, 3)
