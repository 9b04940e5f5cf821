"""The command on malformed inputs: always a status that is right, one line of explanation, and no stray files.

A few dozen examples run with the tests; the environment variable SPECNB_EXAMPLES asks for another number.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import llama

from specnb.models.loading import load_model
from specnb_audit.cli import audit as cli_audit
from specnb_audit.cli import main, output
from specnb_audit.token_file import read_tokens

EXAMPLES = int(os.environ.get("SPECNB_EXAMPLES", "40"))
many = settings(
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
VALID = b'{"prompt": [1], "tokens": [2, 3, 0]}\n{"prompt": [2, 3], "tokens": [1]}\n'


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
    if status in (output.INTERRUPTED, output.TERMINATED):  # not by an example
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


# Files of tokens

HUGE = "an integer of 5,001 digits"

numbers = st.one_of(
    st.integers(-2, 5), st.integers(), st.floats(), st.booleans(), st.just(HUGE), st.just(2**63), st.none()
)
leaves = st.one_of(numbers, st.text(max_size=5))
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner))
tokens = st.lists(st.integers(0, 3), max_size=6)
keys = st.sampled_from(["prompt", "tokens", "steps", "note"])
valid = st.fixed_dictionaries({"prompt": st.lists(st.integers(0, 3), min_size=1, max_size=6), "tokens": tokens})
lines = st.one_of(
    valid,
    valid.map(lambda line: line | {"steps": [1] * len(line["tokens"])}),
    st.fixed_dictionaries({"prompt": tokens, "tokens": tokens}),
    st.fixed_dictionaries({"prompt": tokens, "tokens": tokens, "steps": tokens}),
    st.fixed_dictionaries({"prompt": values, "tokens": values}),
    st.dictionaries(keys, values),
    values,
)


def _dumped(value: Any) -> str:
    """JSON, with an integer in place of HUGE that is longer than Python itself would convert."""
    return json.dumps(value, ensure_ascii=False).replace(f'"{HUGE}"', "1" + "0" * 5000)


def _spliced(at: int, without: int, content: bytes) -> bytes:
    """VALID with `content` in place of some bytes."""
    return VALID[:at] + content + VALID[at + without :]


sequences = st.one_of(
    st.lists(valid.map(_dumped), min_size=1, max_size=8).map("\n".join),
    st.lists(lines.map(_dumped), max_size=4).map("\n".join),
    st.text(max_size=40),
    st.sampled_from(
        [
            "[" * 100_000,
            '{"prompt": ' + "[" * 5000 + "]" * 5000 + ', "tokens": [1]}',
            '{"prompt": [1], "prompt": [2], "tokens": [1]}',
            '{"prompt": [1], "tokens": [2], "note": "\u2028 and \x85"}',
            '{"prompt": [1], "tokens": [NaN]}',
            '{"prompt": [1], "tokens": [1' + "0" * 5000 + "]}",
        ]
    ),
)
encoded = st.one_of(
    sequences.map(lambda text: text.encode("utf-8", "surrogatepass")),
    sequences.map(lambda text: text.encode("utf-8-sig", "surrogatepass")),
    sequences.map(lambda text: text.encode("utf-16", "surrogatepass")),
    sequences.map(lambda text: text.encode("utf-16-le", "surrogatepass")),
    sequences.map(lambda text: gzip.compress(text.encode("utf-8", "surrogatepass"), mtime=0)),
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda content: b"\x1f\x8b" + content),
    st.integers(0, len(VALID)).map(lambda at: VALID[:at]),
    st.builds(_spliced, st.integers(0, len(VALID)), st.integers(0, 3), st.binary(max_size=2)),
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


# Options

numeric = st.sampled_from(
    ["0", "1", "-1", "3", "4", "0.5", "nan", "inf", "-inf", "1e-300", "1e300", "", "x", str(2**70), "1" + "0" * 5000]
)
option = st.one_of(
    st.tuples(
        st.sampled_from(
            ["--temperature", "--top-k", "--top-p", "--eos", "--max-new-tokens", "--delta", "--seed", "--dtype"]
        ),
        numeric,
    ),
    st.tuples(
        st.sampled_from(
            [
                *("--min-p", "--draft-temperature", "--draft-top-k", "--draft-top-p", "--logit-tolerance", "--limit"),
                *("--numerics-positions", "--repetition-penalty", "--logit-bias"),
            ]
        ),
        numeric,
    ),
    st.tuples(st.just("--filter-order"), st.sampled_from(["llama.cpp", "sglang", "", "top-p,min-p", "top-p,top-p"])),
    st.tuples(st.just("--ignore"), st.sampled_from(["impossible", "wrong-length", "draft-leak", "x", ""])),
    st.tuples(st.just("--engine-dtype"), st.sampled_from(["float32", "bfloat16", "float8", ""])),
    st.tuples(st.just("--control"), st.sampled_from(["tokens.jsonl", "none.jsonl", ".", ""])),
    st.tuples(st.sampled_from(["--logit-tolerance", "--numerics-positions"]), numeric),
    st.tuples(st.just("--device"), st.sampled_from(["cpu", "cuda", "cuda:99", "meta", "nonsense", "", "xpu", "mps"])),
    st.tuples(st.just("--html"), st.sampled_from(["page.html", "none/page.html", ".", "tokens.jsonl", "", "p" * 300])),
    st.tuples(
        st.sampled_from(["--draft", "--alternative"]),
        st.sampled_from(["model", "", "tokens.jsonl", ".", "a/b/c", "\x00"]),
    ),
    st.tuples(st.just("--dtype"), st.sampled_from(["float32", "float64", "bfloat16", "float16"])),
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


# Models

NAN, INFINITY = float("nan"), float("inf")
edits: st.SearchStrategy[Any] = st.sampled_from(
    [None, 0, -1, 1, 3, 2.5, "x", "", [], {}, True, 10**9, 1e308, NAN, INFINITY, [1, 2], {"rope_theta": NAN}]
)
KEYS = [
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "intermediate_size", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "model_type", "architectures",
    "hidden_act", "dtype", "tie_word_embeddings", "quantization_config", "eos_token_id", "auto_map",
]  # fmt: skip
QUANTISED = {"quant_method": "gptq", "bits": 4}


def edited(key: str, value: Any) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {key: value}))

    return edit


def truncated(at: int) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:at])

    return edit


def flipped(at: int, bit: int) -> Callable[[Path], object]:
    def edit(folder: Path) -> None:
        weights = folder / "model.safetensors"
        content = bytearray(weights.read_bytes())
        content[at % len(content)] ^= 1 << bit
        weights.write_bytes(content)

    return edit


def replaced(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


contents = st.sampled_from([b"", b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe{\x00", b'{"weight_map": {}}', b"{}"])
faults = st.one_of(
    st.builds(edited, st.sampled_from(KEYS), edits),
    st.just(edited("quantization_config", QUANTISED)),
    st.builds(truncated, st.integers(0, 12_000)),
    st.builds(flipped, st.integers(0, 3000), st.integers(0, 7)),
    st.builds(
        replaced,
        st.sampled_from(
            [
                "config.json",
                "model.safetensors",
                "model.safetensors.index.json",
                "generation_config.json",
                "tokenizer.json",
                "tokenizer_config.json",
            ]
        ),
        st.one_of(contents, st.binary(max_size=30)),
    ),
    st.just(lambda folder: (folder / "config.json").unlink()),
    st.just(lambda folder: (folder / "model.safetensors").unlink()),
)


@given(fault=faults, as_draft=st.booleans())
@many
def test_models(fault: Callable[[Path], object], as_draft: bool, model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.rmtree(broken, ignore_errors=True)
    shutil.copytree(model, broken)
    fault(broken)
    (tmp_path / "tokens.jsonl").write_bytes(VALID)
    models = ["--target", str(model), "--draft", str(broken)] if as_draft else ["--target", str(broken)]
    require_sane(tmp_path, [str(tmp_path / "tokens.jsonl"), *models])


# Files that must be left alone, and those that cannot be read


@pytest.mark.parametrize("page", ["tokens.jsonl", "control.jsonl", "tiny/config.json", "tiny/model.safetensors"])
def test_a_page_never_replaces_a_file_that_is_read(page: str, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "tiny")
    for name in ("tokens.jsonl", "control.jsonl"):
        (tmp_path / name).write_bytes(VALID)
    (tmp_path / "link.html").symlink_to(tmp_path / page)
    for html in (page, "link.html"):
        given = [str(tmp_path / "tokens.jsonl"), "--control", str(tmp_path / "control.jsonl")]
        given += ["--target", str(tmp_path / "tiny"), "--html", str(tmp_path / html)]
        assert require_sane(tmp_path, given) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "generation_config.json"])
def test_a_pipe_in_a_models_folder_is_not_waited_for(name: str, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "tiny")
    (tmp_path / "tiny" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "tiny" / name)
    (tmp_path / "tokens.jsonl").write_bytes(VALID)
    assert require_sane(tmp_path, [str(tmp_path / "tokens.jsonl"), "--target", str(tmp_path / "tiny")]) == 2


def test_a_file_without_lines_is_not_read_to_its_end(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a compressed file of zeros, which is a thousand times larger when it is unpacked."""
    monkeypatch.setattr("specnb_audit.token_file.LONGEST_LINE", 1000)
    bomb = tmp_path / "bomb.gz"
    bomb.write_bytes(gzip.compress(b" " * 100_000, mtime=0))
    status, out, err = run(["audit", str(bomb), "--target", str(model)])
    assert (status, out) == (2, "")
    assert "bomb.gz, line 1 is longer than 1,000 bytes" in err


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


