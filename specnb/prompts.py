"""Prompts: from texts, lists, tensors and what tokenizers return to lists of tokens, without padding."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from typing import Any

from specnb.arguments import shown, token_list, whole, whole_numbers
from specnb.loading import encoded

Tokens = int | Collection[int] | None
Prompts = str | Collection[Any] | Mapping[str, Any]
READ = ("input_ids", "attention_mask")  # entries of what a tokenizer returns


def token_lists(prompts: Any, model: Any = None, tokenizer: Any = None) -> list[list[int]]:
    """The tokens of each prompt, as lists.

    Parameters
    ----------
    prompts
        As of `Sampler.generate`.
    model
        The model that will read them, for what is refused: what a processor returns beside tokens and
        mask (`TypeError`), and padding without an attention_mask (`ValueError`).

    Examples
    --------
    >>> token_lists([1, 2]), token_lists({"input_ids": [[0, 1], [2, 3]], "attention_mask": [[0, 1], [1, 1]]})
    ([[1, 2]], [[1], [2, 3]])
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        _require_read(prompts, model)
        if (mask := prompts.get("attention_mask")) is None:
            return token_lists(prompts["input_ids"], model, tokenizer)
        return _unpadded(token_lists(prompts["input_ids"]), mask)
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Collection) or getattr(prompts, "ndim", 1) == 0:
        raise TypeError(f"prompts is {shown(prompts)}; it must be a list of prompts, each a list of tokens or a text")
    single = whole_numbers(prompts)
    lists = [single] if single else [_token_list(*each, tokenizer) for each in enumerate(prompts)]
    if not all(isinstance(prompt, str) for prompt in prompts):
        _require_no_padding(lists, model, tokenizer, hasattr(prompts, "shape"))
    return lists


def _require_read(prompts: Mapping[str, Any], model: Any) -> None:
    """Raise `TypeError` for entries that would be left out, such as an image."""
    more = {name for name, value in prompts.items() if value is not None} - set(READ)
    if model is not None and "token_type_ids" not in inspect.signature(model.forward).parameters:
        more -= {"token_type_ids"}  # which many tokenizers return, and few models take
    if more:
        raise TypeError(
            f"prompts have {', '.join(sorted(more))}, and only {' and '.join(READ)} are read; leave out what the model "
            "does not need, and decode images, sound and positions of your own with transformers"
        )


def _token_list(number: int, prompt: Any, tokenizer: Any) -> list[int]:
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError(f"prompt {number} is the text {shown(prompt)}; give its tokenizer=..., or tokens")
        return encoded(tokenizer, prompt)
    return token_list(f"prompt {number}", prompt, "; of a chat give what tokenizer.apply_chat_template returns")


def _unpadded(lists: list[list[int]], mask: Any) -> list[list[int]]:
    rows = mask.tolist() if hasattr(mask, "tolist") else list(mask)
    kept = rows if rows and isinstance(rows[0], Sequence) else [rows]
    if not all(value in (0, 1) for row in kept for value in row):
        raise ValueError(f"attention_mask is {shown(mask)}; it must hold 0 and 1")
    if list(map(len, kept)) != list(map(len, lists)):
        raise ValueError("input_ids and attention_mask differ in shape; give both from one tokenizer call")
    return [[token for token, keep in zip(*pair, strict=True) if keep] for pair in zip(lists, kept, strict=True)]


def _require_no_padding(lists: list[list[int]], model: Any, tokenizer: Any, one_tensor: bool) -> None:
    """Raise `ValueError` for a prompt that begins or ends with a padding token.

    One that also begins or ends texts is text, unless it is there twice, or in some rows only of `one_tensor`.
    """
    known = [] if model is None else [model.config.get_text_config(), model.generation_config, tokenizer]

    def named(name: str) -> set[int]:
        return {token for source in known for token in as_list(getattr(source, name, None))}

    of_texts = named("bos_token_id") | named("eos_token_id")
    for token in named("pad_token_id") | named("eos_token_id"):
        for end, first, two in (("begins", slice(1), slice(2)), ("ends", slice(-1, None), slice(-2, None))):
            at_end = [number for number, tokens in enumerate(lists) if tokens[first] == [token]]
            some = token not in of_texts or (one_tensor and len(at_end) < len(lists))
            padded = at_end if some else [number for number in at_end if lists[number][two] == [token] * 2]
            if padded:
                raise ValueError(
                    f"prompt {padded[0]} {end} with the padding token {token}, which the model would read; give what "
                    "the tokenizer returned, with its attention_mask, which is 1 where the token is meant"
                )


def texts_of(completions: Sequence[Sequence[int]], tokenizer: Any) -> list[str] | None:
    """The texts of completions, without end tokens and other special ones; None without a tokenizer."""
    return None if tokenizer is None else tokenizer.batch_decode(completions, skip_special_tokens=True)


def as_list(eos: Any) -> list[int]:
    """No token, one, or several, as a list; `TypeError` for anything else."""
    if eos is None:
        return []
    one = whole(eos)
    tokens = [one] if one is not None else whole_numbers(list(eos) if isinstance(eos, Set | Iterator) else eos)
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
