"""Checks of the arguments of `generate`, all made before any model runs.

Functions named `require...` return nothing. They raise `ValueError` or `TypeError` with what was given, what is allowed
and what to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Set
from typing import Any, cast

import numpy as np
import torch
from transformers import PreTrainedModel

from specnb.arguments import shown, whole
from specnb.drafting.base import Drafter, missing_members
from specnb.drafting.model import TreeDrafter, require_exact
from specnb.models.support import context_limit, require_same_vocabulary, require_supported
from specnb.rules import Rule, TreeRule, recursive_rejection, token_verification
from specnb.trees import node_depths

Tokens = int | Collection[int] | None

LARGEST_SPARE_GAMMA = 32
"""A gamma up to this is never reduced, so that short sequences have whole steps too."""
METHODS = ("start", "propose", "update")  # of a drafter


def require_flags(**flags: Any) -> None:
    """Each of `flags` is True or False.

    >>> require_flags(timed=False)
    """
    for name, value in flags.items():
        if not isinstance(value, bool | np.bool_):
            raise TypeError(f"{name} is {shown(value)}; it must be True or False")


def rule_for(rule: Any, drafter: Drafter | None, gamma: int) -> Rule | TreeRule:
    """`rule`, or for None the exact default: `token_verification` for a chain, `recursive_rejection` for a tree.

    Raises `TypeError` for anything that is no rule, and for a rule for chains with a tree or the reverse; `ValueError`
    for a rule that is not exact for the way in which a `TreeDrafter` samples its tree.
    """
    tree = drafter is not None and gamma > 0 and drafter.parents is not None
    if rule is None:
        return recursive_rejection if tree else token_verification
    if not _takes(rule, 6 if isinstance(rule, TreeRule) else 5):
        raise TypeError(f"rule is {shown(rule)}; it must be an acceptance rule of specnb.rules, or such a function")
    if drafter is not None and gamma > 0 and isinstance(rule, TreeRule) != tree:
        kind, other = ("a tree", "TreeRule, such as recursive_rejection") if tree else ("a chain", "rule for chains")
        raise TypeError(
            f"{type(drafter).__name__} proposes {kind}, and rule is {shown(rule)}; it must be a {other}, or None"
        )
    if isinstance(drafter, TreeDrafter) and tree:
        require_exact(rule, drafter.scheme, drafter.parents)
    return rule  # type: ignore[no-any-return]


def _takes(function: Any, count: int) -> bool:
    """Whether `function` can be called with `count` arguments, as far as its signature says."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # a builtin without a signature
        return True
    return True


def useful_gamma(gamma: int, max_new_tokens: int, drafter: Drafter | None) -> int:
    """The number of draft tokens of a step: `gamma`, reduced where it exceeds what a sequence can use.

    Raises `ValueError` if a tree has another number of nodes.

    >>> useful_gamma(1000, max_new_tokens=64, drafter=None)
    0
    """
    if drafter is None or gamma == 0:
        return 0
    if drafter.parents is None:
        return min(gamma, max(max_new_tokens - 1, LARGEST_SPARE_GAMMA))
    if gamma != len(drafter.parents):
        raise ValueError(
            f"gamma is {shown(gamma)}, and the tree of {type(drafter).__name__} has {len(drafter.parents)} nodes; "
            f"give gamma={len(drafter.parents)}, or 0 to decode without draft tokens"
        )
    node_depths(drafter.parents)
    return gamma


def require_models(target: PreTrainedModel, drafter: Drafter | None) -> None:
    """Models that the loop can run, on one device and with one vocabulary; a drafter with all members of `Drafter`."""
    require_supported(target)
    if target.device.type == "meta":
        raise ValueError("the target is on the device meta, where it has no weights; load it on another")
    if drafter is None:
        return
    require_drafter(drafter)
    require_same_vocabulary(target, drafter.vocab)
    model = drafter.draft_model
    if model is not None and model.device != target.device:
        raise ValueError(f"the target is on {target.device} and the draft on {model.device}; move one of them")


def require_drafter(drafter: Any) -> None:
    """An object, not a class, with all members of `Drafter`, each of the type that `Drafter` says."""
    name = drafter.__name__ if isinstance(drafter, type) else type(drafter).__name__
    if isinstance(drafter, type):
        raise TypeError(f"draft is the class {name}; it must be a model, a Drafter, or None: give {name}(...)")
    missing = missing_members(drafter)
    if missing:
        raise TypeError(
            f"draft is a {name}; it must be a model, a Drafter, or None. It lacks {', '.join(missing)}: inherit from "
            "specnb.drafting.base.Drafter, which has defaults"
        )
    parents, layers, model = drafter.parents, drafter.hidden_layers, drafter.draft_model
    suitable = {
        "vocab": (whole(drafter.vocab) is not None, "a whole number"),
        "parents": (parents is None or _are_whole(parents), "None or a tuple of whole numbers"),
        "hidden_layers": (_are_whole(layers), "a tuple of whole numbers"),
        "draft_model": (model is None or isinstance(model, PreTrainedModel), "None or a model of transformers"),
        **{each: (_takes(getattr(drafter, each), 2), "a method that takes two arguments") for each in METHODS},
    }
    for member, (right, allowed) in suitable.items():
        if not right:
            raise TypeError(f"{name}.{member} is {shown(getattr(drafter, member))}; it must be {allowed}")


