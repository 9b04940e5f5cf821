"""Generated sequences in a file, or a pipe, of JSON lines: `{"prompt": [ids], "tokens": [ids]}`.

A line may also have `steps`, the number of tokens emitted by each step; `batch`, what sequences
that were generated together share; `seed`; `forced`, `min_tokens` and `allowed_token_ids`
(`specnb_audit.constraints`); `logprobs`, the engine's own; and `kind`, a name of the kind of text.
Names of vLLM and SGLang are read, too.
"""

from __future__ import annotations

import codecs
import gzip
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from queue import Empty, Queue
from typing import Any, NamedTuple

LINE = '{"prompt": [ids], "tokens": [ids]}'
GZIP = b"\x1f\x8b"
# bytes; no sequence is as long, and a stream or a damaged file may have no end of a line.
LONGEST_LINE = 2**26
ONE_EACH = "each line is one sequence"
REGULAR = "give a file (only specnb-audit audit - reads a pipe)"
WAITING = 1000  # lines of a pipe that are read ahead at most
LARGEST = 2**63 - 1  # of int64, the dtype of token ids


OPTIONAL: dict[str, tuple[Callable[[Any], bool], str]] = {
    "batch": (lambda value: type(value) in (int, str), "a number or a name"),
    "seed": (lambda value: type(value) is int, "an integer"),
    "min_tokens": (lambda value: type(value) is int and value >= 0, "a number of tokens from 0"),
    "kind": (lambda value: type(value) is str, "a name"),
}


class Sequence(NamedTuple):
    where: str
    prompt: list[int]
    tokens: list[int]
    steps: list[int] | None = None
    batch: int | str | None = None
    seed: int | None = None
    forced: list[int] | None = None
    min_tokens: int | None = None
    allowed: list[Any] | None = None
    logprobs: list[float | None] | None = None
    kind: str | None = None


def read_tokens(file: Path, bonus: bool = True) -> list[Sequence]:
    """The sequences in `file`, which may be compressed by gzip. Raises `ValueError`, with file and
    line, for anything else.

    `bonus` says whether `steps` count the last token of each step, which was not drafted.
    """
    sequences = [_sequence(_parsed(line, where), where, bonus) for line, where in lines_in(file, LINE)]
    for sequence in sequences:
        require_alike(sequences[0], sequence)
    return sequences


def save_tokens(file: Path, prompts: Iterable[Any], completions: Iterable[Any]) -> None:
    """Write a file for `specnb-audit audit`: `completions`, such as `Generation.tokens`, and their
    prompts. If one is no list of tokens, a file that was there stays.

    >>> save_tokens(Path(os.devnull), [[1, 2]], [[3]])
    """
    # Here, because the command reads its options before torch is imported
    from specnb.arguments import token_list
    from specnb.record import write_lines

    rows = zip(prompts, completions, strict=True)
    lists = ((token_list("a prompt", prompt), token_list("a completion", tokens)) for prompt, tokens in rows)
    write_lines(file, ({"prompt": prompt, "tokens": tokens} for prompt, tokens in lists))


class Seeds:
    """The seeds declared so far: a later sequence or batch of a seed may have the random numbers of
    the first, and an audit needs independent ones."""

    def __init__(self) -> None:
        self.batch_of: dict[int, int | str | None] = {}
        self.count = 0

    def repeated(self, sequence: Sequence) -> bool:
        """Whether an earlier sequence of another batch declares the seed of `sequence`; counts
        those."""
        if sequence.seed is None:
            return False
        known = sequence.seed in self.batch_of
        batch = self.batch_of.setdefault(sequence.seed, sequence.batch)
        again = known and (sequence.batch is None or sequence.batch != batch)
        self.count += again
        return again

    def note(self) -> list[str]:
        if not self.count:
            return []
        some = "1 sequence repeats" if self.count == 1 else f"{self.count:,} sequences repeat"
        return [f"{some} a seed that is declared before and may share its random numbers; left out of the audit"]


