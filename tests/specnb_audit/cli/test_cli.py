"""The command: what its options do, exit statuses, and one line about whatever cannot be.

Fifteen examples of each property run with the tests; SPECNB_EXAMPLES asks for another number.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import llama

from specnb.models.loading import load_model
from specnb_audit.cli import INTERRUPTED, TERMINATED, main
from specnb_audit.cli import audit as cli_audit
from specnb_audit.report import Report
from specnb_audit.run import audit_completions

EXAMPLES = int(os.environ.get("SPECNB_EXAMPLES", "15"))
many = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


SHORT = '{"prompt": [1], "tokens": [2, 3, 0]}\n{"prompt": [2, 3], "tokens": []}\n{"prompt": [1], "tokens": [1, 1]}\n'


VALID = SHORT.encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of four tokens, saved."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    llama().save_pretrained(folder)
    return folder


@pytest.fixture
def loaded(model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`model`, which the command then reads once for each dtype: loading takes most of the time of an example."""
    read = functools.cache(load_model)
    monkeypatch.setattr(
        cli_audit,
        "load_model",
        lambda name, *given, **more: (read if name == str(model) else load_model)(name, *given, **more),
    )
    return model


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


# What the options do


@pytest.mark.parametrize("arguments", [["audit", "--help"], ["collect", "--help"], ["compare"]])
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


