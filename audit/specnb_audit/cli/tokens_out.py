"""Files of prompts and tokens in JSON lines: written as tokens arrive, and continued."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from specnb_audit.token_file import LARGEST, decoded, lines_in

FORM = "a list of token ids"
Say = Callable[[str], None] | None


def read_prompts(file: Path) -> list[list[int]]:
    """The prompts of a file: a line is a list of token ids, or an object whose `prompt` is one.
    Raises `ValueError`, with file and line, for anything else."""
    return [_prompt(line, where) for line, where in lines_in(file, FORM)]


def _prompt(line: bytes, where: str) -> list[int]:
    found = decoded(line, where, FORM)
    ids = found.get("prompt") if isinstance(found, dict) else found
    if not isinstance(ids, list) or not all(type(one) is int and 0 <= one <= LARGEST for one in ids):
        raise ValueError(f'{where} is neither a list of token ids nor {{"prompt": [ids]}}')
    return ids


def complete_lines(file: Path, prompts: Sequence[Sequence[int]], settings: dict[str, Any]) -> int:
    """The number of prompts that `file` has a complete line for; a partial last line is cut off.

    Raises `ValueError`, and changes nothing, if the lines are not for the first of these prompts,
    or were made with other `settings`.
    """
    if not file.exists():
        return 0
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    lines = [line for line in whole.split(b"\n") if line.strip()]
    seen = ((parsed(line) or {}).get("prompt") for line in lines)
    wrong = [n for n, prompt in enumerate(seen) if n >= len(prompts) or prompt != list(prompts[n])]
    rest = content[len(whole) :]
    if rest and not (len(lines) < len(prompts) and _begins(rest, prompts[len(lines)])):
        wrong.append(len(lines))
    if wrong:
        raise ValueError(
            f"{file.name}, line {wrong[0] + 1} is not for prompt {wrong[0] + 1}: the file is of other prompts. "
            "Delete it or give another one"
        )
    before = (parsed(lines[0]) or {}).get("settings") if lines else None
    old, new = before if isinstance(before, dict) else {}, json.loads(json.dumps(settings))
    changed = [f"{name} {old[name]}, not {new[name]}" for name in new if old.get(name, new[name]) != new[name]]
    if changed:
        raise ValueError(f"{file.name} was made with {'; '.join(changed)}. Delete it or give another one")
    if rest:
        file.write_bytes(whole)
    return len(lines)


def parsed(words: str | bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(words)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _begins(rest: bytes, prompt: Sequence[int]) -> bool:
    line = json.dumps({"prompt": list(prompt), "tokens": []}).removesuffix("]}").encode()
    return rest[: len(line)] == line[: len(rest)]


def write_tokens(
    file: Path, prompts: Sequence[list[int]], completions: Iterable[Sequence[int]], say: Say, settings: dict[str, Any]
) -> int:
    """Append a line for each completion as it arrives; returns the number of tokens.

    `say` gets a line about the progress every 10 seconds and at the end. The first line of a new
    file has the `settings`. Without a completion there is no file.
    """
    start = last = time.monotonic()
    count, done = 0, 0
    for done, (prompt, tokens) in enumerate(zip(prompts, completions, strict=False), 1):
        line: dict[str, Any] = {"prompt": list(prompt), "tokens": [int(token) for token in tokens]}
        # Anew for each, so that there is no file before the first.
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(line if lines.tell() else line | {"settings": settings}) + "\n")
        count, now = count + len(tokens), time.monotonic()
        if say and (now - last > 10 or done == len(prompts)):
            last = now
            say(f"{done} of {len(prompts)} prompts, {count} tokens, {now - start:.0f} s")
    if done < len(prompts):
        raise ValueError(f"the engine returned {done} completions for {len(prompts)} prompts")
    return count


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
