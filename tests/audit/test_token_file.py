"""Files of sequences: what is read, and errors that name the file and the line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from specnb.audit.token_file import Sequence, read_tokens

GOOD = '{"prompt": [1], "tokens": [2]}'


def write(folder: Path, content: bytes | str) -> Path:
    file = folder / "tokens.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_blank_lines_are_skipped_and_counted(tmp_path: Path, ending: str) -> None:
    read = read_tokens(write(tmp_path, f"\n{GOOD}\n\n{GOOD}\n".replace("\n", ending)))
    assert [one.where for one in read] == ["tokens.jsonl, line 2", "tokens.jsonl, line 4"]


def test_an_empty_sequence_is_one(tmp_path: Path) -> None:
    read = read_tokens(write(tmp_path, '{"prompt": [1], "tokens": [], "steps": []}'))
    assert read == [Sequence("tokens.jsonl, line 1", [1], [], [])]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c"])
def test_only_a_newline_ends_a_line(tmp_path: Path, separator: str) -> None:
    """Python's splitlines takes these for the end of a line; in a JSON string the first three may stand as they are."""
    note = separator if separator > "\x20" else ""
    line = f'{{"prompt": [1], "tokens": [2], "note": "{note}"}}'
    assert len(read_tokens(write(tmp_path, f"{line}\n{line}"))) == 2


def test_a_byte_order_mark_and_gzip_make_no_difference(tmp_path: Path) -> None:
    plain = read_tokens(write(tmp_path, GOOD))
    assert read_tokens(write(tmp_path, b"\xef\xbb\xbf" + GOOD.encode())) == plain
    assert read_tokens(write(tmp_path, gzip.compress(GOOD.encode()))) == plain
    assert read_tokens(write(tmp_path, gzip.compress(b"\xef\xbb\xbf" + GOOD.encode()))) == plain


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (GOOD.encode("latin-1").replace(b"prompt", b"pr\xf6mpt"), "line 2 is not UTF-8 .byte 5 of the line"),
        ('{"prompt": [1], "prompt": [2], "tokens": [3]}', "line 2: the key 'prompt' is given twice"),
        ('{"prompt": [1], "tokens": [3], "note": {"a": 1, "a": 2}}', "line 2: the key 'a' is given twice"),
        ('{"prompt": [1], "tokens": [1' + "0" * 5000 + "]}", "line 2: Exceeds the limit"),
        ('{"prompt": [1], "tokens": [1' + "0" * 99 + "]}", "line 2: 'tokens' has 1000.*[.][.][.]; the range"),
        ('{"prompt": [1], "tokens": [9223372036854775808]}', "line 2: 'tokens' has 9223372036854775808"),
        ('{"prompt": [-1], "tokens": [2]}', "line 2: 'prompt' has -1"),
        ('{"prompt": [1], "tokens": [2], "steps": [-1, 2]}', "line 2: 'steps' has -1"),
        ('{"prompt": [1], "tokens": [2], "steps": [2]}', "line 2: steps add up to 2 for 1 tokens"),
        ('{"prompt": [1], "tokens": [2], "steps": [1]}', "line 2: give steps in all lines or in none"),
        ("[" * 100_000, "line 2 is nested too deeply"),
        (b'{"prompt": [1], "tokens": [2]}\0', "line 2 is not JSON"),
        ('"' + "a" * 1000 + '"', r"line 2 is \"aaa.*[.][.][.]; each line"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: bytes | str, words: str) -> None:
    rest = line if isinstance(line, bytes) else line.encode()
    with pytest.raises(ValueError, match=f"tokens.jsonl, {words}") as refused:
        read_tokens(write(tmp_path, GOOD.encode() + b"\n" + rest))
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (GOOD.encode("utf-16"), "tokens.jsonl is UTF-16 or UTF-32; save it as UTF-8"),
        (GOOD.encode("utf-32"), "tokens.jsonl is UTF-16 or UTF-32"),
        (gzip.compress(GOOD.encode(), mtime=0)[:-9], "tokens.jsonl is a damaged gzip file"),
        (b"\x1f\x8b" + b"\xff" * 30, "tokens.jsonl is a damaged gzip file"),
        (gzip.compress(GOOD.encode(), mtime=0) + b"\x1f", "tokens.jsonl is a damaged gzip file"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_tokens(write(tmp_path, content))


def test_the_largest_number_is_read(tmp_path: Path) -> None:
    assert read_tokens(write(tmp_path, f'{{"prompt": [0], "tokens": [{2**63 - 1}]}}'))[0].tokens == [2**63 - 1]
