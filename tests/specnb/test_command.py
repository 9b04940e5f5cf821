"""The command `specnb`: its own commands, and those of the audit with and without it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import specnb_cli
from specnb_cli import main


def test_a_command_of_the_audit_is_handed_over_before_torch_is_imported() -> None:
    code = "import sys, specnb_cli; specnb_cli.main(sys.argv[1:]); sys.exit(int('torch' in sys.modules))"
    words = ["collect", "--url", "http://localhost", "--prompts", "missing.jsonl", "--out", "tokens.jsonl"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "specnb-audit: missing.jsonl: No such file or directory\n")


@pytest.mark.parametrize("command", specnb_cli.AUDIT)
def test_without_the_audit_one_sentence_says_how_to_get_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(specnb_cli, "find_spec", lambda name: None)
    assert main([command, "--help"]) == 2
    said = f"specnb: {command} is a command of the audit: pip install specnb-audit\n"
    assert capsys.readouterr() == ("", said)
