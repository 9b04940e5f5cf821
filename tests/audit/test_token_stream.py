"""Sequences from a pipe: in order, as they arrive, and with the line in every error."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from specnb.audit.run import Settings, audit_completions
from specnb.audit.teacher_forcing import Completion, Models
from specnb.audit.token_stream import lines_of, read_stream

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
        monkeypatch.setattr(f"specnb.audit.{module}.LONGEST_LINE", 100)
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
