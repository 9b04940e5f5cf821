"""What may be asked of the loop: everything is looked at before anything is run.

The functions named `require` return nothing and raise `ValueError` or `TypeError`, which say what was given, what is
allowed and what to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from specnb.draft import Drafter, ModelDraft
from specnb.models import context_limit, require_same_vocabulary, require_supported

Tokens = int | Sequence[int] | None


def require_whole(**numbers: tuple[Any, int]) -> None:
    """Each of `numbers`, a value and the least one allowed, must be a whole number from there on."""
    for name, (value, least) in numbers.items():
        if not _whole(value) or value < least:
            raise ValueError(f"{name} is {value}; it must be a whole number from {least}")


def require_models(target: PreTrainedModel, drafter: Drafter | None) -> None:
    """Models that the loop can run, on one device and with one vocabulary."""
    require_supported(target)
    if drafter is None:
        return
    if not isinstance(drafter, Drafter):
        raise TypeError(f"draft is a {type(drafter).__name__}; it must be a model, a Drafter, or None")
    require_same_vocabulary(target, drafter.vocab)
    if isinstance(drafter, ModelDraft) and drafter.model.device != target.device:
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
    if compile not in (False, True, "graph"):
        raise ValueError(f'compile is {compile!r}; it must be False, True or "graph"')
    if compile == "graph" and device.type != "cuda":
        raise ValueError(f"a graph needs a CUDA device, and the target is on {device}; try compile=True")


def require_tokens(prompts: Sequence[Sequence[int]], numbers: list[int], eos: Tokens, vocab: int) -> None:
    """At least one prompt, none empty, all tokens in the vocabulary, and a number for each prompt."""
    if len(prompts) == 0:
        raise ValueError("there are no prompts; give at least one list of tokens")
    if len(numbers) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(numbers)} rows; each prompt has one number")
    if not all(_whole(number) and number >= 0 for number in numbers):
        raise ValueError(f"rows are {numbers}; they must be whole numbers from 0")
    for number, prompt in enumerate(prompts):
        if not isinstance(prompt, Iterable) or not all(map(_whole, prompt)):
            raise TypeError(f"prompt {number} is {prompt!r}; each prompt is a list of tokens, which are whole numbers")
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} is empty; begin with at least one token, the begin-of-text one say")
        _require_in_vocabulary(f"prompt {number}", prompt, vocab)
    _require_in_vocabulary("eos", listed(eos), vocab)


def _whole(value: Any) -> bool:
    return hasattr(value, "__index__")  # also of numpy and torch; isinstance with SupportsIndex is slow


def _require_in_vocabulary(name: str, tokens: Sequence[int], vocab: int) -> None:
    outside = [token for token in tokens if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"{name} has the token {outside[0]}; the vocabulary has the tokens 0 to {vocab - 1}")


def require_room(target: PreTrainedModel, drafter: Drafter | None, longest: int, max_new_tokens: int) -> None:
    """Positions enough in both models."""
    for model in [target, *([drafter.model] if isinstance(drafter, ModelDraft) else [])]:
        limit = context_limit(model)
        if limit is not None and longest + max_new_tokens > limit:
            raise ValueError(
                f"a prompt of {longest} and {max_new_tokens} new tokens need {longest + max_new_tokens} positions, "
                f"and {type(model).__name__} has {limit}; shorten the prompt or ask for fewer tokens"
            )


def listed(eos: Tokens) -> list[int]:
    """No token, one, or several, as a list."""
    return [eos] if isinstance(eos, int) else list(() if eos is None else eos)
