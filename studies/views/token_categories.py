"""The syntactic category of each token of Python source (keyword, name, operator, ...), for any tokenizer."""

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

# The order matters: what begins like a string is one. An unclosed string ends with its line, a triple-quoted one with
# the source.
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
    """The category of every character of Python source that begins outside strings and comments.

    "docstring" is everything between triple quotes. White space inside strings and comments belongs to them.

    >>> character_categories("if x")
    ['keyword', 'keyword', 'white space', 'name']
    """
    categories: list[str] = []
    for found in _LEXEMES.finditer(text):
        category, size = str(found.lastgroup), len(found.group())
        if category == "name" and not keyword.iskeyword(found.group()):
            categories += ["name"] + ["name, continued"] * (size - 1)
        else:
            categories += [{"name": "keyword", "space": "white space"}.get(category, category)] * size
    return categories


def token_categories(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> list[str]:
    """One of `CATEGORIES` for each of `tokens`: that of its first character that is not white space.

    A token that is all white space is "white space", in a docstring too; a special token is "end of text".

    >>> from specnb.models.loading import load_pair
    >>> pair = load_pair(packed=False)
    >>> token_categories(pair.tokenizer, pair.encode("return 1"))
    ['end of text', 'keyword', 'keyword', 'number']
    """
    ends = [0] + [len(_decoded(tokenizer, tokens[: n + 1])) for n in range(len(tokens))]
    text = _decoded(tokenizer, tokens)
    characters = character_categories(text)
    special = set(tokenizer.all_special_ids)
    categories = []
    for token, (start, end) in zip(tokens, pairwise(ends), strict=True):
        # A token can be the first bytes of a character that the next token completes.
        visible = [at for at in range(start, max(end, start + 1)) if at < len(text) and not text[at].isspace()]
        categories.append("end of text" if token in special else characters[visible[0]] if visible else "white space")
    return categories


def _decoded(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
