"""What may be asked of the loop: everything is looked at before anything is run.

The functions named `require` return nothing and raise `ValueError` or `TypeError`, which say what was given, what is
allowed and what to do.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.drafting.base import Drafter
from specnb.drafting.model import ModelDrafter
from specnb.models.support import context_limit, require_same_vocabulary, require_supported
from specnb.sampling.distributions import Sampling

Tokens = int | Iterable[int] | None

LARGEST_SPARE_GAMMA = 32
"""A gamma up to this stays as it is even where fewer tokens are asked for, so that short runs show whole steps."""
SHOWN = 200  # characters of a value in a message


def require_whole(**numbers: tuple[Any, int]) -> None:
    """Each of `numbers`, a value and the least one allowed, must be a whole number from there on."""
    for name, (value, least) in numbers.items():
        whole = _whole(value)
        if whole is None or whole < least:
            raise ValueError(f"{name} is {_shown(value)}; it must be a whole number from {least}")


def require_sampling(sampling: Any, rule: Any) -> None:
    """A `Sampling`, and an acceptance rule that can be called."""
    if not isinstance(sampling, Sampling):
        raise TypeError(
            f"sampling is {_shown(sampling)}; it must be a specnb.sampling.distributions.Sampling, such as Sampling()"
        )
    if not callable(rule):
        raise TypeError(
            f"rule is {_shown(rule)}; it must be an acceptance rule of specnb.sampling.verification, or such a function"
        )


def useful_gamma(gamma: int, max_new_tokens: int) -> int:
    """`gamma`, or the largest one that is worth drafting where that is less."""
    return min(gamma, max(max_new_tokens - 1, LARGEST_SPARE_GAMMA))


def require_models(target: PreTrainedModel, drafter: Drafter | None) -> None:
    """Models that the loop can run, on one device and with one vocabulary."""
    require_supported(target)
    if target.device.type == "meta":
        raise ValueError("the target is on the device meta, where it has no weights; load it on another")
    if drafter is None:
        return
    if not isinstance(drafter, Drafter) or isinstance(drafter, type):
        raise TypeError(f"draft is a {type(drafter).__name__}; it must be a model, a Drafter, or None")
    require_same_vocabulary(target, drafter.vocab)
    if isinstance(drafter, ModelDrafter) and drafter.model.device != target.device:
        raise ValueError(f"the target is on {target.device} and the draft on {drafter.model.device}; move one of them")


def require_refill(drafter: Drafter | None, prompts: int, batch_size: int) -> None:
    """A drafter that can begin single rows anew, where prompts take over rows."""
    if drafter is None or prompts <= batch_size or "rows" in inspect.signature(drafter.start).parameters:
        return
    raise TypeError(
        f"{prompts} prompts take turns in {batch_size} rows, and the start() of {type(drafter).__name__} has no "
        "parameter rows to be told which of them begin anew; add it, or leave batch_size out"
    )


def require_compile(compile: Any, device: torch.device) -> None:
    """A way to compile that there is on `device`."""
    if not isinstance(compile, bool) and not (isinstance(compile, str) and compile == "graph"):
        raise ValueError(f'compile is {_shown(compile)}; it must be False, True or "graph"')
    if compile == "graph" and device.type != "cuda":
        raise ValueError(f"a graph needs a CUDA device, and the target is on {device}; try compile=True")


def require_tokens(prompts: Any, numbers: Any, eos: Any, vocab: int) -> None:
    """At least one prompt, none empty, all tokens in the vocabulary, and a number for each prompt."""
    prompts, numbers = listed_prompts(prompts), listed_rows(numbers)
    if len(prompts) == 0:
        raise ValueError("there are no prompts; give at least one list of tokens")
    if len(numbers) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(numbers)} rows; each prompt has one number")
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} is empty; begin with at least one token, the begin-of-text one say")
        _require_in_vocabulary(f"prompt {number}", prompt, vocab)
    _require_in_vocabulary("eos", as_list(eos), vocab)


def _require_in_vocabulary(name: str, tokens: list[int], vocab: int) -> None:
    outside = [token for token in tokens if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"{name} has the token {_shown(outside[0])}; the vocabulary has the tokens 0 to {vocab - 1}")


def require_context(target: PreTrainedModel, drafter: Drafter | None, longest: int, max_new_tokens: int) -> None:
    """Positions enough in both models."""
    for model in [target, *([drafter.model] if isinstance(drafter, ModelDrafter) else [])]:
        limit = context_limit(model)
        if limit is not None and longest + max_new_tokens > limit:
            asked = f"a prompt of {longest} and {_shown(max_new_tokens)} new tokens need"
            raise ValueError(
                f"{asked} {_shown(longest + max_new_tokens)} positions, and {type(model).__name__} has {limit}; "
                "shorten the prompt or ask for fewer tokens"
            )


def listed_prompts(prompts: Any) -> list[list[int]]:
    """`prompts` as lists of tokens; they may be arrays, tensors or generators. Raises `TypeError` for anything else."""
    each = _items(prompts)
    if each is None:
        raise TypeError(f"prompts is {_shown(prompts)}; it must be a list of prompts, each a list of tokens")
    return [_prompt(number, prompt) for number, prompt in enumerate(each)]


def _prompt(number: int, prompt: Any) -> list[int]:
    items = _items(prompt)
    tokens = None if items is None else _whole_numbers(items)
    if tokens is None:
        given = _shown(prompt if items is None else items)
        raise TypeError(f"prompt {number} is {given}; each prompt is a list of tokens, which are whole numbers")
    return tokens


def listed_rows(rows: Any) -> list[int]:
    """The numbers of the prompts as a list. Raises `ValueError` for others than whole ones from 0."""
    items = _items(rows)
    numbers = None if items is None else _whole_numbers(items)
    if numbers is None or any(number < 0 for number in numbers):
        raise ValueError(f"rows are {_shown(rows if items is None else items)}; they must be whole numbers from 0")
    return numbers


def as_list(eos: Any) -> list[int]:
    """No token, one, or several, as a list. Raises `TypeError` for anything else."""
    if eos is None:
        return []
    one = _whole(eos)
    if one is not None:
        return [one]
    items = list(eos) if isinstance(eos, Set) else _items(eos)
    tokens = None if items is None else _whole_numbers(items)
    if tokens is None:
        given = _shown(eos if items is None else items)
        raise TypeError(f"eos is {given}; it must be a token, which is a whole number, a list of tokens, or None")
    return tokens


def _items(values: Any) -> list[Any] | None:
    """What `values` holds, in its order; None where it holds nothing, or in no order."""
    if hasattr(values, "tolist"):  # arrays and tensors: their own way is a thousand times faster
        values = values.tolist()
    if not isinstance(values, Iterable) or isinstance(values, (str, bytes, bytearray, Set, Mapping)):
        return None
    return list(values)


def _whole_numbers(values: list[Any]) -> list[int] | None:
    numbers = [_whole(value) for value in values]
    return None if None in numbers else cast(list[int], numbers)


def _whole(value: Any) -> int | None:
    """The whole number that `value` is, of Python, numpy or torch, or None. A truth value is no number."""
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)) or (isinstance(value, Tensor) and value.dtype == torch.bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _shown(value: Any) -> str:
    """How `value` looks, or its beginning where it is long."""
    try:
        shown = repr(value)
    except ValueError:  # Python prints no integer of more than some thousand digits
        return f"a {type(value).__name__} too long to show"
    return shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
