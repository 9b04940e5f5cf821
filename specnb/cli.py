"""The command `specnb`: `specnb audit TOKENS.jsonl --target FOLDER_OR_NAME` and its options.

Other commands are added by their own modules: `specnb collect` and `specnb compare`.

Exit status 0: no deviation was found. 1: exactness is rejected. 2: no verdict, and one line on stderr says why and
names the file. 130: interrupted (Ctrl-C), 143: terminated (SIGTERM), both with the report on the tokens so far, if
there were any, unless that rejects exactness.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from logging import CRITICAL
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import logging

from specnb.audit import Engine, compare_command
from specnb.audit.adapters import collect_command
from specnb.audit.claimed import ENGINE_ORDERS, NOT_AUDITED, claimed_sampling
from specnb.audit.report import Report
from specnb.audit.run import Settings, audit_completions, require_models
from specnb.audit.teacher_forcing import Completion, Models
from specnb.audit.token_file import LINE, read_tokens
from specnb.audit.token_file import Sequence as Line
from specnb.audit.token_stream import lines_of, read_stream
from specnb.models.loading import load_model
from specnb.report.results import write
from specnb.sampling.distributions import Sampling

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
INTERRUPTED = 128 + signal.SIGINT  # as shells report it
TERMINATED = 128 + signal.SIGTERM
STDIN = Path("-")
LONGEST = 600  # characters of a message


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived. The audit ends as at Ctrl-C, with the report so far; no handler of `Exception` swallows it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    >>> main(["audit", "missing.jsonl", "--target", "."])  # prints one line to stderr
    2
    """
    try:
        options = _parser().parse_args(argv)
        with _sigterm_raises() as terminated:
            if hasattr(options, "run"):  # a command other than audit
                with redirect_stdout(io.StringIO()) as printed:
                    status: int = options.run(options)
                _print(printed.getvalue())
                return status
            report = _audited(options)
            if options.html is not None:
                _write_page(options.html, report.to_html())
            _print(json.dumps(report.to_dict(), indent=1, allow_nan=False) + "\n" if options.json else f"{report}\n")
    except Terminated:
        print("specnb: terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("specnb: interrupted before there was anything to report", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # status 1 is a verdict, so nothing unforeseen may end with it
        print(f"specnb: {_one_line(error)}", file=sys.stderr)
        return 2
    if report.rejected:
        return 1
    return (TERMINATED if terminated else INTERRUPTED) if report.interrupted else 0


@contextmanager
def _sigterm_raises() -> Iterator[list[int]]:
    """SIGTERM raises `Terminated` inside, so that partial files are removed; other threads cannot set handlers.

    The list yielded has an entry once that has happened.
    """
    arrived: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield arrived
        return

    def handle(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield arrived
    finally:
        signal.signal(signal.SIGTERM, before)


def _one_line(error: BaseException) -> str:
    """The message of `error` in one line, with its type where the message alone is not clear."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    words = " ".join(str(error).split())
    named = words if words and isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {words}"
    return named if len(named) <= LONGEST else named[: LONGEST - 3] + "..."


def _audited(options: argparse.Namespace) -> Report:
    """The report. Everything that can be checked without a model is checked before one is loaded."""
    sampling, draft_sampling = _claimed(options), _draft_sampling(options)
    progress = True if sys.stderr is not None and sys.stderr.isatty() else _say
    ignore, ends = tuple(options.ignore), (options.eos, options.max_new_tokens)
    settings = Settings(options.delta, options.seed, *ends, ignore, options.stop, progress)
    settings.auditor()  # raises for bad settings
    _require_limit(options.limit)
    if options.numerics_positions < 0:
        raise ValueError(f"--numerics-positions is {options.numerics_positions}; give a number of positions, or 0")
    dtype = None if options.engine_dtype is None else DTYPES[options.engine_dtype]
    engine = Engine(dtype, options.logit_tolerance, positions=options.numerics_positions)
    _require_device(options.device)
    if options.html is not None:
        _require_writable(options.html)
        _require_other_file(options.html, options)
    sequences = None if options.tokens == STDIN else read_tokens(options.tokens)[: options.limit]
    control = [] if options.control is None else read_tokens(options.control)
    target = _loaded(options.target, options)
    draft, suspected = (
        None if name is None else _loaded(name, options) for name in (options.draft, options.alternative)
    )
    models = Models(target, sampling, draft, draft_sampling or sampling, suspected)
    try:
        engine = replace(engine, control=_completions(control, models))
        if sequences is None:
            return audit_completions(models, _from_stdin(models, options.limit), settings, engine)
        given = _completions(sequences, models)
        return audit_completions(models, given, settings, engine, expected=sum(len(one.tokens) for one in given))
    except Exception as error:
        raise ValueError(f"cannot audit {options.tokens} against {options.target}: {_one_line(error)}") from error


def _claimed(options: argparse.Namespace) -> Sampling:
    """The settings claimed. Raises `ValueError` for settings that cannot be claimed, by name."""
    names = ("temperature", "top_k", "top_p", "min_p", *NOT_AUDITED)
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return claimed_sampling(given, options.filter_order)


def _draft_sampling(options: argparse.Namespace) -> Sampling | None:
    given = (options.draft_temperature, options.draft_top_k, options.draft_top_p)
    if given == (None, None, None):
        return None
    default = (options.temperature, options.top_k, options.top_p)
    return Sampling(*(own if value is None else value for value, own in zip(given, default, strict=True)))


def _require_limit(limit: int | None) -> None:
    if limit is not None and limit < 1:
        raise ValueError(f"--limit is {limit}; give the number of sequences to read, at least 1")


def _completions(sequences: Sequence[Line], models: Models) -> list[Completion]:
    """The sequences, checked. Raises `ValueError`, with file and line, for one that a model cannot judge."""
    completions = [Completion(one.prompt, one.tokens, one.steps) for one in sequences]
    if completions:
        require_models(models, completions, [one.where for one in sequences])
    return completions


def _from_stdin(models: Models, limit: int | None) -> Iterator[Completion | None]:
    if sys.stdin is None:
        raise ValueError("stdin is closed; give a file, or a pipe that writes to this command")
    count = 0
    for sequence in read_stream(lines_of(sys.stdin.fileno())):
        yield None if sequence is None else _completions([sequence], models)[0]
        count += sequence is not None
        if count == limit:
            return


def _say(line: str) -> None:
    print(f"specnb: {line}", file=sys.stderr, flush=True)


def _require_device(name: str) -> None:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "meta":
            raise ValueError("it computes nothing")
    except Exception as error:
        raise ValueError(f"--device {name} cannot be used ({_one_line(error)}); give cpu, or cuda on a GPU") from None


def _require_writable(page: Path) -> None:
    """Raises `OSError` or `ValueError` unless `page` can be written; leaves nothing behind and changes no file."""
    if page.is_fifo():
        return  # opening it would wait for a reader
    if page.exists():
        with page.open("ab"):
            return
    if not page.parent.is_dir():
        raise ValueError(f"--html {page} cannot be written: there is no folder {page.parent}")
    try:
        tempfile.TemporaryFile(dir=page.parent).close()
        page.lstat()
    except FileNotFoundError:
        return  # the file does not exist yet; any other OSError names it
    except OSError as error:
        raise ValueError(f"--html {page} cannot be written: {error.strerror}") from None


def _require_other_file(page: Path, options: argparse.Namespace) -> None:
    """Raises `ValueError` where `page` is a file that the audit reads: it would be replaced."""
    read = [options.tokens, *([] if options.control is None else [options.control])]
    for name in (options.target, options.draft, options.alternative):
        read += Path(name).iterdir() if name and Path(name).is_dir() else []
    if page.is_file() and any(file.is_file() and page.samefile(file) for file in read):
        raise ValueError(f"--html {page} is a file that the audit reads; give another one")


def _write_page(page: Path, content: str) -> None:
    """Writes the page; raises `ValueError`, naming it, where that fails after all, such as on a disk that is full."""
    try:
        if page.is_file() or not page.exists():
            write(page, content)  # atomic
        else:
            page.write_text(content, encoding="utf-8")  # a device such as /dev/stdout, which must not be replaced
    except OSError as error:
        raise ValueError(f"--html {page} cannot be written: {error.strerror}") from None


def _print(report: str) -> None:
    if sys.stdout is None:
        raise ValueError("the report cannot be printed: stdout is closed")
    try:
        print(report, end="", flush=True)
    except BrokenPipeError:  # the reader closed the pipe; the exit status still holds the verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise ValueError(f"the report cannot be printed: {error.strerror}") from None


def _loaded(name: str, options: argparse.Namespace) -> PreTrainedModel:
    """The model of that name or folder. Raises `ValueError`, naming it, for one that cannot be loaded."""
    _require_model(name)
    verbosity = logging.get_verbosity()
    logging.set_verbosity(CRITICAL)  # a failure is reported below, in one line
    try:
        with warnings.catch_warnings(record=True) as warned:
            model = load_model(name, options.device, DTYPES[options.dtype], packed=False)
    except Exception as error:
        raise ValueError(f"cannot load the model {name}: {_one_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
    for warning in warned:
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return model


def _require_model(name: str) -> None:
    """Raises `ValueError` for a path that is not a folder, and for damaged files in the folder.

    A model's name on the hub has at most one slash; anything else is taken for a path.
    """
    folder = Path(name)
    if not name.strip():
        raise ValueError("the name of a model is empty; give a folder or a model's name")
    if folder.is_file():
        raise ValueError(f"{name} is a file; give the folder that holds config.json and the weights")
    if (name.startswith((".", "/", "~")) or name.count("/") > 1) and not folder.is_dir():
        raise ValueError(f"there is no folder {name}; give one with a model in it, or a model's name")
    if folder.is_dir():
        _require_files(folder)


def _require_files(folder: Path) -> None:
    """Raises `ValueError` for a configuration or weights that cannot be read or do not fit together."""
    config, tensors = folder / "config.json", 0
    if not config.is_file():
        raise ValueError(f"{folder} has no config.json; give the folder that holds it and the weights")
    for file in folder.iterdir():
        if not file.is_file() and not file.is_dir():  # opening a pipe would wait for ever
            raise ValueError(f"{file} is neither a file nor a folder; copy it again")
    for file in [config, *sorted(folder.glob("*.index.json"))]:
        _require_json(file)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as weights:
                tensors += len(weights.keys())
        except (SafetensorError, OSError) as error:
            raise ValueError(f"the weights {file} are truncated or damaged ({error}); copy them again") from None
    layers = json.loads(config.read_text(encoding="utf-8")).get("num_hidden_layers")
    if isinstance(layers, int) and layers > tensors > 0:  # creating that many layers could take forever
        raise ValueError(f"{config} has {layers} layers, and the weights have {tensors} tensors: one of them is wrong")


def _require_json(file: Path) -> None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ValueError(f"{file} is not JSON ({reason}); copy it again") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object; copy it again")


EXAMPLES = """\
The file has one sequence per line: {line}.
Optional: "steps": [number of tokens emitted by each step]. It may be compressed (.gz). "-" reads lines from a pipe and
audits them while they arrive.

examples:
  specnb audit tokens.jsonl --target gpt2
      tokens sampled from gpt2 at temperature 1
  specnb audit tokens.jsonl --target ./llama --draft ./llama-small --temperature 0.7 --top-p 0.9
      speculative decoding with a draft model; --draft adds bets on its typical bugs
  specnb audit tokens.jsonl --target ./llama --temperature 0 --engine-dtype bfloat16
      greedy decoding by an engine that computes in bfloat16: near ties are no deviation
  specnb audit tokens.jsonl --control plain.jsonl --target ./llama
      plain.jsonl is of the same engine without speculation: whose are the deviations?
  specnb audit tokens.jsonl --target ./llama --temperature 0.7 --top-k 40 --filter-order llama.cpp
      the temperature is applied after top-k, as in llama.cpp
  specnb audit tokens.jsonl --target ./llama --alternative ./llama-4bit
      were quantised weights used? Adds the likelihood ratio against them
  generate-tokens | specnb audit - --target ./llama --stop --limit 500
      from a pipe, until exactness is rejected or 500 sequences were read
  specnb audit tokens.jsonl --target ./llama --eos 2 --max-new-tokens 256 --json > report.json
      also checks where sequences end; the report as JSON

settings that cannot be audited, and are refused: {refused}

exit status:
  0    no deviation was found, or none that numerics do not explain
  1    exactness is rejected
  2    no verdict; one line on stderr says why
  130  interrupted (Ctrl-C); the report so far is printed
  143  terminated (SIGTERM); the report so far is printed
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specnb", description="Tests whether a sampler is lossless.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    audit_parser = commands.add_parser(
        "audit",
        help="test generated tokens against the target's distribution",
        description="Tests whether tokens were sampled from a model's distribution under the settings claimed.",
        epilog=EXAMPLES.format(line=LINE, refused=", ".join(NOT_AUDITED)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    audit_parser.add_argument("tokens", type=Path, metavar="TOKENS.jsonl", help="the generated sequences; - for a pipe")
    _add_models(audit_parser.add_argument_group("models").add_argument)
    _add_claims(audit_parser.add_argument_group("settings claimed").add_argument)
    _add_engine(audit_parser.add_argument_group("the engine").add_argument)
    _add_test(audit_parser.add_argument_group("the test and its report").add_argument)
    collect_command.add_to(commands)
    compare_command.add_to(commands)
    return parser


Add = Callable[..., Any]


def _add_models(add: Add) -> None:
    add("--target", required=True, metavar="MODEL", help="folder or name of the model that the tokens should come from")
    add("--draft", metavar="MODEL", help="folder or name of the draft model")
    add("--alternative", metavar="MODEL", help="a model that may have been used instead of the target")
    add("--device", default="cpu", help="device of the models (default: cpu)")
    add("--dtype", choices=DTYPES, default="float32", help="dtype of the models (default: float32)")


def _add_claims(add: Add) -> None:
    add("--temperature", type=float, metavar="T", default=1.0, help="temperature; 0 is argmax (default: 1)")
    add("--top-k", type=int, metavar="K", help="top-k; 0: none (default)")
    add("--top-p", type=float, metavar="P", default=1.0, help="top-p (default: 1, none)")
    add("--min-p", type=float, metavar="P", default=0.0, help="min-p (default: 0, none)")
    orders = ", ".join(ENGINE_ORDERS)
    add("--filter-order", metavar="ORDER", default="transformers", help=f"{orders}, or names such as top-p,temperature")
    for name in ("temperature", "top-p"):
        add(f"--draft-{name}", type=float, metavar="X", help=f"{name} of the draft (default: as claimed)")
    add("--draft-top-k", type=int, metavar="K", help="top-k of the draft (default: as claimed)")
    for name in NOT_AUDITED:
        add(f"--{name.replace('_', '-')}", type=_number_or_words, help=argparse.SUPPRESS)
    add("--eos", type=int, action="append", metavar="ID", help="token that ends a sequence; may be repeated")
    add("--max-new-tokens", type=int, metavar="N", help="length of a sequence that no --eos token ends")


def _number_or_words(value: str) -> float | str:
    try:
        return float(value)
    except ValueError:
        return value


def _add_engine(add: Add) -> None:
    add("--control", type=Path, metavar="FILE", help="sequences of the same engine without speculation")
    add("--engine-dtype", choices=DTYPES, help="dtype that the engine computes in (default: unknown)")
    add("--logit-tolerance", type=float, metavar="GAP", help="gap of two logits below which either token may be kept")
    add("--numerics-positions", type=int, metavar="N", default=16, help="positions to measure them at (default: 16)")


def _add_test(add: Add) -> None:
    add("--delta", type=float, metavar="D", default=1e-6, help="false-alarm rate (default: 1e-6)")
    add("--seed", type=int, metavar="S", default=0, help="seed of the test's own uniforms (default: 0)")
    add("--ignore", action="append", default=[], metavar="KIND", help="leave out a kind of deviation; may be repeated")
    add("--limit", type=int, metavar="N", help="read at most so many sequences")
    add("--stop", action="store_true", help="stop as soon as exactness is rejected")
    add("--json", action="store_true", help="print the report as JSON")
    add("--html", type=Path, metavar="FILE", help="also write the report as an HTML page")


if __name__ == "__main__":
    sys.exit(main())
