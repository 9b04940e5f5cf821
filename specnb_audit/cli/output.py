"""Exit statuses, errors as one line, and the report on stdout."""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 128 + signal.SIGINT  # as shells report it
TERMINATED = 128 + signal.SIGTERM
LONGEST = 600  # characters of a message


def one_line(error: BaseException) -> str:
    """The message of `error` in one line, with its type where the message alone is not clear."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    words = " ".join(str(error).split())
    named = words if words and isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {words}"
    return named if len(named) <= LONGEST else named[: LONGEST - 3] + "..."


def print_report(report: str) -> None:
    """Prints to stdout. Raises `ValueError` where that cannot be; a reader that closed the pipe is no error."""
    if sys.stdout is None:
        raise ValueError("the report cannot be printed: stdout is closed")
    try:
        print(report, end="", flush=True)
    except BrokenPipeError:  # the reader closed the pipe; the exit status still holds the verdict
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        raise ValueError(f"the report cannot be printed: {error.strerror}") from None
