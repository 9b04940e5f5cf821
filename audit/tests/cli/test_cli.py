"""The command: what its options do, exit statuses, and one line about whatever cannot be.

Which lines and files of tokens are bad, and what is said of each, is in test_token_file.py.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import llama

from specnb.loading import TRAINED_PAIR, load_model
from specnb_audit.cli import INTERRUPTED, TERMINATED, main
from specnb_audit.cli import audit as cli_audit
from specnb_audit.run import audit_completions

SHORT = b'{"prompt": [1], "tokens": [2, 3, 0]}\n{"prompt": [2, 3], "tokens": []}\n{"prompt": [1], "tokens": [1, 1]}\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of four tokens, saved."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    llama().save_pretrained(folder)
    return folder


@pytest.fixture
def loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`model`, which the command then reads once for each dtype: loading takes most of the time of
    an example."""
    read = functools.cache(load_model)
    monkeypatch.setattr(
        cli_audit,
        "load_model",
        lambda name, *given, **more: (read if name == str(model) else load_model)(name, *given, **more),
    )
    return model


@pytest.fixture
def short(tmp_path: Path) -> Path:
    (tmp_path / "short.jsonl").write_bytes(SHORT)
    return tmp_path / "short.jsonl"


def run(*arguments: object) -> tuple[int, str, str]:
    """Status, stdout and stderr of the command; argparse leaves with its status, too."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            status = main([str(one) for one in arguments])
        except SystemExit as left:
            status = int(str(left.code))
    shown = [line for line in err.getvalue().splitlines(keepends=True) if not line.startswith("specnb-audit: audited ")]
    return status, out.getvalue(), "".join(shown)  # a slow machine shows progress


def report_of(*arguments: object) -> tuple[int, dict[str, Any]]:
    status, out, err = run("audit", *arguments, "--json")
    assert err == ""
    return status, json.loads(out)


def refused(*arguments: object) -> str:
    """What a command without a verdict says: one line of its own, or argparse's usage; and it
    prints no report."""
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert "Traceback" not in err
    assert err.startswith("usage: ") or (err.startswith("specnb-audit: ") and err.count("\n") == 1), err
    return err


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """What the command then reads from stdin."""

    def pipe(content: bytes) -> None:
        monkeypatch.setattr(cli_audit, "lines_of", lambda descriptor: iter(content.split(b"\n")))
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: 0))

    return pipe


# What the options do


@pytest.mark.parametrize("arguments", [["audit", "--help"], ["collect", "--help"], ["kernels"]])
def test_options_are_read_before_torch_is_imported(arguments: list[str]) -> None:
    code = f"""
import sys
from specnb_audit.cli import main
try:
    main({arguments!r})
except SystemExit:
    sys.exit(any(name in sys.modules for name in ("torch", "transformers", "numpy", "scipy", "pandas")))
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


GREEDY = ("--temperature", 0, "--engine-dtype", "float32")
OPTIONS: list[tuple[tuple[object, ...], int, Callable[[dict[str, Any]], bool]]] = [
    ((), 3, lambda found: (found["tokens"], found["sequences"], found["delta"]) == (5, 3, 1e-6)),
    (("--require", "impossible:0.5"), 0, lambda found: found["undecided"] == ""),
    (("--require", "impossible:0.3"), 3, lambda found: found["headline"].endswith("0.3 might have been missed")),
    (("--require", "draft-leak:0.9"), 3, lambda found: "draft-leak was not looked for" in found["headline"]),
    (("--eos", 2, "--eos", 3), 1, lambda found: found["violations"] == {"after-the-end": 2}),
    (("--max-new-tokens", 2), 1, lambda found: found["violations"] == {"wrong-length": 2}),
    (("--max-new-tokens", 2, "--stop"), 1, lambda found: found["tokens"] == 3),
    (("--max-new-tokens", 2, "--ignore", "wrong-length"), 3, lambda found: found["violations"] == {}),
    (("--delta", 0.25), 3, lambda found: found["delta"] == 0.25),
    (("--limit", 1), 3, lambda found: found["sequences"] == 1),
    (("--numerics-positions", 0), 3, lambda found: found["numerics"] is None),
    (("--draft", "model"), 3, lambda found: "draft-leak" in found["detectable"]),
    (("--alternative", "model"), 3, lambda found: "suspected-model" in found["detectable"]),
    (GREEDY, 1, lambda found: found["diagnosis"] == "impossible"),
    ((*GREEDY, "--logit-tolerance", 99), 3, lambda found: len(found["borderline"]) > 0),
    ((*GREEDY, "--control", "short.jsonl"), 1, lambda found: found["control"]["source"] == "engine"),
    (("--repetition_penalty", 1.0), 3, lambda found: found["verdict"] == "not rejected"),
]


@pytest.mark.parametrize(
    ("options", "status", "holds", "pipe"),
    [*((*one, False) for one in OPTIONS), *((*one, True) for one in OPTIONS[::4])],
)
def test_every_option_reaches_the_audit(
    options: tuple[object, ...], status: int, holds: Any, pipe: bool, loaded: Path, short: Path, piped: Any
) -> None:
    """Of a file; and some of the same lines in a pipe."""
    piped(SHORT)
    given = [loaded if one == "model" else short if one == "short.jsonl" else one for one in options]
    found = report_of("-" if pipe else short, "--target", loaded, *given)
    assert found[0] == status
    assert holds(found[1])


