"""Checks of what a drafter is made of: a wrong argument is named where it is given, not in the first step."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from specnb.arguments import require_whole
from specnb.drafting.base import missing_members
from specnb.drafting.chain import ChainDrafter
from specnb.drafting.model import ModelDrafter


def require_lengths(vocab: int, shortest: int, longest: int) -> None:
    """Raises `ValueError` unless all are whole numbers with 1 <= `shortest` <= `longest`, and `vocab` at least 1.

    >>> require_lengths(vocab=9, shortest=2, longest=2)
    """
    require_whole(vocab=(vocab, 1), shortest=(shortest, 1), longest=(longest, 1))
    if not shortest <= longest:
        raise ValueError(f"shortest is {shortest} and longest {longest}; they must be 1 <= shortest <= longest")


def whole_tokens(name: str, tokens: Any) -> NDArray[np.int64]:
    """`tokens`, a list, array or tensor of token numbers, as an array `(tokens,)`.

    Raises `TypeError` for anything else: a text, a generator (which may have no end), numbers that are not whole.

    >>> whole_tokens("tokens", [3, 1])
    array([3, 1])
    """
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Sized | Iterable) or not hasattr(tokens, "__len__"):
        raise TypeError(f"{name} is a {type(tokens).__name__}; it must be a list or array of token numbers")
    try:
        array = np.asarray(tokens)
    except (ValueError, TypeError) as error:
        raise TypeError(f"{name} is no list of token numbers: {error}") from error
    if array.ndim != 1 or not (array.dtype.kind in "iu" or array.size == 0):
        raise TypeError(
            f"{name} is an array of shape {array.shape} and type {array.dtype}; it must be one list of token numbers, "
            "which are whole: encode a text with the target's tokenizer"
        )
    return array.astype(np.int64)


def require_drafter(name: str, drafter: Any) -> None:
    """Raises `TypeError` unless `drafter` is a drafter that proposes chains and needs no hidden states."""
    _require_no_tree(name, drafter)
    if drafter.hidden_layers:
        raise TypeError(
            f"{name} is a {type(drafter).__name__}, which reads the target's hidden states; here it would draft where "
            "there are none: give a drafter that reads tokens alone"
        )


def _require_no_tree(name: str, drafter: Any) -> None:
    if isinstance(drafter, type) or missing_members(drafter):
        raise TypeError(_wrong(name, drafter, "a drafter"))
    if drafter.parents is not None:
        raise TypeError(
            f"{name} is a {type(drafter).__name__}, which proposes a tree; within another drafter it must propose a "
            "chain"
        )


def require_chain(name: str, drafter: Any) -> None:
    """Raises `TypeError` unless `drafter` is a `ChainDrafter`: one that can be mixed and stopped."""
    if not isinstance(drafter, ChainDrafter):
        raise TypeError(_wrong(name, drafter, "a ChainDrafter, which has the distribution of each draft token"))
    _require_no_tree(name, drafter)


def require_model_drafter(name: str, drafter: Any) -> None:
    """Raises `TypeError` unless `drafter` is a `ModelDrafter`."""
    if not isinstance(drafter, ModelDrafter):
        raise TypeError(_wrong(name, drafter, "a ModelDrafter"))
    require_drafter(name, drafter)


def _wrong(name: str, given: Any, allowed: str) -> str:
    shown = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
    advice = ": give ModelDrafter(model, sampling)" if isinstance(given, PreTrainedModel) else ""
    return f"{name} is {shown}; it must be {allowed}{advice}"


def require_equal_vocabularies(first: Any, second: Any) -> None:
    """Raises `ValueError` unless both drafters have one vocabulary."""
    if first.vocab != second.vocab:
        raise ValueError(
            f"{type(first).__name__} has {first.vocab} tokens and {type(second).__name__} {second.vocab}; "
            "drafters that are combined need the target's vocabulary"
        )


def shared_hidden_layers(first: Any, second: Any) -> tuple[int, ...]:
    """The hidden layers that both drafters read, or the one that reads any.

    Raises `ValueError` where both read some and these differ: there is one record of hidden states.
    """
    if first.hidden_layers and second.hidden_layers and tuple(first.hidden_layers) != tuple(second.hidden_layers):
        raise ValueError(
            f"{type(first).__name__} reads the hidden layers {first.hidden_layers} and {type(second).__name__} "
            f"{second.hidden_layers}; drafters that are combined must read the same ones"
        )
    return tuple(first.hidden_layers or second.hidden_layers)


def evaluate_again(drafter: Any, count: int) -> None:
    """From now on each model in `drafter` begins a step with at least the `count` newest tokens of a row.

    A drafter that is called by another one misses tokens: those that the other adds without calling it.

    >>> from specnb.drafting.uniform import UniformDrafter
    >>> evaluate_again(UniformDrafter(4), 3)  # there is no model in it
    """
    if hasattr(drafter, "unseen"):
        drafter.unseen = max(drafter.unseen, count)
    for part in getattr(drafter, "__dict__", {}).values():
        if not isinstance(part, type) and not missing_members(part):
            evaluate_again(part, count)
