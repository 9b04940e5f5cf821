"""The command `specnb-audit`: `specnb-audit audit TOKENS.jsonl --target FOLDER_OR_NAME` and others.

torch, transformers and scipy take seconds, so commands import them after options have been read.
Before that, threads are told to sleep while they wait: those that spin cost far more beside a busy
program.

Exit status of `audit`, 0: no deviation was found, and what was asked for would have been. 1: exactness
is rejected. 3: undecided, and the first line of the report says why. 130 and 143: interrupted and
terminated, with the report so far, unless that rejects. Of every command, 2: no answer, and one line
on stderr says why.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from types import FrameType

from specnb_audit import __version__
from specnb_audit.cli import audit_options
from specnb_audit.cli import collect as collect_command
from specnb_audit.cli import explain_acceptance as explain_acceptance_command
from specnb_audit.cli import kernels as kernels_command
from specnb_audit.cli import predict as predict_command

INTERRUPTED = 128 + signal.SIGINT  # as shells report it
TERMINATED = 128 + signal.SIGTERM
UNDECIDED = 3
LONGEST = 600  # characters of a message
for _name, _value in (("OMP_WAIT_POLICY", "PASSIVE"), ("GOMP_SPINCOUNT", "0"), ("KMP_BLOCKTIME", "0")):
    os.environ.setdefault(_name, _value)


class Terminated(KeyboardInterrupt):
    """SIGTERM arrived: the audit ends as at Ctrl-C. No handler of `Exception` swallows it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status.

    >>> main(["audit", "missing.jsonl", "--target", "."])  # prints one line to stderr
    2
    """
    try:
        words = sys.argv[1:] if argv is None else argv
        # Engines spell options with underscores, too.
        spelled = [re.sub("^--[^=]*", lambda name: name[0].replace("_", "-"), word) for word in words]
        options, unknown = _parser().parse_known_args(spelled)
        if unknown:
            declared = ", and what each line of the file may declare" * (options.command == "audit")
            known = f"specnb-audit {options.command} --help lists the options{declared}"
            raise ValueError(f"unrecognized arguments: {' '.join(unknown)}; {known}")
        with _sigterm_raises() as terminated:
            with redirect_stdout(io.StringIO()) as printed:
                status: int = options.run(options)
            print_report(printed.getvalue())
    except Terminated:
        print("specnb-audit: terminated", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print("specnb-audit: interrupted before there was anything to report", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # status 1 is a verdict, so nothing unforeseen may end with it
        print(f"specnb-audit: {one_line(error)}", file=sys.stderr)
        return 2
    return TERMINATED if terminated and status == INTERRUPTED else status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specnb-audit", description="Tests whether a sampler is lossless.")
    parser.add_argument("--version", action="version", version=f"specnb-audit {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in (audit_options, collect_command, kernels_command, predict_command, explain_acceptance_command):
        command.add_to(commands)
    return parser


@contextmanager
def _sigterm_raises() -> Iterator[list[int]]:
    """SIGTERM raises `Terminated` inside, so that partial files are removed; the list yielded then
    has an entry. Threads other than the main one cannot set handlers."""
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


def one_line(error: BaseException) -> str:
    """The message of `error` in one line, with its type where the message alone is not clear."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        name = str(error.filename)
        # a name may have the end of a line.
        return f"{name if name.isprintable() else repr(name)}: {error.strerror}"
    words = " ".join(str(error).split())
    named = words if words and isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {words}"
    return named if len(named) <= LONGEST else named[: LONGEST - 3] + "..."


def print_report(report: str) -> None:
    """Print to stdout; a reader that closed the pipe is no error."""
    try:
        print(report, end="", flush=True)
    except BrokenPipeError:  # the reader closed the pipe; the exit status still holds the verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