def _are_whole(values: Any) -> bool:
    return isinstance(values, tuple | list) and _whole_numbers(list(values)) is not None


def require_refill(drafter: Drafter | None, prompts: int, batch_size: int) -> None:
    """A drafter that can restart single rows, if prompts have to wait for a row."""
    if drafter is not None and prompts > batch_size and not drafter.can_refill:
        raise TypeError(
            f"{prompts} prompts take turns in {batch_size} rows, and {type(drafter).__name__} cannot restart single "
            "rows (can_refill is False); leave batch_size out"
        )


def require_compile(compile: Any, device: torch.device) -> None:
    """A value of `compile` that works on `device`."""
    if not isinstance(compile, bool) and not (isinstance(compile, str) and compile == "graph"):
        raise ValueError(f'compile is {shown(compile)}; it must be False, True or "graph"')
    if compile == "graph" and device.type != "cuda":
        raise ValueError(f"a graph needs a CUDA device, and the target is on {device}; try compile=True")


def require_probs(keep_probs: bool, compile: Any) -> None:
    """No compiled step if distributions are to be kept: its batch is reused, and so would be their memory."""
    if keep_probs and compile:
        raise ValueError(f"keep_probs is {keep_probs} and compile is {shown(compile)}; leave one of them out")


def require_tokens(prompts: Any, numbers: Any, eos: Any, vocab: int) -> None:
    """At least one prompt, none empty, all tokens in the vocabulary, and a number for each prompt."""
    prompts, numbers = listed_prompts(prompts), listed_rows(numbers)
    if len(prompts) == 0:
        raise ValueError("there are no prompts; give at least one list of tokens")
    if len(numbers) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(numbers)} rows; each prompt has one number")
    for number, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt {number} is empty; give at least one token, such as the begin-of-text token")
        _require_in_vocabulary(f"prompt {number}", prompt, vocab)
    _require_in_vocabulary("eos", as_list(eos), vocab)


def _require_in_vocabulary(name: str, tokens: list[int], vocab: int) -> None:
    outside = [token for token in tokens if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"{name} has the token {shown(outside[0])}; the vocabulary has the tokens 0 to {vocab - 1}")


def require_context(target: PreTrainedModel, drafter: Drafter | None, longest: int, max_new_tokens: int) -> None:
    """Enough positions in both models."""
    for model in (target, drafter.draft_model if drafter is not None else None):
        if model is None:
            continue
        limit = context_limit(model)
        if limit is not None and longest + max_new_tokens > limit:
            asked = f"a prompt of {longest} and {shown(max_new_tokens)} new tokens need"
            raise ValueError(
                f"{asked} {shown(longest + max_new_tokens)} positions, and {type(model).__name__} has {limit}; "
                "shorten the prompt or ask for fewer tokens"
            )


def listed_prompts(prompts: Any) -> list[list[int]]:
    """`prompts` as lists of tokens; they may be arrays or tensors.

    Raises `TypeError` for anything else, generators among them: one may have no end.

    >>> listed_prompts(np.array([[1, 2]]))
    [[1, 2]]
    """
    each = _items(prompts)
    if each is None:
        raise TypeError(f"prompts is {shown(prompts)}; it must be a list of prompts, each a list of tokens")
    return [_prompt(number, prompt) for number, prompt in enumerate(each)]


def _prompt(number: int, prompt: Any) -> list[int]:
    items = _items(prompt)
    tokens = None if items is None else _whole_numbers(items)
    if tokens is None:
        given = shown(prompt if items is None else items)
        raise TypeError(f"prompt {number} is {given}; each prompt is a list of tokens, which are whole numbers")
    return tokens


def listed_rows(rows: Any) -> list[int]:
    """The numbers of the prompts as a list. Raises `ValueError` unless they are whole numbers from 0.

    >>> listed_rows(range(2))
    [0, 1]
    """
    items = _items(rows)
    numbers = None if items is None else _whole_numbers(items)
    if numbers is None or any(number < 0 for number in numbers):
        given = shown(rows if items is None else items)
        raise ValueError(f"rows are {given}; they must be a list of whole numbers from 0")
    return numbers


def as_list(eos: Any) -> list[int]:
    """No token, one, or several, as a list. Raises `TypeError` for anything else.

    >>> as_list(None), as_list(3), as_list((3, 4))
    ([], [3], [3, 4])
    """
    if eos is None:
        return []
    one = whole(eos)
    if one is not None:
        return [one]
    items = list(eos) if isinstance(eos, Set) else _items(eos)
    tokens = None if items is None else _whole_numbers(items)
    if tokens is None:
        given = shown(eos if items is None else items)
        raise TypeError(f"eos is {given}; it must be a token, which is a whole number, a list of tokens, or None")
    return tokens


def _items(values: Any) -> list[Any] | None:
    """The items of `values`; None if it is no ordered collection, or has no length, as a generator."""
    if hasattr(values, "tolist"):  # of arrays and tensors; iterating over them is a thousand times slower
        try:
            values = values.tolist()
        except RuntimeError:  # tensors without values of their own: sparse, nested, or on the device meta
            return None
    if not isinstance(values, Collection) or isinstance(values, (str, bytes, bytearray, Set, Mapping)):
        return None
    return list(values)


def _whole_numbers(values: list[Any]) -> list[int] | None:
    numbers = [whole(value) for value in values]
    return None if None in numbers else cast(list[int], numbers)