# specnb compare


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_comparison_that_finds_no_room_is_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokens.jsonl").write_bytes(VALID)
    with contextlib.suppress(OSError), open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert main(["compare", *[str(tmp_path / "tokens.jsonl")] * 2]) == 2
    assert capsys.readouterr().err == "specnb: the report cannot be printed: No space left on device\n"


# specnb collect

PROMPTS = b"[1]\n[2, 3]\n"
OURS = b'{"prompt": [1], "tokens": [7]}\n'
OTHERS = b'{"prompt": [9], "tokens": [7]}\n'
out_contents = st.one_of(
    st.none(),
    st.integers(0, len(OURS)).map(lambda at: OURS[:at]),
    st.integers(0, len(OURS)).map(lambda at: OURS + OURS[:at]),
    st.sampled_from([OTHERS, OURS + OTHERS, b"notes", b"\x1f\x8b\x00", b"\n\n", b"[" * 5000, b"[1]\n"]),
    encoded,
)
ids = st.lists(st.integers(-1, 5) | numbers, max_size=3)
answers = st.one_of(
    st.builds(lambda found: {"choices": [{"token_ids": found}]}, ids),
    st.builds(
        lambda key, found: {key: found}, st.sampled_from(["choices", "tokens", "__verbose", "meta_info"]), values
    ),
    st.builds(lambda found: {"choices": [found]}, values),
    st.builds(lambda found: {"choices": [{"prompt_token_ids": found, "token_ids": [1]}]}, values),
    values,
).map(_dumped)
replies = st.one_of(answers.map(lambda text: text.encode("utf-8", "surrogatepass")), st.just(b"[" * 5000), st.binary())
collect_options = st.one_of(
    st.tuples(
        st.sampled_from(
            [
                *("--temperature", "--top-k", "--top-p", "--max-new-tokens", "--seed", "--gamma"),
                *("--count", "--parallel", "--retries"),
            ]
        ),
        numeric,
    ),
    st.tuples(st.just("--extra"), st.sampled_from(["", "{", "[1]", "5", "null", "{}", '{"a": 1}', "[" * 5000])),
    st.tuples(st.just("--model"), st.sampled_from(["", "name", "\n"])),
    st.tuples(st.just("--speculation"), st.sampled_from(["draft", "x"])),
    st.tuples(
        st.just("--url"),
        st.sampled_from(["", "name", "http://[::1", "http://a b", "http://", "\n", "http://127.0.0.1:x", "data:,x"]),
    ),
)