def require_alike(first: Sequence, other: Sequence) -> None:
    if (other.steps is None) != (first.steps is None):
        raise ValueError(f"{other.where}: give steps in all lines or in none")


def lines_in(file: Path, form: str) -> Iterator[tuple[bytes, str]]:
    """The lines of `file` that are not blank, unpacked, and where each is, one at a time. Raises
    `ValueError`, which says what `form` a line has, where there are none."""
    if file.is_fifo() or file.is_char_device():
        raise ValueError(f"{file} is a pipe or a device, which may have no end; {REGULAR}")
    where = ""
    with file.open("rb") as raw:
        packed = raw.peek(len(GZIP)).startswith(GZIP)
        stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
        # JSON may hold U+2028 and other characters that str.splitlines takes for the end of a
        # line.
        for number, line in enumerate(iter(lambda: stream.readline(LONGEST_LINE), b""), 1):
            if len(line) == LONGEST_LINE:
                raise ValueError(f"{file.name}, line {number} is longer than {LONGEST_LINE:,} bytes; {ONE_EACH}")
            if _is_line(line):
                where = f"{file.name}, line {number}"
                yield line, where
    if not where:
        raise ValueError(f"{file.name} is empty; each line is {form}")


def _is_line(line: bytes) -> bool:
    return bool(line.removeprefix(codecs.BOM_UTF8).strip())


def _sequence(entries: dict[str, Any], where: str, bonus: bool = True) -> Sequence:
    prompt, tokens = (_integers(entries, key, where) for key in ("prompt", "tokens"))
    for name, (is_valid, words) in OPTIONAL.items():
        if (value := entries.get(name)) is not None and not is_valid(value):
            raise ValueError(f"{where}: {name!r} is {_short(json.dumps(value))}; give {words}, or leave it out")
    steps, forced = (
        None if entries.get(name) is None else _integers(entries, name, where) for name in ("steps", "forced")
    )
    total = 0 if steps is None else sum(steps) + len(steps) * (not bonus)
    if steps is not None and total != len(tokens):
        raise ValueError(
            f"{where}: steps add up to {_short(str(total))} for {len(tokens)} tokens; give the number of tokens of "
            "each step, its recovered or bonus token included"
        )
    allowed, logprobs = _allowed(entries, where), _logprobs(entries, where, len(tokens))
    given = {name: entries.get(name) for name in OPTIONAL}
    return Sequence(where, prompt, tokens, steps, forced=forced, allowed=allowed, logprobs=logprobs, **given)


def _allowed(entries: dict[str, Any], where: str) -> list[Any] | None:
    value = entries.get("allowed_token_ids")
    lists = value if isinstance(value, list) and not all(type(one) is int for one in value) else [value]
    if any(one is not None and not (isinstance(one, list) and all(type(id_) is int for id_ in one)) for one in lists):
        raise ValueError(f"{where}: 'allowed_token_ids' is neither a list of ids nor one such list, or null, per place")
    return value


def _logprobs(entries: dict[str, Any], where: str, n: int) -> list[float | None] | None:
    value = entries.get("logprobs")
    if isinstance(value, dict) and isinstance(value.get("content"), list):  # of a chat
        value = [one.get("logprob") if isinstance(one, dict) else one for one in value["content"]]
    value = value.get("token_logprobs", value) if isinstance(value, dict) else value
    if value is None:
        return None
    numbers = isinstance(value, list) and all(one is None or type(one) in (int, float) for one in value)
    if not numbers or len(value) != n:
        raise ValueError(f"{where}: 'logprobs' is not a list of {n} numbers, one for each token")
    return [None if one is None else float(one) for one in value]


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    entries = decoded(line, where, LINE)
    if not isinstance(entries, dict):
        raise ValueError(f"{where} is {_short(line.decode('utf-8').strip())}; each line is {LINE}")
    return _renamed(entries, where)


