"""Files of sequences: what is read, and errors that name the file and the line."""

from __future__ import annotations

import gzip
import io
import json
import re
from pathlib import Path

import pytest

from specnb_audit import token_file
from specnb_audit.token_file import Sample, Seeds, Sequence, read_line, read_samples, read_tokens

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
        ('{"prompt": [1], "tokens": [2], "seed": "7"}', "line 2: 'seed' is \"7\"; give an integer"),
        ('{"prompt": [1], "tokens": [2], "seed": true}', "line 2: 'seed' is true"),
        ('{"prompt": [1], "tokens": [2], "batch": [3]}', "line 2: 'batch' is .3.; give a number or a name"),
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


LINE = '{"prompt": [ids], "tokens": [ids]}'


def json_error(line: str) -> str:
    """What Python says of `line`, which depends on its version."""
    with pytest.raises(json.JSONDecodeError) as refused:
        json.loads(line)
    return str(refused.value)


EITHER = f'{LINE} or {{"prompt": "words", "text": "words"}}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", f"is not JSON ({json_error('{')}); each line is {LINE}"),
        ("[1, 2]", f"is [1, 2]; each line is {LINE}"),
        ('"' + "a" * 58 + '"', f'is "{"a" * 58}"; each line is {LINE}'),
        ('  "' + "a" * 59 + '"  ', f'is "{"a" * 56}...; each line is {LINE}'),
        ('{"tokens": [1]}', f"has no 'prompt'; each line is {LINE}"),
        ('{"prompt": [1]}', f"has no 'tokens'; each line is {LINE}"),
        ('{"prompt": [1.0], "tokens": [1]}', f": 'prompt' is not a list of integers; each line is {LINE}"),
        ('{"prompt": [1], "tokens": [true]}', f": 'tokens' is not a list of integers; each line is {LINE}"),
        ('{"prompt": [1], "tokens": {"1": 1}}', f": 'tokens' is not a list of integers; each line is {LINE}"),
        ('{"prompt": [1], "tokens": [1], "steps": null}', f": 'steps' is not a list of integers; each line is {LINE}"),
        ('{"prompt": [0, -1], "tokens": [1]}', ": 'prompt' has -1; the range is 0 to 2^63 - 1"),
        (f'{{"prompt": [0], "tokens": [{2**63}]}}', f": 'tokens' has {2**63}; the range is 0 to 2^63 - 1"),
        (f'{{"prompt": [0], "tokens": [{10**59}]}}', f": 'tokens' has {10**59}; the range is 0 to 2^63 - 1"),
        (f'{{"prompt": [0], "tokens": [{10**60}]}}', f": 'tokens' has 1{'0' * 56}...; the range is 0 to 2^63 - 1"),
        (
            '{"prompt": [1], "tokens": [1, 2], "steps": [1, 2]}',
            ": steps add up to 3 for 2 tokens; give the number of tokens of each step",
        ),
        ('{"b": 1, "a": 1, "a": 2, "b": 2}', f": the key 'b' is given twice; each line is {LINE}"),
        ("[" * 100_000, f"is nested too deeply; each line is {LINE}"),
        (b'{"\xff', "is not UTF-8 (byte 3 of the line); save the file as UTF-8"),
    ],
)  # fmt: skip
def test_the_whole_message_of_a_bad_line(tmp_path: Path, line: str | bytes, words: str) -> None:
    """The same from a file and of one line alone."""
    content = line if isinstance(line, bytes) else line.encode()
    where = "tokens.jsonl, line 3" if words[0] == ":" else "tokens.jsonl, line 3 "
    with pytest.raises(ValueError, match=f"^{re.escape(where + words)}$"):
        read_tokens(write(tmp_path, f"{GOOD}\n\n".encode() + content))
    with pytest.raises(ValueError, match=f"^{re.escape(where.replace('tokens.jsonl, line 3', 'here') + words)}$"):
        read_line(content, "here")


def test_batch_and_seed_of_a_line(tmp_path: Path) -> None:
    lines = [
        '{"prompt": [1], "tokens": [2], "seed": 7, "batch": "a"}',
        '{"prompt": [1], "tokens": [2], "steps": [1], "seed": null, "batch": 3}',
    ]
    for line, batch, seed in zip(lines, ("a", 3), (7, None), strict=True):
        (one,) = read_tokens(write(tmp_path, line))
        assert (one.batch, one.seed) == (batch, seed)


def test_a_repeated_seed_is_one_outside_its_batch() -> None:
    one = Sequence("line 1", [1], [2])
    seeds = Seeds()
    assert seeds.note() == []
    given = [(None, None), (None, None), (7, None), (7, None), (8, "a"), (8, "a"), (8, "b"), (8, None), (0, 0), (0, 0)]
    found = [seeds.repeated(one._replace(seed=seed, batch=batch)) for seed, batch in given]
    assert found == [False, False, False, True, False, False, True, True, False, False]
    assert seeds.count == 3
    assert seeds.note()[0].startswith("3 sequences repeat a seed")


