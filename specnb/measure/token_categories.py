"""What kind of Python each token of a model is part of: read off the text, whatever the tokenizer cuts it into."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from itertools import pairwise

from transformers import PreTrainedTokenizerBase

CATEGORIES = (
    "keyword", "name", "name, continued", "operator", "number", "string", "docstring", "comment", "white space",
    "end of text",
)  # fmt: skip

# In this order: what begins like a string is one. A string that nobody closed ends with its line, a
# triple-quoted one with the text.
_LEXEMES = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<docstring>[rbuf]{0,2}(?P<triple>\"{3}|'{3})(?:\\.|.)*?(?:(?P=triple)|\Z))
    |(?P<string>[rbuf]{0,2}(?P<quote>["'])(?:\\.|(?!(?P=quote))[^\n])*(?P=quote)?)
    |(?P<number>\.?\d(?:[eE][+-]|[\w.])*)
    |(?P<name>[^\W\d]\w*)
    |(?P<space>\s+)
    |(?P<operator>.)""",
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def character_categories(text: str) -> list[str]:
    """The kind of every character of a piece of Python that begins outside strings and comments.

    "docstring" is everything between triple quotes. White space inside strings and comments counts as theirs.
    """
    kinds: list[str] = []
    for found in _LEXEMES.finditer(text):
        kind, size = str(found.lastgroup), len(found.group())
        if kind == "name" and not keyword.iskeyword(found.group()):
            kinds += ["name"] + ["name, continued"] * (size - 1)
        else:
            kinds += [{"name": "keyword", "space": "white space"}.get(kind, kind)] * size
    return kinds


def token_categories(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """One of `KINDS` for each of `tokens`: that of its first character that is not white space.

    A token of nothing but white space is "white space", in a docstring too; a special token is "end of text".
    """
    ends = [0] + [len(_decoded(tokenizer, tokens[: n + 1])) for n in range(len(tokens))]
    text = _decoded(tokenizer, tokens)
    characters = character_categories(text)
    special = set(tokenizer.all_special_ids)
    kinds = []
    for token, (start, end) in zip(tokens, pairwise(ends), strict=True):
        # A token may be the first bytes of a character that the next one completes.
        solid = [at for at in range(start, max(end, start + 1)) if at < len(text) and not text[at].isspace()]
        kinds.append("end of text" if token in special else characters[solid[0]] if solid else "white space")
    return kinds


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