def test_every_option_reaches_the_audit(loaded: Path, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, report = report_of(capsys, short, "--target", loaded)
    assert (plain, report["tokens"], report["sequences"]) == (0, 5, 3)
    status, ended = report_of(capsys, short, "--target", loaded, "--eos", 2, "--eos", 3)
    assert (status, ended["violations"]) == (1, {"after-the-end": 2})
    status, long = report_of(capsys, short, "--target", loaded, "--max-new-tokens", 2)
    assert (status, long["violations"]) == (1, {"wrong-length": 2})
    status, stopped = report_of(capsys, short, "--target", loaded, "--max-new-tokens", 2, "--stop")
    assert (status, stopped["tokens"]) == (1, 3)
    assert report_of(capsys, short, "--target", loaded, "--seed", 0)[1] == report
    assert (
        report_of(capsys, short, "--target", loaded, "--seed", 1)[1]["log10_e_by_alternative"]
        != report["log10_e_by_alternative"]
    )
    assert report_of(capsys, short, "--target", loaded, "--delta", 0.25)[1]["delta"] == 0.25
    assert "draft-leak" in report_of(capsys, short, "--target", loaded, "--draft", loaded)[1]["log10_e_by_alternative"]


def test_settings_of_the_engine_reach_the_audit(loaded: Path, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its dtype and tolerance, its control, its order of filters, kinds to ignore, a limit, and other models."""
    greedy = (short, "--target", loaded, "--temperature", 0)
    assert report_of(capsys, *greedy, "--engine-dtype", "float32")[1]["verdict"] == "rejected"
    assert report_of(capsys, *greedy, "--logit-tolerance", 99)[1]["verdict"] == "not rejected"
    status, report = report_of(capsys, *greedy, "--engine-dtype", "float32", "--control", short)
    assert (status, report["control"]["source"]) == (1, "engine")
    assert report_of(capsys, *greedy, "--engine-dtype", "float32", "--ignore", "impossible")[0] == 0
    assert report_of(capsys, short, "--target", loaded, "--limit", 1)[1]["sequences"] == 1
    assert "suspected-model" in report_of(capsys, short, "--target", loaded, "--alternative", loaded)[1]["detectable"]
    draft = ("--draft", loaded, "--draft-temperature", 0.5)
    plain, other = (report_of(capsys, short, "--target", loaded, *draft[:n])[1] for n in (2, 4))
    assert plain["log10_e_by_alternative"]["wrong-q"] != other["log10_e_by_alternative"]["wrong-q"]
    filtered = ("--temperature", 0.3, "--top-p", 0.6, "--engine-dtype", "float32")
    orders = [
        report_of(capsys, short, "--target", loaded, *filtered, "--filter-order", name)[1]
        for name in ("transformers", "llama.cpp")
    ]
    assert orders[0]["log10_e_by_alternative"] != orders[1]["log10_e_by_alternative"]


def test_of_sequences_with_one_seed_the_first_is_audited(
    loaded: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = '{"prompt": [1], "tokens": [2, 3], "seed": %s}\n'
    short.write_text(line % 5 + line % 6 + line % 5)
    _, report = report_of(capsys, short, "--target", loaded, "--control", short)
    assert (report["tokens"], report["sequences"]) == (4, 2)
    assert report["notes"] == [
        "1 sequence repeats a seed that is declared before and may share its random numbers; left out of the audit",
        "of the control, 1 sequence repeats a seed that is declared before and may share its random numbers; left out "
        "of the audit",
    ]
    monkeypatch.setattr(cli_audit, "lines_of", lambda descriptor: iter(short.read_bytes().split(b"\n")))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: 0))
    assert report_of(capsys, "-", "--target", loaded, "--control", short)[1] == report


def test_settings_are_checked_before_a_model_is_loaded(
    short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(cli_audit, "load_model", load)
    bad = {"--delta": "2", "--max-new-tokens": "0", "--eos": "-1", "--seed": "-1", "--device": "tpu", "--top-p": "2"}
    for option, value in bad.items():
        assert value in refused(capsys, short, "--target", "some/name", option, value)
    for page in (short.parent, short.parent / "none" / "page.html", short):
        assert str(page) in refused(capsys, short, "--target", "some/name", "--html", page)
    assert sorted(path.name for path in short.parent.iterdir()) == ["short.jsonl"]
    assert short.read_text() == SHORT


def test_settings_that_cannot_be_claimed_are_refused_by_name(
    loaded: Path, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"--repetition-penalty": 1.1, "--logit-bias": "{5: 1}", "--grammar": "json", "--min-p": 2}
    for name, value in {**given, "--filter-order": "sglang", "--limit": 0, "--ignore": "x"}.items():
        assert str(value) in refused(capsys, short, "--target", loaded, name, value)
    assert report_of(capsys, short, "--target", loaded, "--repetition-penalty", 1.0)[0] == 0


def test_a_page_is_replaced_only_by_a_report(loaded: Path, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = short.parent / "page.html"
    page.write_text("old")
    refused(capsys, short, "--target", loaded, "--html", page, "--eos", "4")
    assert page.read_text() == "old"
    assert main(["audit", str(short), "--target", str(loaded), "--html", str(page)]) == 0
    assert "not rejected" in page.read_text()
    assert sorted(path.name for path in short.parent.iterdir()) == ["page.html", "short.jsonl"]


def test_what_nobody_foresaw_is_no_verdict(
    loaded: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **settings: object) -> None:
        raise MemoryError("no room\nfor this")

    monkeypatch.setattr(cli_audit, "audit_completions", fail)
    assert f"{short} against {loaded}: MemoryError: no room for this" in refused(capsys, short, "--target", loaded)


def test_an_interrupt_is_no_verdict_either(
    loaded: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before there is a report there is none; a report on a part exits with 1 only if it rejects."""
    whole = audit_completions

    def part(*arguments: Any, **settings: Any) -> Report:
        return replace(whole(*arguments, **settings), interrupted=True)

    def nothing(*arguments: object, **settings: object) -> None:
        raise KeyboardInterrupt

    arguments = ["audit", str(short), "--target", str(loaded)]
    monkeypatch.setattr(cli_audit, "audit_completions", part)
    assert main(arguments) == 130
    assert "no deviation was found" in capsys.readouterr().out
    assert main([*arguments, "--eos", "2"]) == 1
    capsys.readouterr()
    monkeypatch.setattr(cli_audit, "audit_completions", nothing)
    assert main(arguments) == 130
    assert capsys.readouterr() == ("", "specnb: interrupted before there was anything to report\n")


def test_sigterm_leaves_nothing_half_written(
    loaded: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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
            assert main(["audit", str(short), "--target", str(loaded), "--html", str(page)]) == 143
        assert capsys.readouterr() == ("", "specnb: terminated\n")
        assert page.read_text() == "old"
        assert sorted(path.name for path in short.parent.iterdir()) == ["page.html", "short.jsonl"]
        assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_report_that_finds_no_room_is_no_verdict(
    loaded: Path, short: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk, where exactness is rejected too."""
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["audit", str(short), "--target", str(loaded), "--eos", "2"]) == 2
    assert "specnb: the report cannot be printed: No space left on device\n" in capsys.readouterr().err
    assert "--html /dev/full cannot be written: No space left" in refused(
        capsys, short, "--target", loaded, "--html", "/dev/full"
    )


def piped(model: Path, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "specnb_audit.cli", "audit", "-", "--target", str(model), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_pipe_is_audited_while_it_is_open(model: Path) -> None:
    """The rejection is told before the pipe closes; SIGTERM then ends the audit with its report."""
    with piped(model, "--eos", 3) as command:
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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "the name of a model is empty; give a folder or a model's name"),
        ("short.jsonl", "short.jsonl is a file; give the folder that holds config.json and the weights"),
        ("none/here/at/all", "there is no folder"),
        (".", "has no config.json; give the folder that holds it and the weights"),
        ("weights", "cannot load the model"),
        ("config", "cannot load the model"),
        ("vocabulary", "same vocabulary"),
    ],
)
def test_models_that_cannot_be_used_are_named(
    name: str, words: str, model: Path, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = short.parent / name if name else ""
    if name in ("weights", "config"):
        shutil.copytree(model, folder)
        file = Path(folder, "model.safetensors" if name == "weights" else "config.json")
        file.write_bytes(file.read_bytes()[:50])
    elif name == "vocabulary":
        llama(vocab=5).save_pretrained(folder)
    said = refused(capsys, short, "--target", model, "--draft", folder)
    assert words in said
    assert str(folder) in said


# Whatever the input: a status that is right, one line of explanation, and no stray files


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(arguments: list[str]) -> tuple[int, str, str]:
    """Status, stdout and stderr of the command; argparse leaves with its status, too."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            status = main(arguments)
        except SystemExit as left:
            status = int(str(left.code))
    if status in (INTERRUPTED, TERMINATED):  # not by an example
        raise KeyboardInterrupt
    shown = [line for line in err.getvalue().splitlines(keepends=True) if not line.startswith("specnb: audited ")]
    return status, out.getvalue(), "".join(shown)  # a slow machine shows progress


def require_refusal(out: str, err: str) -> None:
    """No report, and one line of the command's own, or argparse's usage."""
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("usage: ") or (err.startswith("specnb: ") and err.count("\n") == 1 and err.endswith("\n")), (
        err
    )


def require_sane(folder: Path, arguments: list[str], page: Path | None = None) -> int:
    """Runs the command in `folder` and checks everything that must hold whatever the input; returns the status."""
    before = files(folder)
    status, out, err = run(["audit", *arguments, "--json"])
    after = files(folder)
    if status == 2:
        require_refusal(out, err)
        assert after == before
    else:
        assert status == (1 if json.loads(out)["rejected"] else 0)
        assert err == ""
        written = {} if page is None else {str(page.relative_to(folder)): page.read_bytes()}
        assert after == before | written
    return status


HUGE = "an integer of 5,001 digits"


numbers = st.one_of(
    st.integers(-2, 5), st.integers(), st.floats(), st.booleans(), st.just(HUGE), st.just(2**63), st.none()
)


leaves = st.one_of(numbers, st.text(max_size=5))


values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner))


tokens = st.lists(st.integers(0, 3), max_size=6)


valid = st.fixed_dictionaries({"prompt": st.lists(st.integers(0, 3), min_size=1, max_size=6), "tokens": tokens})


lines = st.one_of(
    valid,
    valid.map(lambda line: line | {"steps": [1] * len(line["tokens"])}),
    st.fixed_dictionaries({"prompt": tokens, "tokens": tokens, "steps": tokens}),
    st.fixed_dictionaries({"prompt": values, "tokens": values}),
    st.dictionaries(st.sampled_from(["prompt", "tokens", "steps", "seed"]), values),
    values,
)


def _dumped(value: Any) -> str:
    """JSON, with an integer in place of HUGE that is longer than Python itself would convert."""
    return json.dumps(value, ensure_ascii=False).replace(f'"{HUGE}"', "1" + "0" * 5000)


sequences = st.one_of(
    st.lists(valid.map(_dumped), min_size=1, max_size=8).map("\n".join),
    st.lists(lines.map(_dumped), max_size=4).map("\n".join),
    st.text(max_size=40),
    st.just('{"prompt": ' + "[" * 5000 + "]" * 5000 + ', "tokens": [1]}'),
)
encoded = st.one_of(
    sequences.map(lambda text: text.encode("utf-8", "surrogatepass")),
    sequences.map(lambda text: text.encode("utf-16", "surrogatepass")),
    sequences.map(lambda text: gzip.compress(text.encode("utf-8", "surrogatepass"), mtime=0)),
    st.binary(max_size=60),
    st.integers(0, len(VALID)).map(lambda at: VALID[:at]),
    st.integers(0, 60).map(lambda at: gzip.compress(VALID, mtime=0)[:at]),
)


@given(content=encoded)
@many
def test_files_of_tokens(content: bytes, loaded: Path, tmp_path: Path) -> None:
    (tmp_path / "tokens.jsonl").write_bytes(content)
    require_sane(tmp_path, [str(tmp_path / "tokens.jsonl"), "--target", str(loaded)])


@given(content=encoded)
@many
def test_lines_of_a_pipe(content: bytes, loaded: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cli_audit, "lines_of", lambda descriptor: iter(content.split(b"\n")))
        patch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: 0))
        require_sane(tmp_path, ["-", "--target", str(loaded)])


