"""Sequences from files and pipes of JSON lines: how they are read, and what is said of bad ones."""

from __future__ import annotations

import gzip
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import llama, near_copy

from specnb import generate
from specnb_audit.token_file import Seeds, Sequence, lines_of, read_stream, read_tokens, save_tokens

GOOD = '{"prompt": [1], "tokens": [2]}'


def write(folder: Path, content: bytes | str) -> Path:
    file = folder / "tokens.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c"])
def test_only_a_newline_ends_a_line(tmp_path: Path, separator: str) -> None:
    """Python's splitlines takes these for the end of a line; in a JSON string the first three may
    stand as they are."""
    note = separator if separator > "\x20" else ""
    line = f'{{"prompt": [1], "tokens": [2], "note": "{note}"}}'
    assert len(read_tokens(write(tmp_path, f"{line}\n{line}"))) == 2


def test_a_byte_order_mark_and_gzip_make_no_difference(tmp_path: Path) -> None:
    plain = read_tokens(write(tmp_path, GOOD))
    assert read_tokens(write(tmp_path, b"\xef\xbb\xbf" + GOOD.encode())) == plain
    assert read_tokens(write(tmp_path, gzip.compress(GOOD.encode()))) == plain
    assert read_tokens(write(tmp_path, gzip.compress(b"\xef\xbb\xbf" + GOOD.encode()))) == plain


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    prompts, completions, file = [[1, 2], [3]], torch.tensor([[4], [5]]), tmp_path / "tokens.jsonl"
    save_tokens(file, prompts, completions)
    assert [(each.prompt, each.tokens) for each in read_tokens(file)] == [([1, 2], [4]), ([3], [5])]
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        save_tokens(file, prompts, completions[:1])


def test_a_generation_writes_what_is_read(tmp_path: Path) -> None:
    file, target = tmp_path / "made.jsonl", llama(8)
    made = generate(target, [[1, 2], [3]], near_copy(target, 0.3), gamma=2, max_new_tokens=9, progress=False)
    made.to_jsonl(file)
    read = read_tokens(file)
    assert [(each.prompt, each.tokens) for each in read] == [([1, 2], made.tokens[0]), ([3], made.tokens[1])]
    assert [sum(each.steps or ()) for each in read] == [9, 9]
    assert [len(each.steps or ()) for each in read] == made.record.target_passes.tolist()


def test_a_file_that_cannot_be_saved_leaves_the_old_one(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD)
    for tokens in ([1.5], "12", [True]):
        with pytest.raises(TypeError, match="a completion is"):
            save_tokens(file, [[1], [1]], [[2], tokens])
    assert file.read_text() == GOOD


def test_blank_lines_and_a_mark_of_the_encoding_are_skipped(tmp_path: Path) -> None:
    blank = b"\n" * 2**20
    for before in (blank, b"\xef\xbb\xbf\n" + blank, b"\xef\xbb\xbf"):
        assert len(read_tokens(write(tmp_path, gzip.compress(before + GOOD.encode() + blank)))) == 1
    assert next(one for one in read_stream([b"\xef\xbb\xbf", GOOD.encode()]) if one is not None).prompt == [1]


