"""Prompts: from texts, lists, tensors and what tokenizers return to lists of tokens, without padding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any

from specnb.arguments import shown, whole, whole_numbers
from specnb.loading import encoded

Tokens = int | Collection[int] | None
Prompts = str | Collection[Any] | Mapping[str, Any]


def token_lists(prompts: Any, padding: Collection[int] = (), tokenizer: Any = None) -> list[list[int]]:
    """The tokens of each prompt, as lists.

    Parameters
    ----------
    prompts
        One or several: lists, arrays or tensors of tokens, what a tokenizer returns, or, with a
        `tokenizer`, texts.
    padding
        Tokens that pad prompts if there is no attention_mask: `ValueError` if some prompts of equal
        length, but not all, begin or end with one, which the model would read as text.

    Examples
    --------
    >>> token_lists([1, 2]), token_lists({"input_ids": [[0, 1], [2, 3]], "attention_mask": [[0, 1], [1, 1]]})
    ([[1, 2]], [[1], [2, 3]])
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        if (mask := prompts.get("attention_mask")) is None:
            return token_lists(prompts["input_ids"], padding)
        return _unpadded(token_lists(prompts["input_ids"]), mask)
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Collection) or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(f"prompts is {shown(prompts)}; it must be a list of prompts, each a list of tokens or a text")
    single = whole_numbers(prompts)
    if single:
        return [single]
    lists = [_token_list(number, prompt, tokenizer) for number, prompt in enumerate(prompts)]
    if len({len(tokens) for tokens in lists}) == 1:
        for token in padding:
            _require_no_padding(lists, token, least=1 if hasattr(prompts, "shape") else 2)
    return lists


def _token_list(number: int, prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(
                f"prompt {number} is the text {shown(prompt)}; give a tokenizer, Sampler(..., tokenizer=...), or tokens"
            )
        return encoded(tokenizer, prompt)
    tokens = whole_numbers(prompt)
    if tokens is None:
        raise TypeError(f"prompt {number} is {shown(prompt)}; each prompt is a list of tokens, which are whole numbers")
    return tokens


def _unpadded(lists: list[list[int]], mask: Any) -> list[list[int]]:
    rows = mask.tolist() if hasattr(mask, "tolist") else list(mask)
    kept = rows if rows and isinstance(rows[0], Sequence) else [rows]
    if not all(value in (0, 1) for row in kept for value in row):
        raise ValueError(f"attention_mask is {shown(mask)}; it must hold 0 and 1")
    if list(map(len, kept)) != list(map(len, lists)):
        raise ValueError(
            "input_ids and attention_mask of the prompts differ in shape; give both from one tokenizer call"
        )
    return [[token for token, keep in zip(*pair, strict=True) if keep] for pair in zip(lists, kept, strict=True)]


def _require_no_padding(lists: list[list[int]], padding: int, least: int) -> None:
    for end, some in (("begins", slice(least)), ("ends", slice(-least, None))):
        padded = [number for number, tokens in enumerate(lists) if tokens[some] == [padding] * least]
        if 0 < len(padded) < len(lists):
            raise ValueError(
                f"prompt {padded[0]} {end} with the padding token {padding}, which the model "
                "would read; give what the tokenizer returned, with its attention_mask, or lists without padding"
            )


def padding_tokens(model: Any) -> set[int]:
    """The token that pads prompts of `model`, or its end tokens, which tokenizers use in its place."""
    named = model.config.get_text_config()
    for token in (getattr(named, "pad_token_id", None), getattr(model.generation_config, "pad_token_id", None)):
        if token is not None:
            return set(as_list(token))
    return set(as_list(getattr(named, "eos_token_id", None)))


def as_list(eos: Any) -> list[int]:
    """No token, one, or several, as a list; `TypeError` for anything else."""
    if eos is None:
        return []
    one = whole(eos)
    tokens = [one] if one is not None else whole_numbers(list(eos) if isinstance(eos, Set) else eos)
    if tokens is None:
        raise TypeError(f"eos is {shown(eos)}; it must be a token, which is a whole number, a list of tokens, or None")
    return tokens


def require_tokens(prompts: Sequence[Sequence[int]], eos: Sequence[int], vocab: int) -> None:
    if not prompts:
        raise ValueError("there are no prompts; give at least one list of tokens")
    for name, tokens in (("eos", eos), *((f"prompt {number}", prompt) for number, prompt in enumerate(prompts))):
        if not len(tokens) and name != "eos":
            raise ValueError(f"{name} is empty; give at least one token, such as the begin-of-text token")
        for token in tokens:
            if not 0 <= token < vocab:
                raise ValueError(f"{name} has the token {token}; the vocabulary has the tokens 0 to {vocab - 1}")