NUMERIC = (
    "--temperature", "--top-k", "--top-p", "--min-p", "--eos", "--max-new-tokens", "--delta", "--seed", "--limit",
    "--draft-temperature", "--draft-top-k", "--draft-top-p", "--logit-tolerance", "--numerics-positions",
    "--repetition-penalty", "--logit-bias",
)  # fmt: skip
numeric = st.sampled_from(
    ["0", "1", "-1", "3", "4", "0.5", "nan", "inf", "-inf", "1e-300", "1e300", "", "x", str(2**70), "1" + "0" * 5000]
)


option = st.one_of(
    st.tuples(st.sampled_from(NUMERIC), numeric),
    st.tuples(st.sampled_from(["--dtype", "--engine-dtype"]), st.sampled_from(["float64", "bfloat16", "float8", ""])),
    st.tuples(st.just("--filter-order"), st.sampled_from(["llama.cpp", "sglang", "", "top-p,min-p", "top-p,top-p"])),
    st.tuples(st.just("--ignore"), st.sampled_from(["impossible", "wrong-length", "draft-leak", "x", ""])),
    st.tuples(st.just("--control"), st.sampled_from(["tokens.jsonl", "none.jsonl", ".", ""])),
    st.tuples(st.just("--device"), st.sampled_from(["cpu", "cuda:99", "meta", "nonsense", ""])),
    st.tuples(st.just("--html"), st.sampled_from(["page.html", "none/page.html", ".", "tokens.jsonl", ""])),
    st.tuples(
        st.sampled_from(["--draft", "--alternative"]), st.sampled_from(["model", "", "tokens.jsonl", ".", "a/b/c"])
    ),
)