LINE = '{"prompt": [ids], "tokens": [ids]}'
INTEGERS = f"is not a list of integers; each line is {LINE}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": [1], "tokens": [1' + "0" * 5000 + "]}", " is not JSON (Exceeds the limit .*); each line is .*"),
        ('{"prompt": "text", "tokens": [1]}', f": 'prompt' {INTEGERS}"),
        ('{"prompt": [1], "outputs": [{"text": "a"}]}', f" has no 'tokens'; each line is {LINE}"),
        (
            '{"prompt": [1], "outputs": [{"token_ids": [1]}, {"token_ids": [2]}]}',
            " has 2 outputs; each line is one sequence: write a line for each, with its prompt",
        ),
        ('{"prompt": [0, -1], "tokens": [1]}', ": 'prompt' has -1; the range is 0 to 2^63 - 1"),
        (
            '{"prompt": [1], "tokens": [1, 2], "steps": [1, 2]}',
            ": steps add up to 3 for 2 tokens; give the number of tokens of each step, its recovered or bonus "
            "token included",
        ),
        ('{"prompt": [1], "tokens": [2], "steps": [1]}', ": give steps in all lines or in none"),
        ('{"prompt": [1], "tokens": [2], "seed": "7"}', ": 'seed' is \"7\"; give an integer, or leave it out"),
        (b'{"\xff', " is not UTF-8 (byte 3 of the line); save the file as UTF-8"),
    ],
)
def test_a_bad_line_is_named_in_a_file_and_in_a_pipe(tmp_path: Path, line: str | bytes, words: str) -> None:
    bad = line if isinstance(line, bytes) else line.encode()
    pattern = re.escape(words).replace(r"\.\*", ".*")
    with pytest.raises(ValueError, match=f"^tokens.jsonl, line 3{pattern}$"):
        read_tokens(write(tmp_path, f"{GOOD}\n\n".encode() + bad))
    with pytest.raises(ValueError, match=f"^stdin, line 3{pattern}$"):
        list(read_stream([GOOD.encode(), b"\n", bad]))


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt_token_ids": [1], "token_ids": [2, 3]}',
        '{"prompt": "text", "prompt_token_ids": [1], "outputs": [{"text": "more", "token_ids": [2, 3]}]}',
        '{"prompt": [1], "outputs": [{"token_ids": [2, 3]}]}',
        '{"text": "more", "input_ids": [1], "output_ids": [2, 3], "meta_info": {}}',
        '{"prompt": [1], "tokens": [2, 3], "token_ids": null, "outputs": []}',
    ],
)
def test_the_names_of_engines_are_read_too(tmp_path: Path, line: str) -> None:
    (one,) = read_tokens(write(tmp_path, line))
    assert (one.prompt, one.tokens) == ([1], [2, 3])
    assert list(read_stream([line.encode()]))[-1] == one._replace(where="stdin, line 1")


def test_a_repeated_seed_is_one_outside_its_batch() -> None:
    one = Sequence("line 1", [1], [2])
    seeds = Seeds()
    assert seeds.note() == []
    given = [(None, None), (None, None), (7, None), (7, None), (8, "a"), (8, "a"), (8, "b"), (8, None), (0, 0), (0, 0)]
    found = [seeds.repeated(one._replace(seed=seed, batch=batch)) for seed, batch in given]
    assert found == [False, False, False, True, False, False, True, True, False, False]
    assert seeds.count == 3
    assert seeds.note()[0].startswith("3 sequences repeat a seed")


# Pipes


def test_the_reader_says_where_it_waits() -> None:
    """None comes when the lines before it have been read, and before the next line is there."""
    released = threading.Event()

    def lines() -> Iterator[bytes]:
        yield GOOD.encode()
        assert released.wait(60)
        yield GOOD.encode()

    found: list[int | None] = []
    for one in read_stream(lines()):
        found.append(None if one is None else one.tokens[0])
        if one is None and 2 in found:
            released.set()
    assert [one for one in found if one is not None] == [2, 2]
    assert None in found[found.index(2) :]


def test_whatever_ends_the_reading_is_handed_over() -> None:
    """Also what is no error, such as an interrupt, after the lines before it."""

    def lines() -> Iterator[bytes]:
        yield GOOD.encode()
        raise KeyboardInterrupt

    found: list[object] = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(one for one in read_stream(lines()) if one is not None)
    for one in read_stream([GOOD.encode(), GOOD.encode(), b" \n", GOOD.encode()], name="pipe"):
        if one is not None:
            found.append(one.where)
    assert found[-3:] == ["pipe, line 1", "pipe, line 2", "pipe, line 4"]


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"one\ntwo\nthree\nfo", b"ur\n\n"], [b"one", b"two", b"three", b"four", b""]),
        # Just as long as is allowed.
        ([b"a" * 60, b"b" * 40, b"c\nd"], [b"a" * 60 + b"b" * 40 + b"c", b"d"]),
        ([b"a" * 60, b"b" * 41, b"c\nd"], [b"a" * 60 + b"b" * 41]),
    ],
)
def test_lines_of_a_descriptor(chunks: list[bytes], lines: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the descriptor in pieces of 64 KiB."""
    monkeypatch.setattr("specnb_audit.token_file.LONGEST_LINE", 100)
    rest, asked = iter([*chunks, b""]), set[tuple[int, int]]()
    monkeypatch.setattr("os.read", lambda *given: asked.add(given) or next(rest))
    assert list(lines_of(7)) == lines
    assert asked == {(7, 64 * 1024)}