def test_a_line_alone() -> None:
    assert read_line(b'{"tokens": [0, 9223372036854775807], "prompt": [], "note": 1.5}\n', "here") == Sequence(
        "here", [], [0, 2**63 - 1], None
    )
    assert read_line(b'{"tokens": [5, 6], "prompt": [1], "steps": [0, 2]}', "x").steps == [0, 2]


def test_steps_are_in_all_lines_or_in_none(tmp_path: Path) -> None:
    steps = '{"prompt": [1], "tokens": [2], "steps": [1]}'
    for good in (GOOD, steps):
        assert len(read_tokens(write(tmp_path, f"{good}\n{good}"))) == 2
    for one, other in ((GOOD, steps), (steps, GOOD)):
        with pytest.raises(ValueError, match=r"^tokens.jsonl, line 3: give steps in all lines or in none$"):
            read_tokens(write(tmp_path, f"{one}\n{one}\n{other}"))


@pytest.mark.parametrize("content", ["", "\n", " \n\t\r\n"])
def test_an_empty_file_is_refused_with_the_form_of_a_line(tmp_path: Path, content: str) -> None:
    for read, form in ((read_tokens, LINE), (read_samples, EITHER)):
        with pytest.raises(ValueError, match=f"^{re.escape(f'tokens.jsonl is empty; each line is {form}')}$"):
            read(write(tmp_path, content))


def test_a_line_may_have_64_mebibytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Less one byte, since a line without an end and one of just this length are not told apart."""
    assert token_file.LONGEST_LINE == 64 * 1024**2
    monkeypatch.setattr(token_file, "LONGEST_LINE", len(GOOD) + 2)
    assert len(read_tokens(write(tmp_path, f"{GOOD}\n{GOOD} "))) == 2
    words = f"tokens.jsonl, line 2 is longer than {len(GOOD) + 2} bytes; each line is one sequence"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        read_tokens(write(tmp_path, f"{GOOD}\n{GOOD}  "))
    monkeypatch.setattr(token_file, "LONGEST_LINE", 1000)
    with pytest.raises(ValueError, match="line 1 is longer than 1,000 bytes"):
        read_tokens(write(tmp_path, gzip.compress(b" " * 2000)))


def test_a_mark_is_that_of_a_file_and_not_of_a_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 2 is not JSON"):
        read_tokens(write(tmp_path, GOOD.encode() + b"\n\xef\xbb\xbf" + GOOD.encode()))
    with pytest.raises(ValueError, match="line 2 is not UTF-8"):
        read_tokens(write(tmp_path, GOOD.encode() + b"\n\xff\xfe"))
    with pytest.raises(ValueError, match=r"^tokens.jsonl is UTF-16 or UTF-32; save it as UTF-8$"):
        read_tokens(write(tmp_path, b"\xfe\xff\0{"))


@pytest.mark.parametrize("kind", ["is_fifo", "is_char_device"])
def test_pipes_and_devices_are_refused_before_they_are_read(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, GOOD)  # a real pipe would be waited for, if it were opened
    monkeypatch.setattr(Path, kind, lambda asked: asked == file)
    words = f"{file} is a pipe or a device, which may have no end; give a file (only specnb audit - reads a pipe)"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
        read_tokens(file)


def test_a_folder_and_a_file_that_is_not_there(tmp_path: Path) -> None:
    for other in (tmp_path, tmp_path / "none"):
        with pytest.raises(OSError, match=re.escape(str(other))):
            read_tokens(other)


class Broken(io.RawIOBase):
    """A file on a disk that fails."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        raise self.error


@pytest.mark.parametrize(("error", "words"), [(OSError(5, "No luck"), "No luck"), (OSError("odd"), "odd")])
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, words: str
) -> None:
    class Half(io.BufferedReader):
        def peek(self, size: int = 0) -> bytes:
            return b"{"

    monkeypatch.setattr(Path, "open", lambda file, mode: Half(Broken(error)))
    file = tmp_path / "tokens.jsonl"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{file} cannot be read: {words}')}$"):
        read_tokens(file)


def test_texts_are_cut_into_words_with_the_space_before_them(tmp_path: Path) -> None:
    lines = [
        '{"prompt": "", "text": " one  two, three!\\n "}',
        '{"prompt": [1, 2], "tokens": [3]}',
        '{"prompt": "a", "text": ""}',
    ]
    assert read_samples(write(tmp_path, "\n".join(lines))) == [
        Sample("", (" one", "  two", ",", " three", "!", "\n ")),
        Sample((1, 2), (3,)),
        Sample("a", ()),
    ]
    for line in ('{"prompt": [1], "text": "a"}', '{"prompt": "a", "text": ["a"]}', '{"text": "a"}'):
        words = f"tokens.jsonl, line 1: 'prompt' and 'text' must both be strings; each line is {EITHER}"
        with pytest.raises(ValueError, match=f"^{re.escape(words)}$"):
            read_samples(write(tmp_path, line))
    with pytest.raises(ValueError, match="line 1: 'prompt' is not a list of integers"):
        read_samples(write(tmp_path, '{"prompt": "a"}'))