def _renamed(entries: dict[str, Any], where: str) -> dict[str, Any]:
    outputs = entries.get("outputs")
    if isinstance(outputs, list) and len(outputs) > 1:
        raise ValueError(f"{where} has {len(outputs)} outputs; {ONE_EACH}: write a line for each, with its prompt")
    one = outputs[0] if isinstance(outputs, list) and outputs else {}
    given = (one if isinstance(one, dict) else {}) | {
        name: value for name, value in entries.items() if value is not None
    }
    prompt = given.get("prompt_token_ids", given.get("prompt", given.get("input_ids")))
    own = {"prompt": prompt, "tokens": given.get("tokens", given.get("token_ids", given.get("output_ids")))}
    return entries | {name: value for name, value in own.items() if value is not None}


def decoded(line: bytes, where: str, form: str) -> Any:
    """What a line of JSON holds. Raises `ValueError` that says where it is and what `form` it
    should have."""
    try:
        return json.loads(line.decode("utf-8-sig"))  # a file may begin with a mark of its encoding
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 (byte {error.start + 1} of the line); save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ValueError(f"{where} is not JSON ({str(error).split(';')[0]}); each line is {form}") from None


def _integers(entries: dict[str, Any], key: str, where: str) -> list[int]:
    if key not in entries:
        raise ValueError(f"{where} has no {key!r}; each line is {LINE}")
    values = entries[key]
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{where}: {key!r} is not a list of integers; each line is {LINE}")
    outside = [value for value in values if not 0 <= value <= LARGEST]
    if outside:
        raise ValueError(f"{where}: {key!r} has {_short(str(outside[0]))}; the range is 0 to 2^63 - 1")
    return values


def _short(words: str) -> str:
    return words if len(words) <= 60 else words[:57] + "..."


def read_stream(lines: Iterable[bytes], name: str = "stdin") -> Iterator[Sequence | None]:
    """The sequences in `lines` as they arrive; None where no other line is waiting. Raises
    `ValueError`, with the number of the line, for what is no sequence."""
    queue: Queue[bytes | BaseException | None] = Queue(WAITING)
    threading.Thread(target=_fill, args=(lines, queue), daemon=True).start()
    first, number = None, 0
    while True:
        try:
            item = queue.get_nowait()
        except Empty:
            yield None
            item = queue.get()
        if item is None:
            break
        if isinstance(item, BaseException):
            raise item
        number += 1
        if len(item) > LONGEST_LINE:
            raise ValueError(f"{name}, line {number} is longer than {LONGEST_LINE:,} bytes; {ONE_EACH}")
        if item.startswith(GZIP):
            raise ValueError(f"{name} is compressed; unpack it first: gzip -dc FILE | specnb-audit audit - ...")
        where = f"{name}, line {number}"
        if _is_line(item):
            sequence = _sequence(_parsed(item, where), where)
            first = first or sequence
            require_alike(first, sequence)
            yield sequence
    if first is None:
        raise ValueError(f"{name} is empty; each line is {LINE}")


def lines_of(descriptor: int) -> Iterator[bytes]:
    r"""The lines of an open file as they arrive. Without Python's buffered reader: a thread that
    waits in one cannot be left behind when the program ends. A line longer than `LONGEST_LINE`
    is cut, and the last."""
    begun: list[bytes] = []  # pieces of the last line
    while chunk := os.read(descriptor, 2**16):
        first, *more = chunk.split(b"\n")
        begun.append(first)
        if more:
            yield b"".join(begun)
            yield from more[:-1]
            begun = more[-1:]
        elif sum(map(len, begun)) > LONGEST_LINE:
            break
    if any(begun):
        yield b"".join(begun)


def _fill(lines: Iterable[bytes], queue: Queue[bytes | BaseException | None]) -> None:
    try:
        for line in lines:
            queue.put(line)
        queue.put(None)
    except BaseException as error:  # handed to the reader
        queue.put(error)
