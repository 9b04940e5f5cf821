"""The command: exit statuses, JSON, and clear words about bad input."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import llama

from specnb.decoding.generate import generate
from specnb.models.loading import TRAINED_PAIR, load_pair
from specnb_audit.cli import audit as cli_audit
from specnb_audit.cli import main
from specnb_audit.report import Report
from specnb_audit.run import audit_completions
from specnb_audit.token_file import Sequence, read_tokens

TARGET, DRAFT = str(TRAINED_PAIR / "target"), str(TRAINED_PAIR / "draft")


@pytest.fixture(scope="module")
def completions(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_exact_sequences_exit_with_0(completions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(completions), "--target", TARGET, "--draft", DRAFT]) == 0
    assert "no deviation was found" in capsys.readouterr().out


def test_a_rejection_exits_with_1_and_names_the_token(
    completions: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The texts were sampled at temperature 1, and are claimed to be greedy."""
    page = tmp_path / "report.html"
    arguments = ["audit", str(completions), "--target", TARGET, "--temperature", "0", "--json", "--html", str(page)]
    assert main(arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "rejected"
    assert report["diagnosis"] == "impossible"
    assert report["impossible"][0]["logit"] > 0
    assert "rejected" in page.read_text()


def test_the_command_is_installed_and_says_what_it_takes() -> None:
    asked = subprocess.run(
        [sys.executable, "-m", "specnb_audit.cli", "audit", "--help"], capture_output=True, text=True, check=True
    ).stdout
    for option in ("TOKENS.jsonl", "--target", "--draft", "--temperature", "--top-k", "--top-p", "--delta", "--json"):
        assert option in asked


@pytest.mark.parametrize("arguments", [["audit", "--help"], ["collect", "--help"], ["compare", "--help"], ["audit"]])
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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("{", "line 1 is not JSON"),
        ("[1, 2]", "line 1 is [1, 2]"),
        ('{"prompt": [1]}', "no 'tokens'"),
        ('{"tokens": [1]}', "no 'prompt'"),
        ('{"prompt": [1], "tokens": "abc"}', "'tokens' is not a list of integers"),
        ('{"prompt": [1], "tokens": [1.5]}', "'tokens' is not a list of integers"),
        ('{"prompt": [true], "tokens": [1]}', "'prompt' is not a list of integers"),
        ('{"prompt": [1], "tokens": [1]}\n{"prompt": [1], "tokens": [1], "steps": [1]}', "line 2: give steps"),
        ('{"prompt": [1], "tokens": []}', "no tokens to audit"),
        ('{"prompt": [1], "tokens": []}\n\n{"prompt": [1], "tokens": [4096]}', "line 3 has the token 4096"),
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


@pytest.mark.parametrize(
    "more",
    [
        *(["--temperature", "-1"], ["--top-p", "0"], ["--top-k", "-2"], ["--delta", "3"], ["--max-new-tokens", "0"]),
        *(["--max-new-tokens", "-2"], ["--eos", "-1"], ["--eos", "4096"], ["--seed", "-1"]),
        *(["--device", "cuda:99"], ["--device", "nonsense"], ["--device", "meta"]),
    ],
)
def test_bad_settings_exit_with_2(completions: Path, more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(completions), "--target", TARGET, *more]) == 2
    assert more[1] in capsys.readouterr().err


def test_files_and_models_that_are_not_there_exit_with_2(
    completions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(tmp_path / "none.jsonl"), "--target", TARGET]) == 2
    assert main(["audit", str(completions), "--target", str(tmp_path)]) == 2
    assert main(["audit", str(completions), "--target", str(tmp_path / "none")]) == 2
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    with pytest.raises(SystemExit) as bad:
        main(["audit", str(completions)])
    assert bad.value.code == 2


def test_lines_are_read_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "tokens.jsonl"
    file.write_text('{"prompt": [1], "tokens": [2, 3], "note": "ignored"}\n')
    assert read_tokens(file) == [Sequence("tokens.jsonl, line 1", [1], [2, 3])]


# On a tiny model

