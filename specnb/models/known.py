"""What was found out about a model, for as long as it is as it was.

The answer of a probe, compiled code and packed weights rest on a model's weights, parts, hooks and
settings, and all of these can be changed in place: by an optimizer, by adapters that are merged,
enabled or disabled, by a hook, by another dtype. So each call of the decoding loop first looks
whether the model is still the same one; if not, what was known is forgotten.

One generation runs at a time (`ALONE`): it changes settings of its models for a while, and a
compiled one has a cache of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel

from specnb.models.packing import PackedLinear, some_values, version

NOT_SETTINGS = frozenset(vars(nn.Module())) - {"training"} | {"products", "chosen", "of"}
SIMPLE = {bool, int, float, str, type(None)}
ALONE = RLock()
Given = ParamSpec("Given")
Result = TypeVar("Result")
_known: WeakKeyDictionary[PreTrainedModel, tuple[Any, dict[Any, Any]]] = WeakKeyDictionary()


def known_of(model: PreTrainedModel) -> dict[Any, Any]:
    """What was found out about `model`, to be read and added to; empty after any change of it.

    Packed layers whose weight has changed are packed again.

    >>> import torch
    >>> from specnb.models.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> known_of(model)["answer"] = 42
    >>> known_of(model)
    {'answer': 42}
    >>> next(model.parameters()).data += 1
    >>> known_of(model)
    {}
    """
    state = state_of(model)
    if model not in _known or _known[model][0] != state:
        for part in model.modules():
            if isinstance(part, PackedLinear):
                part.renew_if_changed()
        _known[model] = state, {}
    return _known[model][1]


def state_of(model: PreTrainedModel) -> tuple[Any, ...]:
    """What a forward pass of `model` rests on, for comparison with a later time."""
    parts, tensors = list[Any](), list[Tensor]()
    for part in model.modules():
        # A hook has a number that is never used twice.
        parts.append((id(part), *part._forward_hooks, *part._forward_pre_hooks))
        parts += [_plain(value) for name, value in vars(part).items() if name not in NOT_SETTINGS]
        tensors += [each for each in (*part._parameters.values(), *part._buffers.values()) if each is not None]
    places = [(tensor.data_ptr(), tensor.dtype, tensor.device, version(tensor)) for tensor in tensors]
    config = model.config.get_text_config(decoder=True)
    return parts, places, some_values(tensors), config._attn_implementation, repr(model.config.to_dict())


def _plain(value: Any) -> Any:
    if type(value) in SIMPLE:
        return value
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, dict):
        return [(name, _plain(inner)) for name, inner in value.items()]
    return id(value) if callable(value) else None


def one_at_a_time(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """`function`, for which calls from other threads wait."""

    @wraps(function)
    def alone(*args: Given.args, **settings: Given.kwargs) -> Result:
        with ALONE:
            return function(*args, **settings)

    return alone
