"""Files of prompts and tokens, in JSON lines: written as tokens arrive, continued after an interruption."""

from __future__ import annotations

import gzip
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any


def read_prompts(file: Path) -> list[list[int]]:
    r"""The prompts of a file: a line is a list of token ids, or an object whose `prompt` is one. May be gzipped.

    Raises `ValueError`, with the file and the line, for anything else, and for what is no regular file.
    """
    if file.is_fifo() or file.is_char_device():
        raise ValueError(f"{file} is a pipe or a device, which may have no end; give a file")
    content = file.read_bytes()
    try:
        lines = (gzip.decompress(content) if file.suffix == ".gz" else content).decode("utf-8").split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{file.name} is damaged ({error}); each line is a list of token ids, in UTF-8") from None
    prompts = [_prompt(line, f"{file.name}, line {n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{file.name} has no prompts; each line is a list of token ids")
    return prompts


def _prompt(line: str, where: str) -> list[int]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} is not JSON ({str(error).split(';')[0]}); each line is a list of token ids"
        ) from None
    ids = found.get("prompt") if isinstance(found, dict) else found
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise ValueError(f'{where} is neither a list of token ids nor {{"prompt": [ids]}}')
    return ids


def complete_lines(file: Path, prompts: Sequence[Sequence[int]]) -> int:
    """The number of prompts that `file` already has a complete line for; a partial line at its end is cut off.

    Raises `ValueError`, and changes nothing, if the file's lines are not for the first of these prompts, and for what
    is no regular file.
    """
    if not file.exists():
        return 0
    if not file.is_file() and not file.is_dir():
        raise ValueError(f"{file} is a pipe or a device; give a file, which can be continued")
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines = [line for line in whole.split(b"\n") if line.strip()]
    wrong = [n for n, line in enumerate(lines) if n >= len(prompts) or not _is_for(line, prompts[n])]
    rest = content[len(whole) :]
    if rest and not (len(lines) < len(prompts) and _begins(rest, prompts[len(lines)])):
        wrong.append(len(lines))
    if wrong:
        raise ValueError(
            f"{file.name}, line {wrong[0] + 1} is not for prompt {wrong[0] + 1}: the file is of other prompts. "
            "Delete it or give another one"
        )
    if rest:
        file.write_bytes(whole)
    return len(lines)


def _is_for(line: bytes, prompt: Sequence[int]) -> bool:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.get("prompt") == list(prompt)


def _begins(rest: bytes, prompt: Sequence[int]) -> bool:
    """Whether `rest` is the beginning of a line for `prompt`, as `write_tokens` writes it."""
    line = json.dumps({"prompt": list(prompt), "tokens": []}).removesuffix("]}").encode()
    return rest[: len(line)] == line[: len(rest)]


def write_tokens(
    file: Path, prompts: Sequence[list[int]], completions: Iterable[Sequence[int]], say: Callable[[str], None] | None
) -> int:
    """Appends a line for each completion as it arrives; returns the number of tokens written.

    `say` gets a line about the progress at most every 10 seconds, and one at the end. Raises `ValueError` if there are
    fewer completions than prompts.
    """
    start = last = time.monotonic()
    count = done = 0
    with file.open("a", encoding="utf-8") as lines:
        for prompt, tokens in _pairs(prompts, completions):
            lines.write(json.dumps({"prompt": list(prompt), "tokens": [int(token) for token in tokens]}) + "\n")
            lines.flush()
            count, done, now = count + len(tokens), done + 1, time.monotonic()
            if say and (now - last > 10 or done == len(prompts)):
                last = now
                say(f"{done} of {len(prompts)} prompts, {count} tokens, {now - start:.0f} s")
    return count


def _pairs(prompts: Sequence[list[int]], completions: Iterable[Sequence[int]]) -> Iterator[tuple[list[int], Any]]:
    made = iter(completions)
    for number, prompt in enumerate(prompts):
        try:
            yield prompt, next(made)
        except StopIteration:
            raise ValueError(f"the engine returned {number} completions for {len(prompts)} prompts") from None


def to_stderr(line: str) -> None:
    """Prints a line to stderr at once."""
    print(line, file=sys.stderr, flush=True)