@pytest.mark.parametrize(
    "options",
    [
        ("--seed", 1), ("--temperature", 0.5), ("--top-p", 0.9), ("--min-p", 0.05), ("--top-k", 3),
        ("--draft", "model", "--draft-temperature", 0.5), ("--draft", "model", "--draft-top-k", 3),
        ("--draft", "model", "--draft-min-p", 0.3),
        ("--draft", "model", "--top-k", 3, "--draft-top-k", 0),
        ("--repetition-penalty", 1.5), ("--presence-penalty", 1), ("--frequency-penalty", -1), ("--logit-bias", "2:-1"),
        ("--temperature", 0.3, "--top-p", 0.6, "--filter-order", "llama.cpp"), ("--dtype", "bfloat16"),
    ],
)  # fmt: skip
def test_settings_change_the_evidence(options: tuple[object, ...], loaded: Path, short: Path) -> None:
    """Beside the same without the last option."""
    given = [loaded if one == "model" else one for one in options]
    found = [report_of(short, "--target", loaded, *some)[1]["log10_e_by_alternative"] for some in (given, given[:-2])]
    assert found[0] != found[1]


def test_of_sequences_with_one_seed_the_first_is_audited(loaded: Path, short: Path, piped: Any) -> None:
    line = b'{"prompt": [1], "tokens": [2, 3], "seed": %d}\n'
    short.write_bytes(line % 5 + line % 6 + line % 5)
    piped(short.read_bytes())
    for tokens in (short, "-"):
        _, report = report_of(tokens, "--target", loaded, "--control", short)
        note = (
            "1 sequence repeats a seed that is declared before and may share its random numbers; left out of the audit"
        )
        assert (report["tokens"], report["sequences"]) == (4, 2)
        assert report["checks"][:2] == [note, f"of the control, {note}"]
        assert report["left_out"] == 1


def test_an_audit_while_the_pipe_is_open(model: Path) -> None:
    """The rejection is told before the pipe closes; SIGTERM then ends the audit with its report."""
    command = [sys.executable, "-m", "specnb_audit", "audit", "-", "--target", str(model), "--eos", "3"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes, text=True) as process:  # type: ignore[call-overload]
        process.stdin.write('{"prompt": [1], "tokens": [2, 0]}\n{"prompt": [1], "tokens": [3, 1]}\n')
        process.stdin.flush()
        assert any("rejected after 4" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate()
    assert "REJECTED after 4 tokens" in out
    assert "interrupted after 3 tokens" in out
    assert process.returncode == 1


# What is no verdict


def test_bad_settings_are_named_before_a_model_is_loaded(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_audit, "load_model", lambda *given, **more: pytest.fail("a model was loaded"))
    bad = {"--delta": "2", "--max-new-tokens": "0", "--eos": "-1", "--seed": "-1", "--device": "tpu", "--top-p": "2"}
    bad |= {"--repetition-penalty": "0.0", "--presence-penalty": "2.1", "--frequency-penalty": "nan"}
    bad |= {
        "--logit-bias": "x:1",
        "--typical-p": "0.9",
        "--grammar": "json",
        "--min-p": "2",
        "--filter-order": "sglang",
    }
    bad |= {"--limit": "0", "--ignore": "x", "--numerics-positions": "-1"}
    bad |= {"--control": str(short.parent / "none"), "--logit-tolerance": "-3", "--require": "token-bias:0.1"}
    for option, value in bad.items():
        assert value in refused("audit", short, "--target", "some/name", option, value)
    assert "audit --help lists" in refused("audit", short, "--target", "some/name", "--thinking-budget", 20)
    assert files(short.parent) == {"short.jsonl": SHORT}


def test_a_head_as_draft_is_told_what_to_do(loaded: Path, short: Path) -> None:
    said = refused("audit", short, "--target", loaded, "--draft", TRAINED_PAIR / "draft-eagle3")
    assert "leave --draft out" in said


def test_whatever_stops_it_is_no_verdict(loaded: Path, short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw; an interrupt with and without a report on a part, which exits with 1
    only if it rejects; SIGTERM."""
    usual: list[object] = ["audit", short, "--target", loaded]

    def raising(error: BaseException) -> Callable[..., None]:
        def fail(*given: object, **more: object) -> None:
            raise error

        return fail

    def terminate(*given: object, **more: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(cli_audit, "audit_completions", raising(MemoryError("no room\nfor this")))
    assert f"{short} against {loaded}: MemoryError: no room for this" in refused(*usual)
    monkeypatch.setattr(cli_audit, "audit_completions", raising(KeyboardInterrupt()))
    assert run(*usual) == (INTERRUPTED, "", "specnb-audit: interrupted before there was anything to report\n")
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli_audit, "audit_completions", terminate)
    assert run(*usual) == (TERMINATED, "", "specnb-audit: terminated\n")
    assert signal.getsignal(signal.SIGTERM) == before

    def part(*given: Any, **more: Any) -> Any:
        return replace(audit_completions(*given, **more), interrupted=True)

    monkeypatch.setattr(cli_audit, "audit_completions", part)
    status, out, _ = run(*usual)
    assert (status, "UNDECIDED: no deviation was found, in too few tokens" in out) == (INTERRUPTED, True)
    assert run(*usual, "--eos", "2")[0] == 1


@pytest.mark.parametrize("command", ["audit", "control", "collect"])
@pytest.mark.parametrize("endless", ["pipe", "/dev/zero"])
def test_a_file_without_an_end_is_refused(command: str, endless: str, loaded: Path, short: Path) -> None:
    """A pipe that nobody writes to would be waited for, and one without an end read until memory is
    full."""
    os.mkfifo(short.parent / "pipe")
    given = short.parent / endless
    arguments: dict[str, list[object]] = {
        "audit": ["audit", given, "--target", loaded],
        "control": ["audit", short, "--target", loaded, "--control", given],
        "collect": ["collect", "--url", "http://127.0.0.1:9", "--out", f"{short}.out", "--prompts", given],
    }
    assert f"{given} is a pipe or a device, which may have no end; give a file" in refused(*arguments[command])