@given(options=st.lists(option, max_size=4))
@many
def test_options(options: list[tuple[str, str]], loaded: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.unlink(missing_ok=True)
    (tmp_path / "tokens.jsonl").write_bytes(VALID)
    arguments = [str(tmp_path / "tokens.jsonl"), "--target", str(loaded)]
    for name, value in options:
        if value and name in ("--html", "--draft", "--alternative", "--control"):
            value = str(loaded) if value == "model" else str(tmp_path / value)
        arguments += [f"{name}={value}"]
    asked = [value for name, value in options if name == "--html"][-1:] == ["page.html"]
    require_sane(tmp_path, arguments, page if asked else None)


def test_without_stderr_and_stdin(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `2>&-` and `<&-`: no stderr is no error, and no stdin is one."""
    (tmp_path / "tokens.jsonl").write_bytes(VALID)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(["audit", str(tmp_path / "tokens.jsonl"), "--target", str(model)]) == 0
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["audit", "-", "--target", str(model)]) == 2


@pytest.mark.parametrize("command", ["audit", "control", "compare", "collect"])
@pytest.mark.parametrize("endless", ["pipe", "/dev/zero"])
def test_a_file_without_an_end_is_refused(command: str, endless: str, loaded: Path, tmp_path: Path) -> None:
    """A pipe that nobody writes to would be waited for, and one without an end read until memory is full."""
    os.mkfifo(tmp_path / "pipe")
    given, good = str(tmp_path / endless), str(tmp_path / "tokens.jsonl")
    (tmp_path / "tokens.jsonl").write_bytes(VALID)
    arguments = {
        "audit": ["audit", given, "--target", str(loaded)],
        "control": ["audit", good, "--target", str(loaded), "--control", given],
        "compare": ["compare", good, given],
        "collect": ["collect", "--url", "http://127.0.0.1:9", "--out", f"{good}.out", "--prompts", given],
    }[command]
    status, out, err = run(arguments)
    assert status == 2
    require_refusal(out, err)
    assert f"{given} is a pipe or a device, which may have no end; give a file" in err


@given(first=encoded, second=st.none() | encoded, delta=numeric, flags=st.sets(st.sampled_from(["--stop", "--json"])))
@many
def test_samples_to_compare(first: bytes, second: bytes | None, delta: str, flags: set[str], tmp_path: Path) -> None:
    names = [tmp_path / "samples.jsonl", tmp_path / "reference.jsonl"]
    for name, content in zip(names, (first, first if second is None else second), strict=True):
        name.write_bytes(content)
    before = files(tmp_path)
    status, out, err = run(["compare", *map(str, names), f"--delta={delta}", *sorted(flags)])
    assert files(tmp_path) == before
    if status == 2:
        require_refusal(out, err)
        assert "Error: " not in err
    else:
        rejected = json.loads(out)["rejected"] if "--json" in flags else "REJECTED" in out
        assert (status, err) == (int(rejected), "")
