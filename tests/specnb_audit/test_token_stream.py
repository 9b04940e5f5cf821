"""Sequences from a pipe: in order, as they arrive, and with the line in every error."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from queue import Queue

import pytest

from specnb_audit.run import Settings, audit_completions
from specnb_audit.teacher_forcing import Completion, Models
from specnb_audit.token_file import WAITING, lines_of, read_stream

GOOD = b'{"prompt": [1], "tokens": [2]}\n'


def test_lines_arrive_in_order() -> None:
    lines = [b'{"prompt": [1], "tokens": [%d]}\n' % token for token in range(50)]
    read = [one for one in read_stream([*lines[:25], b"\n", *lines[25:]]) if one is not None]
    assert [one.tokens for one in read] == [[token] for token in range(50)]
    assert read[-1].where == "stdin, line 51"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "stdin, line 2 is not JSON"),
        (b'{"prompt": [1], "tokens": [2], "steps": [1]}', "stdin, line 2: give steps"),
        (b"\x1f\x8b123", "stdin is compressed; unpack it first"),
    ],
)
def test_a_bad_line_is_named(line: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        list(read_stream([GOOD, line]))


def test_an_empty_stream_and_one_that_fails() -> None:
    def broken() -> Iterator[bytes]:
        yield GOOD
        raise OSError("the pipe broke")

    with pytest.raises(ValueError, match="stdin is empty"):
        list(read_stream([b"\n"]))
    with pytest.raises(OSError, match="the pipe broke"):
        list(read_stream(broken()))


def test_lines_are_found_however_the_pipe_cuts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = iter([b"one\ntw", b"o", b"", b"unread"])
    monkeypatch.setattr("os.read", lambda descriptor, size: next(chunks))
    assert list(lines_of(0)) == [b"one", b"two"]
    chunks = iter([b"\n\none", b"\n", b"two\nthree\n", b""])
    assert list(lines_of(0)) == [b"", b"", b"one", b"two", b"three"]


def test_a_line_without_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = itertools.chain([GOOD], [b"a" * 30] * 4)  # more would raise StopIteration
    monkeypatch.setattr("os.read", lambda descriptor, size: next(chunks))
    for module in ("token_file", "token_stream"):
        monkeypatch.setattr(f"specnb_audit.{module}.LONGEST_LINE", 100)
    with pytest.raises(ValueError, match="stdin, line 2 is longer than 100 bytes; each line is one sequence"):
        list(read_stream(lines_of(0)))


def test_what_has_arrived_is_audited_before_more_is_waited_for() -> None:
    """Nothing is asked of the stream after None until the sequences before it have been judged."""
    judged: list[int] = []

    def target(prefix: tuple[int, ...]) -> list[float]:
        judged.append(len(prefix))
        return [0.5, 0.5]

    def stream() -> Iterator[Completion | None]:
        for _ in range(3):
            before = len(judged)
            yield Completion([], [0, 1])
            yield None
            assert len(judged) > before

    assert audit_completions(Models(target), stream(), Settings(progress=False)).tokens == 6


def test_the_reader_says_where_it_waits() -> None:
    """None comes when the lines before it have been read, and before the next line is there."""
    released = threading.Event()

    def lines() -> Iterator[bytes]:
        yield GOOD
        assert released.wait(60)
        yield GOOD

    found: list[int | None] = []
    for one in read_stream(lines()):
        found.append(None if one is None else one.tokens[0])
        if one is None and 2 in found:
            released.set()
    assert [one for one in found if one is not None] == [2, 2]
    assert None in found[found.index(2) :]


def test_the_thread_that_reads_does_not_keep_the_program() -> None:
    kinds: list[bool] = []

    def lines() -> Iterator[bytes]:
        kinds.append(threading.current_thread().daemon)
        yield GOOD

    before = threading.current_thread()
    assert [one.tokens for one in read_stream(lines()) if one is not None] == [[2]]
    assert kinds == [True]
    assert not before.daemon


def test_a_thousand_lines_are_read_ahead() -> None:
    queue: Queue[bytes | BaseException | None] = Queue(WAITING)
    for _ in range(1000):
        queue.put_nowait(GOOD)
    assert queue.full()


def test_whatever_ends_the_reading_is_handed_over() -> None:
    """Also what is no error, such as an interrupt, after the lines before it."""

    def lines() -> Iterator[bytes]:
        yield GOOD
        raise KeyboardInterrupt

    found: list[object] = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(one for one in read_stream(lines()) if one is not None)
    for one in read_stream([GOOD, GOOD, b" \n", GOOD], name="pipe"):
        if one is not None:
            found.append(one.where)
    assert found[-3:] == ["pipe, line 1", "pipe, line 2", "pipe, line 4"]


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], 'pipe is empty; each line is {"prompt": [ids], "tokens": [ids]}'),
        ([b"\n", b" "], 'pipe is empty; each line is {"prompt": [ids], "tokens": [ids]}'),
        ([b"\n", GOOD, b"\x1f\x8b"], "pipe is compressed; unpack it first: gzip -dc FILE | specnb audit - ..."),
        ([GOOD, b" ", b"[]"], 'pipe, line 3 is []; each line is {"prompt": [ids], "tokens": [ids]}'),
        (
            [b'{"prompt": [1], "tokens": [2], "steps": [1]}', b"", GOOD],
            "pipe, line 3: give steps in all lines or in none",
        ),
        ([GOOD, b" " * 101], "pipe, line 2 is longer than 100 bytes; each line is one sequence"),
    ],
)
def test_the_whole_message(lines: list[bytes], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specnb_audit.token_file.LONGEST_LINE", 100)
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        list(read_stream(lines, "pipe"))
    assert len([one for one in read_stream([GOOD.strip().ljust(100)]) if one is not None]) == 1


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([], []),
        ([b"one"], [b"one"]),
        ([b"one\n"], [b"one"]),
        ([b"\n"], [b""]),
        ([b"o", b"ne", b"\n", b"two"], [b"one", b"two"]),
        ([b"one\ntwo\nthree\nfo", b"ur\n\n"], [b"one", b"two", b"three", b"four", b""]),
        ([b"a" * 60, b"b" * 40, b"c\nd"], [b"a" * 60 + b"b" * 40 + b"c", b"d"]),  # just as long as is allowed
        ([b"a" * 60, b"b" * 41, b"c\nd"], [b"a" * 60 + b"b" * 41]),
        ([b"one\n" + b"a" * 60, b"b" * 41, b"c\nd"], [b"one", b"a" * 60 + b"b" * 41]),
        ([b"a" * 200 + b"\n", b"b"], [b"a" * 200, b"b"]),
    ],
)
def test_lines_of_a_descriptor(chunks: list[bytes], lines: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the descriptor in pieces of 64 KiB."""
    monkeypatch.setattr("specnb_audit.token_file.LONGEST_LINE", 100)
    rest, asked = iter([*chunks, b""]), set[tuple[int, int]]()
    monkeypatch.setattr("os.read", lambda *given: asked.add(given) or next(rest))
    assert list(lines_of(7)) == lines
    assert asked == {(7, 64 * 1024)}