SHORT = '{"prompt": [1], "tokens": [2, 3, 0]}\n{"prompt": [2, 3], "tokens": []}\n{"prompt": [1], "tokens": [1, 1]}\n'


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A folder with a model of four tokens, and no tokenizer."""
    llama().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


@pytest.fixture
def short(tmp_path: Path) -> Path:
    file = tmp_path / "short.jsonl"
    file.write_text(SHORT)
    return file


def report_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    status = main(["audit", *map(str, arguments), "--json"])
    return status, json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a command without a verdict writes."""
    capsys.readouterr()
    assert main(["audit", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("specnb: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_every_option_reaches_the_audit(tiny: Path, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, report = report_of(capsys, short, "--target", tiny)
    assert (plain, report["tokens"], report["sequences"]) == (0, 5, 3)
    status, ended = report_of(capsys, short, "--target", tiny, "--eos", 2, "--eos", 3)
    assert (status, ended["violations"]) == (1, {"after-the-end": 2})
    status, long = report_of(capsys, short, "--target", tiny, "--max-new-tokens", 2)
    assert (status, long["violations"]) == (1, {"wrong-length": 2})
    status, stopped = report_of(capsys, short, "--target", tiny, "--max-new-tokens", 2, "--stop")
    assert (status, stopped["tokens"]) == (1, 3)
    assert report_of(capsys, short, "--target", tiny, "--seed", 0)[1] == report
    assert (
        report_of(capsys, short, "--target", tiny, "--seed", 1)[1]["log10_e_by_alternative"]
        != report["log10_e_by_alternative"]
    )
    assert report_of(capsys, short, "--target", tiny, "--delta", 0.25)[1]["delta"] == 0.25
    assert "draft-leak" in report_of(capsys, short, "--target", tiny, "--draft", tiny)[1]["log10_e_by_alternative"]


def test_of_sequences_with_one_seed_the_first_is_audited(
    tiny: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{"prompt": [1], "tokens": [2, 3], "seed": %s}\n'
    short.write_text(line % 5 + line % 6 + line % 5)
    _, report = report_of(capsys, short, "--target", tiny, "--control", short)
    assert (report["tokens"], report["sequences"]) == (4, 2)
    assert report["notes"] == [
        "1 sequence repeats a seed that is declared before and may share its random numbers; left out of the audit",
        "of the control, 1 sequence repeats a seed that is declared before and may share its random numbers; left out "
        "of the audit",
    ]
    monkeypatch.setattr(cli_audit, "lines_of", lambda descriptor: iter(short.read_bytes().split(b"\n")))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: 0))
    assert report_of(capsys, "-", "--target", tiny, "--control", short)[1] == report


@pytest.mark.parametrize(
    "more",
    [
        *(["--eos", 2, "--eos", 3], ["--max-new-tokens", 2], ["--max-new-tokens", 2, "--stop"], ["--seed", 1]),
        *(["--delta", 0.25], ["--eos", 2, "--ignore", "after-the-end"], ["--numerics-positions", 0], ["--limit", 1]),
    ],
    ids=str,
)
def test_every_option_reaches_the_audit_of_a_pipe(
    more: list[object], tiny: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is that on the same lines in a file, and is not that without the options."""
    monkeypatch.setattr(cli_audit, "lines_of", lambda descriptor: iter(short.read_bytes().split(b"\n")))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: 0))

    def outcome(*arguments: object) -> tuple[dict[str, object], Any]:
        status, report = report_of(capsys, *arguments, "--target", tiny)
        names = ("violations", "delta", "tokens", "sequences", "found_after")
        plain = {name: report[name] for name in names} | {"status": status, "measured": report["numerics"] is not None}
        return plain, report["log10_e_by_alternative"]

    (plain, e_values), (expected, expected_e_values), (without, other_e_values) = (
        outcome(*arguments) for arguments in (("-", *more), (short, *more), ("-",))
    )
    assert plain == expected
    # Sequences from a pipe may share forward passes with others than those in a file.
    assert e_values == pytest.approx(expected_e_values, abs=1e-4)
    assert plain != without or e_values != pytest.approx(other_e_values, abs=1e-4)


def test_only_empty_sequences_are_a_finding_where_a_length_was_claimed(
    tiny: Path, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short.write_text('{"prompt": [1], "tokens": []}\n')
    status, report = report_of(capsys, short, "--target", tiny, "--max-new-tokens", 3)
    assert (status, report["violations"], report["tokens"]) == (1, {"wrong-length": 1}, 0)
    assert "no tokens to audit" in refused(capsys, short, "--target", tiny)


def test_settings_are_checked_before_a_model_is_loaded(
    short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(cli_audit, "load_model", load)
    bad = {"--delta": "2", "--max-new-tokens": "0", "--eos": "-1", "--seed": "-1", "--device": "tpu", "--top-p": "2"}
    for option, value in bad.items():
        assert value in refused(capsys, short, "--target", "some/name", option, value)
    for page in (short.parent, short.parent / "none" / "page.html", short, short.parent / ("p" * 300)):
        assert str(page) in refused(capsys, short, "--target", "some/name", "--html", page)
    assert sorted(path.name for path in short.parent.iterdir()) == ["short.jsonl"]
    assert short.read_text() == SHORT


def test_a_page_is_replaced_only_by_a_report(tiny: Path, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = short.parent / "page.html"
    page.write_text("old")
    refused(capsys, short, "--target", tiny, "--html", page, "--eos", "4")
    assert page.read_text() == "old"
    assert main(["audit", str(short), "--target", str(tiny), "--html", str(page)]) == 0
    assert "not rejected" in page.read_text()
    assert sorted(path.name for path in short.parent.iterdir()) == ["page.html", "short.jsonl", "tiny"]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", lambda old: old[: len(old) // 2], "tiny/model.safetensors are truncated or damaged"),
        ("model.safetensors", lambda old: b"garbage" * 50, "tiny/model.safetensors are truncated or damaged"),
        ("config.json", lambda old: b"{", "tiny/config.json is not JSON"),
        ("config.json", lambda old: b"[" * 100_000, "tiny/config.json is not JSON (nested too deeply)"),
        ("config.json", lambda old: b"[]", "tiny/config.json is not a JSON object"),
        ("config.json", lambda old: old.replace(b'layers": 2', b'layers": 999999999'), "999999999 layers"),
        ("config.json", lambda old: old.replace(b'_attention_heads": 2', b'_attention_heads": 0'), "tiny: "),
        ("config.json", lambda old: old.replace(b'"hidden_size": 8', b'"hidden_size": 16'), "tiny: "),
        ("config.json", lambda old: b'{"quantization_config": {"quant_method": "gptq", "bits": 4},' + old[1:], "tiny"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_loaded_are_named(
    name: str,
    content: Callable[[bytes], bytes],
    words: str,
    tiny: Path,
    short: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tiny / name
    file.write_bytes(content(file.read_bytes()))
    assert words in refused(capsys, short, "--target", tiny)


def test_a_target_that_is_a_file_or_empty(tiny: Path, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a file" in refused(capsys, short, "--target", short)
    assert "is empty" in refused(capsys, short, "--target", "")
    (tiny / "config.json").unlink()
    assert "has no config.json" in refused(capsys, short, "--target", tiny)


def test_a_broken_tokenizer_does_not_matter(tiny: Path, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tiny / "tokenizer.json").write_text("{")
    assert report_of(capsys, short, "--target", tiny, "--draft", tiny)[0] == 0


def test_a_draft_needs_the_same_number_of_tokens(tiny: Path, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama(vocab=5).save_pretrained(short.parent / "other")
    assert "same vocabulary" in refused(capsys, short, "--target", tiny, "--draft", short.parent / "other")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_report_that_finds_no_room_is_no_verdict(
    tiny: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, where exactness is rejected too."""
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["audit", str(short), "--target", str(tiny), "--eos", "2"]) == 2
    assert "specnb: the report cannot be printed: No space left on device\n" in capsys.readouterr().err
    assert "--html /dev/full cannot be written: No space left" in refused(
        capsys, short, "--target", tiny, "--html", "/dev/full"
    )


def test_what_nobody_foresaw_is_no_verdict(
    tiny: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise MemoryError("no room\nfor this")

    monkeypatch.setattr(cli_audit, "audit_completions", fail)
    assert f"{short} against {tiny}: MemoryError: no room for this" in refused(capsys, short, "--target", tiny)


def test_an_interrupt_is_no_verdict_either(
    tiny: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is a report there is none; a report on a part exits with 1 only if it rejects."""
    whole = audit_completions

    def part(*arguments: Any, **settings: Any) -> Report:
        return replace(whole(*arguments, **settings), interrupted=True)

    def nothing(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    arguments = ["audit", str(short), "--target", str(tiny)]
    monkeypatch.setattr(cli_audit, "audit_completions", part)
    assert main(arguments) == 130
    assert "no deviation was found" in capsys.readouterr().out
    assert main([*arguments, "--eos", "2"]) == 1
    capsys.readouterr()
    monkeypatch.setattr(cli_audit, "audit_completions", nothing)
    assert main(arguments) == 130
    assert capsys.readouterr() == ("", "specnb: interrupted before there was anything to report\n")


def test_settings_of_the_engine_reach_the_audit(tiny: Path, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its dtype and tolerance, its control, its order of filters, kinds to ignore, a limit, and other models."""
    greedy = (short, "--target", tiny, "--temperature", 0)
    assert report_of(capsys, *greedy, "--engine-dtype", "float32")[1]["verdict"] == "rejected"
    assert report_of(capsys, *greedy, "--logit-tolerance", 99)[1]["verdict"] == "not rejected"
    status, report = report_of(capsys, *greedy, "--engine-dtype", "float32", "--control", short)
    assert (status, report["control"]["source"]) == (1, "engine")
    assert report_of(capsys, *greedy, "--engine-dtype", "float32", "--ignore", "impossible")[0] == 0
    assert report_of(capsys, short, "--target", tiny, "--limit", 1)[1]["sequences"] == 1
    assert "suspected-model" in report_of(capsys, short, "--target", tiny, "--alternative", tiny)[1]["detectable"]
    draft = ("--draft", tiny, "--draft-temperature", 0.5)
    plain, other = (report_of(capsys, short, "--target", tiny, *draft[:n])[1] for n in (2, 4))
    assert plain["log10_e_by_alternative"]["wrong-q"] != other["log10_e_by_alternative"]["wrong-q"]
    filtered = ("--temperature", 0.3, "--top-p", 0.6, "--engine-dtype", "float32")
    orders = [
        report_of(capsys, short, "--target", tiny, *filtered, "--filter-order", name)[1]
        for name in ("transformers", "llama.cpp")
    ]
    assert orders[0]["log10_e_by_alternative"] != orders[1]["log10_e_by_alternative"]


def test_settings_that_cannot_be_claimed_are_refused_by_name(
    tiny: Path, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--repetition-penalty": 1.1, "--logit-bias": "{5: 1}", "--grammar": "json", "--min-p": 2}
    for name, value in {**given, "--filter-order": "sglang", "--limit": 0, "--ignore": "x"}.items():
        assert str(value) in refused(capsys, short, "--target", tiny, name, value)
    assert report_of(capsys, short, "--target", tiny, "--repetition-penalty", 1.0)[0] == 0


def piped(tiny: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "specnb_audit.cli", "audit", "-", "--target", str(tiny), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_pipe_is_audited_while_it_is_open(tiny: Path) -> None:
    """The rejection is told before the pipe closes; SIGTERM then ends the audit with its report."""
    with piped(tiny, "--eos", 3) as command:
        assert command.stdin is not None
        assert command.stderr is not None
        command.stdin.write('{"prompt": [1], "tokens": [2, 0]}\n{"prompt": [1], "tokens": [3, 1]}\n')
        command.stdin.flush()
        lines = iter(command.stderr.readline, "")
        assert any("rejected after 4" in line for line in lines)
        command.send_signal(signal.SIGTERM)
        out, _ = command.communicate()
    assert "REJECTED after 4 tokens" in out
    assert "interrupted after 3 tokens" in out
    assert command.returncode == 1


def test_a_bad_line_of_a_pipe_is_named(tiny: Path) -> None:
    with piped(tiny) as command:
        _, err = command.communicate('{"prompt": [1], "tokens": [2]}\n{"prompt": [1], "tokens": [9]}\n')
    assert command.returncode == 2
    assert "stdin, line 2 has the token 9" in err


def test_sigterm_leaves_nothing_half_written(
    tiny: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """During the audit and while the page is written: status 143, no report, and the old page is kept."""
    page = short.parent / "page.html"
    page.write_text("old")
    before = signal.getsignal(signal.SIGTERM)

    def terminate(*arguments: object, **settings: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    for module, name in ((cli_audit, "audit_completions"), (Path, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, terminate)
            assert main(["audit", str(short), "--target", str(tiny), "--html", str(page)]) == 143
        assert capsys.readouterr() == ("", "specnb: terminated\n")
        assert page.read_text() == "old"
        assert sorted(path.name for path in short.parent.iterdir()) == ["page.html", "short.jsonl", "tiny"]
        assert signal.getsignal(signal.SIGTERM) == before
