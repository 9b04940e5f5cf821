"""Reads sequences from a pipe while they are being generated; lines as in `specnb_audit.token_file`."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from queue import Empty, Queue

from specnb_audit.token_file import GZIP, LINE, LONGEST_LINE, ONE_EACH, Sequence, read_line, require_alike

WAITING = 1000  # lines that are read ahead at most


def read_stream(lines: Iterable[bytes], name: str = "stdin") -> Iterator[Sequence | None]:
    """The sequences in `lines`, as soon as they arrive; None where no other line is waiting.

    Raises `ValueError`, with the number of the line, for what is not a sequence, for an empty stream, and for steps in
    some lines only; `OSError` where the stream cannot be read.

    >>> [one.tokens for one in read_stream([b'{"prompt": [1], "tokens": [5]}', b""]) if one is not None]
    [[5]]
    """
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
            raise ValueError(f"{name} is compressed; unpack it first: gzip -dc FILE | specnb audit - ...")
        if item.strip():
            sequence = read_line(item, f"{name}, line {number}")
            first = first or sequence
            require_alike(first, sequence)
            yield sequence
    if first is None:
        raise ValueError(f"{name} is empty; each line is {LINE}")


def lines_of(descriptor: int) -> Iterator[bytes]:
    r"""The lines of an open file, as soon as they arrive.

    Without Python's buffered reader: a thread that waits in one cannot be left behind when the program ends. Of a line
    longer than `LONGEST_LINE` only a part comes, and nothing after it.

    >>> import os
    >>> reader, writer = os.pipe()
    >>> _ = os.write(writer, b"one\ntwo")
    >>> os.close(writer)
    >>> list(lines_of(reader))
    [b'one', b'two']
    """
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
