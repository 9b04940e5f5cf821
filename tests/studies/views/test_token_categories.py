"""Kinds against Python's own tokenizer, on the source of this project, and on text that is no Python at all."""

from __future__ import annotations

import keyword
import tokenize
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

import specnb
from specnb.models.loading import TRAINED_PAIR
from studies.views.token_categories import CATEGORIES, character_categories, token_categories

SOURCES = sorted(Path(specnb.__file__).parent.rglob("*.py"))
TOKENIZER = AutoTokenizer.from_pretrained(TRAINED_PAIR / "target")


def expected(token: tokenize.TokenInfo) -> set[str] | None:
    if token.type == tokenize.NAME:
        return {"keyword"} if keyword.iskeyword(token.string) else {"name", "name, continued"}
    if token.type == tokenize.STRING:
        return {"docstring"} if token.string.lstrip("rbufRBUF")[:3] in ('"""', "'''") else {"string"}
    return {tokenize.NUMBER: {"number"}, tokenize.OP: {"operator"}, tokenize.COMMENT: {"comment"}}.get(token.type)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_kinds_are_those_of_pythons_own_tokenizer(path: Path) -> None:
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    kinds = character_categories(text)
    inside = 0  # of an f-string, which newer Pythons take apart and this lexer does not
    for token in tokenize.generate_tokens(iter(lines).__next__):
        inside += {"FSTRING_START": 1, "FSTRING_END": -1}.get(tokenize.tok_name[token.type], 0)
        want = expected(token)
        if want and not inside:
            start = starts[token.start[0] - 1] + token.start[1]
            assert set(kinds[start : start + len(token.string)]) <= want, token


@given(st.text(alphabet=st.sampled_from("ab1.'\"#\n \\(é\t\u2028") | st.characters()))
def test_every_character_has_a_kind(text: str) -> None:
    kinds = character_categories(text)
    assert len(kinds) == len(text)
    assert set(kinds) <= set(CATEGORIES)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('"open\nx', ["string"] * 5 + ["white space", "name"]),
        ("'''open\n#", ["docstring"] * 9),
        ("# a 'b", ["comment"] * 6),
        (r"'a\'b'", ["string"] * 6),
        ("Rb'x'", ["string"] * 5),
        ("1e-5.", ["number"] * 5),
        ("if", ["keyword"] * 2),
        ("iff", ["name"] + ["name, continued"] * 2),
    ],
)
def test_corners_by_hand(text: str, kind: list[str]) -> None:
    assert character_categories(text) == kind


def kinds_of(text: str) -> list[tuple[str, str]]:
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    return [
        (str(TOKENIZER.decode([token])), kind)
        for token, kind in zip(tokens, token_categories(TOKENIZER, tokens), strict=True)
    ]


def test_a_token_is_what_its_first_visible_character_is() -> None:
    kinds = dict(kinds_of("def qfrobnicate(x):\n    return x  # why\n"))
    assert kinds["def"] == kinds[" return"] == "keyword"
    assert kinds[" x"] == "name"
    assert kinds["\n   "] == "white space"
    assert kinds[" #"] == "comment"
    name = [kind for piece, kind in kinds_of("qfrobnicate")]
    assert name == ["name"] + ["name, continued"] * (len(name) - 1)
    assert len(name) > 1


def test_special_tokens_end_a_text_and_belong_to_none() -> None:
    end = TOKENIZER.eos_token_id
    tokens = [end, *TOKENIZER.encode("a = 1", add_special_tokens=False), end]
    kinds = token_categories(TOKENIZER, tokens)
    assert kinds[0] == kinds[-1] == "end of text"
    assert "end of text" not in kinds[1:-1]


def test_pieces_of_one_character_are_all_of_its_kind() -> None:
    kinds = kinds_of("'\U0001f600'")
    assert len(kinds) > 3
    assert {kind for _, kind in kinds} == {"string"}
    assert token_categories(TOKENIZER, []) == []
