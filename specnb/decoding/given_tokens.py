"""Prompts and end tokens as a user gives them, and settings by other names: read, or refused with
what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Set
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.number_checks import shown, whole, whole_numbers

Tokens = int | Collection[int] | None
Settings = ParamSpec("Settings")
Result = TypeVar("Result")

LONGEST = 2**24
"""Tokens of a prompt: more than any model has positions for, and few enough to be read in
seconds."""
ELSEWHERE = {name: f"sampling=Sampling({name}=...)" for name in ("temperature", "top_k", "top_p")} | {
    "do_sample": "sampling=Sampling(temperature=0) for argmax",
    "eos_token_id": "eos",
    "assistant_model": "draft",
    "num_beams": "specnb.beam_search",
}


def token_lists(prompts: Any, padding: Collection[int] = ()) -> list[list[int]]:
    """`prompts`, lists, arrays or tensors of tokens, as lists; of a tokenizer's output, those that
    its mask leaves.

    Raises `TypeError` for anything else, `ValueError` for a prompt longer than `LONGEST`, and where
    some prompts, but not all, begin or end with a token of `padding`: in a tensor or an array, and
    in equally long lists with two or more of it.

    >>> token_lists(torch.tensor([[1, 2]]))
    [[1, 2]]
    >>> token_lists({"input_ids": [[0, 1], [2, 3]], "attention_mask": [[0, 1], [1, 1]]})
    [[1], [2, 3]]
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        if (mask := prompts.get("attention_mask")) is None:
            return token_lists(prompts["input_ids"], padding)
        return _unpadded(token_lists(prompts["input_ids"]), mask)
    if isinstance(prompts, str | Mapping) or _size(prompts) is None:
        raise TypeError(
            f"prompts is {shown(prompts)}; it must be a list of prompts, each a list of tokens: [pair.encode(text)]"
        )
    lists = [_token_list(number, prompt) for number, prompt in enumerate(prompts)]
    if len({len(tokens) for tokens in lists}) == 1:
        for token in padding:
            _require_no_padding(lists, token, least=1 if hasattr(prompts, "shape") else 2)
    return lists


def _token_list(number: int, prompt: Any) -> list[int]:
    if isinstance(prompt, str):
        raise TypeError(f"prompt {number} is the text {shown(prompt)}; give its tokens, such as pair.encode(text)")
    if (_size(prompt) or 0) > LONGEST:
        raise ValueError(f"prompt {number} has more than {LONGEST:,} tokens, which no model reads; shorten it")
    tokens = whole_numbers(prompt)
    if tokens is None:
        raise TypeError(f"prompt {number} is {shown(prompt)}; each prompt is a list of tokens, which are whole numbers")
    return tokens


def _size(values: Any) -> int | None:
    """How many entries `values` has; None if it is no collection, or a tensor that cannot be read
    row by row."""
    sparse = isinstance(values, Tensor) and values.layout != torch.strided
    if not isinstance(values, Collection) or getattr(values, "ndim", 1) == 0 or sparse:
        return None
    try:
        return len(values)
    except OverflowError:  # a range beyond what a machine word counts
        return LONGEST + 1


def _unpadded(lists: list[list[int]], mask: Any) -> list[list[int]]:
    kept = token_lists(torch.as_tensor(mask).long() if hasattr(mask, "dtype") else mask)  # it may be boolean
    if list(map(len, kept)) != list(map(len, lists)):
        raise ValueError(
            "input_ids and attention_mask of the prompts differ in shape; give both from one tokenizer call"
        )
    return [[token for token, keep in zip(*pair, strict=True) if keep] for pair in zip(lists, kept, strict=True)]


def _require_no_padding(lists: list[list[int]], padding: int, least: int) -> None:
    """A model would read the padding of rows that a tokenizer has made equally long, as if it were
    text."""
    for end, some in (("begins", slice(least)), ("ends", slice(-least, None))):
        padded = [number for number, tokens in enumerate(lists) if tokens[some] == [padding] * least]
        if 0 < len(padded) < len(lists):
            raise ValueError(
                f"prompt {padded[0]} {end} with the padding token {padding}, which the model "
                "would read; give what the tokenizer returned, with its attention_mask, or lists without padding"
            )


def padding_tokens(model: Any) -> set[int]:
    """The token that pads the prompts of `model`; where its configuration names none, those that
    tokenizers take instead, which end a text."""
    if not isinstance(model, PreTrainedModel):
        return set()
    named = model.config.get_text_config()
    for given in (getattr(named, "pad_token_id", None), getattr(model.generation_config, "pad_token_id", None)):
        if given is not None:
            return set(as_list(given))
    return set(as_list(getattr(named, "eos_token_id", None)))


def as_list(eos: Any) -> list[int]:
    """No token, one, or several, as a list. Raises `TypeError` for anything else.

    >>> as_list(None), as_list(3), as_list((3, 4))
    ([], [3], [3, 4])
    """
    if eos is None:
        return []
    one = whole(eos)
    tokens = None if (_size(eos) or 0) > LONGEST else whole_numbers(list(eos) if isinstance(eos, Set) else eos)
    tokens = tokens if one is None else [one]
    if tokens is None:
        raise TypeError(f"eos is {shown(eos)}; it must be a token, which is a whole number, a list of tokens, or None")
    return tokens


def named_settings(function: Callable[Settings, Result]) -> Callable[Settings, Result]:
    """`function`, whose `TypeError` for an argument that it has not says what stands for it, or
    which there are.

    >>> named_settings(lambda target, sampling=None: sampling)("model", temperature=0.5)
    Traceback (most recent call last):
    TypeError: there is no argument temperature; give sampling=Sampling(temperature=...)
    """
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*args: Settings.args, **settings: Settings.kwargs) -> Result:
        unknown = next((name for name in settings if name not in names), None)
        if unknown is not None:
            advice = ELSEWHERE.get(unknown, f"those that there are: {', '.join(names)}")
            raise TypeError(f"there is no argument {unknown}; give {advice}")
        return function(*args, **settings)

    return checked