@given(
    prompts=st.just(PROMPTS) | encoded, old=out_contents, reply=replies, options=st.lists(collect_options, max_size=3)
)
@many
def test_collected_tokens(
    prompts: bytes, old: bytes | None, reply: bytes, options: list[tuple[str, str]], tmp_path: Path
) -> None:
    """What is not the beginning of the same collection is never changed, whatever server and options are."""
    asked, out = tmp_path / "prompts.jsonl", tmp_path / "tokens.jsonl"
    asked.write_bytes(prompts)
    out.unlink(missing_ok=True)
    if old is not None:
        out.write_bytes(old)

    def answered(request: Any, timeout: float) -> io.BytesIO:
        listed = request.full_url.endswith("/v1/models") and not request.full_url.startswith("data:")
        return io.BytesIO(b'{"data": [{"id": "name"}]}' if listed else reply)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("urllib.request.urlopen", answered)
        patch.setattr("time.sleep", lambda seconds: None)
        given = [f"{name}={value}" for name, value in [("--url", "http://localhost"), *options]]
        status, printed, err = run(["collect", "--prompts", str(asked), "--out", str(out), *given])
    assert asked.read_bytes() == prompts
    now = out.read_bytes() if out.exists() else b""
    if status == 2:
        require_refusal(printed, err)
        assert "Error: " not in err  # of Python, which names nothing that was given
        kept = (old or b"")[: (old or b"").rfind(b"\n") + 1]
        assert now in (old or b"", kept) or now.startswith(kept)
        assert now.startswith(old or b"") or OURS.startswith((old or b"")[len(kept) :]) or b"prompt" in (old or b"")
    else:
        assert (status, printed) == (0, "")
        assert all(one.tokens for one in read_tokens(out))


@pytest.mark.parametrize("content", [b"notes", OURS + b"notes", OTHERS + OURS[:9], b"\x1f\x8b\x00", PROMPTS, b"[1]"])
def test_a_file_of_something_else_is_never_cut(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(PROMPTS)
    (tmp_path / "notes").write_bytes(content)
    given = ["collect", "--url", "http://127.0.0.1:9", "--retries", "0", "--out", str(tmp_path / "notes")]
    status, out, err = run([*given, "--prompts", str(tmp_path / "prompts.jsonl")])
    assert (status, out) == (2, "")
    assert "is not for prompt" in err
    assert (tmp_path / "notes").read_bytes() == content


def test_the_file_of_prompts_is_not_the_file_of_tokens(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(OURS)
    status, _, err = run(["collect", "--url", "http://127.0.0.1:9", "--prompts", str(prompts), "--out", str(prompts)])
    assert status == 2
    assert "is the file of prompts" in err
    assert prompts.read_bytes() == OURS


def test_tokens_are_not_collected_into_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(PROMPTS)
    os.mkfifo(tmp_path / "pipe")
    given = ["collect", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "pipe")]
    assert "is a pipe or a device" in run([*given, "--prompts", str(tmp_path / "prompts.jsonl")])[2]
