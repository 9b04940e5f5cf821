"""Arguments: names known from other libraries, whole numbers, and numbers in an interval."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

Settings = ParamSpec("Settings")
Result = TypeVar("Result")

SHOWN = 200  # characters of a value in a message
ELSEWHERE = {name: f"sampling=Sampling({name}=...)" for name in ("temperature", "top_k", "top_p", "min_p")} | {
    "do_sample": "sampling=Sampling(temperature=0) for argmax",
    "eos_token_id": "eos",
    "assistant_model": "draft",
    "assistant_tokenizer": "ModelDrafter(draft, vocab=..., tokens=...) as draft",
    "num_assistant_tokens": "gamma",
    "prompt_lookup_num_tokens": "a PromptLookupDrafter as draft",
    "num_beams": "specnb.beam_search",
    "num_return_sequences": "[prompt] * n as prompts",
    "max_length": "max_new_tokens",
    "attention_mask": "what the tokenizer returned as prompts",
    "assistant_confidence_threshold": "gamma",
    "generation_config": "sampling=Sampling(...), eos and max_new_tokens",
    "logits_processor": "a forward hook on the output head of both models",
    "output_logits": "hooks=Hooks(keep_probs=True)",
    "output_scores": "hooks=Hooks(keep_probs=True)",
}
GUIDE = 'help(specnb.Sampler) describes them, and "Coming from transformers" in docs/decode.md of the repository'


def named_settings(function: Callable[Settings, Result]) -> Callable[Settings, Result]:
    """`function` with a `TypeError` for unknown arguments that names the one to use instead.

    >>> named_settings(lambda target, sampling=None: sampling)("model", temperature=0.5)
    Traceback (most recent call last):
    TypeError: there is no argument temperature; give sampling=Sampling(temperature=...)
    """
    names = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: Settings.args, **settings: Settings.kwargs) -> Result:
        for name in settings:
            if name not in names:
                known = f"there are {', '.join(names)}; {GUIDE}"
                advice = f"give {ELSEWHERE[name]}" if name in ELSEWHERE else known
                raise TypeError(f"there is no argument {name}; {advice}")
        return function(*args, **settings)

    return checked


def require_whole(most: int | None = None, **numbers: tuple[Any, int]) -> None:
    """Raise `ValueError` unless each number, given with the least one allowed, is whole and at most `most`."""
    for name, (value, least) in numbers.items():
        number = whole(value)
        if number is None or number < least or (most is not None and number > most):
            range_ = f"from {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{name} is {shown(value)}; it must be a whole number {range_}")


def whole(value: Any) -> int | None:
    """`value` as an int; None if it is no whole number of Python, numpy or torch. A truth value is none."""
    if isinstance(value, bool | np.bool_) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def whole_numbers(values: Any) -> list[int] | None:
    """A list, array or dense tensor of whole numbers as a list of ints; None for anything else."""
    if isinstance(values, Tensor) and (values.is_meta or values.layout != torch.strided):
        return None
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        return None
    numbers = [whole(value) for value in values]
    return None if None in numbers else numbers  # type: ignore[return-value]  # no None is left


def token_list(name: str, values: Any, more: str = "") -> list[int]:
    """`values` as a list of ints; `TypeError` that calls them `name`, and says `more`, if they are something else."""
    numbers = whole_numbers(values)
    if numbers is None:
        raise TypeError(f"{name} is {shown(values)}; it must be a list of tokens, which are whole numbers{more}")
    return numbers


def shown(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."
