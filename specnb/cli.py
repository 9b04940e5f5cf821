"""The command `specnb`: `specnb audit TOKENS.jsonl --target FOLDER_OR_NAME` and its options.

Exit status 0: no deviation was found. 1: exactness is rejected. 2: no verdict, and one line on stderr says why and
names the file. 130: interrupted (Ctrl-C) before a verdict. 143: terminated (SIGTERM); nothing is printed or written.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import logging

from specnb.audit import Auditor, audit
from specnb.audit.adapters import collect_command
from specnb.audit.report import Report
from specnb.audit.teacher_forcing import Completion, require_completions
from specnb.audit.token_file import LINE, read_tokens
from specnb.models.loading import load_model
from specnb.report.results import write
from specnb.sampling.distributions import Sampling

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
INTERRUPTED = 128 + signal.SIGINT  # as shells report it
TERMINATED = 128 + signal.SIGTERM
LONGEST = 600  # characters of a message


class Terminated(BaseException):
    """SIGTERM arrived. Not an `Exception`, so that no handler in a library swallows it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status.

    >>> main(["audit", "missing.jsonl", "--target", "."])  # prints one line to stderr
    2
    """
    options = _parser().parse_args(argv)
    try:
        with _sigterm_raises():
            if hasattr(options, "run"):  # a command other than audit
                status: int = options.run(options)
                return status
            report = _audited(options)
            if options.html is not None:
                _write_page(options.html, report.to_html())
            _print(json.dumps(report.to_dict(), indent=1, allow_nan=False) if options.json else str(report))
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
    return INTERRUPTED if report.interrupted else 0


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """SIGTERM raises `Terminated` inside, so that partial files are removed; other threads cannot set handlers."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
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
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    Auditor(options.delta, options.seed, options.eos, options.max_new_tokens)
    _require_device(options.device)
    if options.html is not None:
        _require_writable(options.html, options.tokens)
    sequences = read_tokens(options.tokens)
    target = _loaded(options.target, options)
    draft = None if options.draft is None else _loaded(options.draft, options)
    try:
        for model in (target, draft):
            if model is not None:
                completions = [Completion(one.prompt, one.tokens) for one in sequences]
                require_completions(model, completions, [one.where for one in sequences])
        return audit(
            target,
            [one.tokens for one in sequences],
            prompts=[one.prompt for one in sequences],
            steps=None if sequences[0].steps is None else [one.steps or [] for one in sequences],
            sampling=sampling,
            draft=draft,
            eos=options.eos,
            max_new_tokens=options.max_new_tokens,
            delta=options.delta,
            seed=options.seed,
            stop=options.stop,
            progress=sys.stderr.isatty(),
        )
    except Exception as error:
        raise ValueError(f"cannot audit {options.tokens} against {options.target}: {_one_line(error)}") from error


def _require_device(name: str) -> None:
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
        if device.type == "meta":
            raise ValueError("it computes nothing")
    except Exception as error:
        raise ValueError(f"--device {name} cannot be used ({_one_line(error)}); give cpu, or cuda on a GPU") from None


def _require_writable(page: Path, tokens: Path) -> None:
    """Raises `OSError` or `ValueError` unless `page` can be written; leaves nothing behind and changes no file."""
    if page.is_fifo():
        return  # opening it would wait for a reader
    if page.exists():
        if tokens.exists() and page.samefile(tokens):
            raise ValueError(f"--html {page} is the file of tokens; give another one")
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


def _write_page(page: Path, content: str) -> None:
    if page.is_file() or not page.exists():
        write(page, content)  # atomic
    else:
        page.write_text(content, encoding="utf-8")  # a device such as /dev/stdout, which must not be replaced


def _print(report: str) -> None:
    try:
        print(report)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe; the exit status still holds the verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise ValueError(f"the report cannot be printed: {error.strerror}") from None


def _loaded(name: str, options: argparse.Namespace) -> PreTrainedModel:
    """The model of that name or folder. Raises `ValueError`, naming it, for one that cannot be loaded."""
    _require_model(name)
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)  # a failure is reported below, in one line
    try:
        with warnings.catch_warnings(record=True) as warned:
            model = load_model(name, options.device, DTYPES[options.dtype])
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
Optional: "steps": [number of tokens emitted by each step]. It may be compressed (.gz).

examples:
  specnb audit tokens.jsonl --target gpt2
      tokens sampled from gpt2 at temperature 1
  specnb audit tokens.jsonl --target ./llama --draft ./llama-small --temperature 0.7 --top-p 0.9
      speculative decoding with a draft model; --draft adds bets on its typical bugs
  specnb audit tokens.jsonl --target ./llama --eos 2 --max-new-tokens 256 --json > report.json
      also checks where sequences end; the report as JSON

exit status:
  0    no deviation was found
  1    exactness is rejected
  2    no verdict; one line on stderr says why
  130  interrupted (Ctrl-C) before a verdict
  143  terminated (SIGTERM)
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specnb", description="Tests whether a sampler is lossless.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    audit_parser = commands.add_parser(
        "audit",
        help="test generated tokens against the target's distribution",
        description="Tests whether tokens were sampled from a model's distribution under the settings claimed.",
        epilog=EXAMPLES.format(line=LINE),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    audit_parser.add_argument("tokens", type=Path, metavar="TOKENS.jsonl", help="the generated sequences")
    _add_models(audit_parser.add_argument_group("models").add_argument)
    _add_claims(audit_parser.add_argument_group("settings claimed").add_argument)
    _add_test(audit_parser.add_argument_group("the test and its report").add_argument)
    collect_command.add_to(commands)
    return parser


Add = Callable[..., Any]


def _add_models(add: Add) -> None:
    add("--target", required=True, metavar="MODEL", help="folder or name of the model that the tokens should come from")
    add("--draft", metavar="MODEL", help="folder or name of the draft model")
    add("--device", default="cpu", help="device of the models (default: cpu)")
    add("--dtype", choices=DTYPES, default="float32", help="dtype of the models (default: float32)")


def _add_claims(add: Add) -> None:
    add("--temperature", type=float, metavar="T", default=1.0, help="temperature; 0 is argmax (default: 1)")
    add("--top-k", type=int, metavar="K", help="top-k (default: none)")
    add("--top-p", type=float, metavar="P", default=1.0, help="top-p (default: 1, none)")
    add("--eos", type=int, action="append", metavar="ID", help="token that ends a sequence; may be repeated")
    add("--max-new-tokens", type=int, metavar="N", help="length of a sequence that no --eos token ends")


def _add_test(add: Add) -> None:
    add("--delta", type=float, metavar="D", default=1e-6, help="false-alarm rate (default: 1e-6)")
    add("--seed", type=int, metavar="S", default=0, help="seed of the test's own uniforms (default: 0)")
    add("--stop", action="store_true", help="stop as soon as exactness is rejected")
    add("--json", action="store_true", help="print the report as JSON")
    add("--html", type=Path, metavar="FILE", help="also write the report as an HTML page")


if __name__ == "__main__":
    sys.exit(main())
