"""What `generate` is asked for, checked once, before any model runs.

Functions named `require...` return nothing. They raise `ValueError` or `TypeError` with what was
given, what is allowed and what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import torch
from transformers import PreTrainedModel

from specnb.decoding.auto_gamma import CAPTURED, FIXED, LARGEST, Auto, varies
from specnb.distributions import Sampling, require_sampling
from specnb.drafting.base import Drafter
from specnb.drafting.model import require_exact
from specnb.models.cache import cache_bytes, decoder_config, free_memory
from specnb.models.cached_model import require_hidden_layers
from specnb.models.probe import PROBED_ROWS, require_agreement
from specnb.models.support import (
    context_limit,
    require_same_vocabulary,
    require_supported,
    require_whole_head,
    vocabulary,
)
from specnb.number_checks import require_whole, shown
from specnb.rules import require_rule, token_verification
from specnb.trees import node_depths

LARGEST_SPARE_GAMMA = 32
"""A gamma up to this is never reduced, so that short sequences have whole steps too."""
SLOT_MULTIPLE = 128
"""A compiled step serves all lengths up to the next multiple of this many slots."""
GB = 1e9


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of `generate` with their defaults, and the sizes that follow from them.

    Raises what `generate` raises for arguments that are not valid. Some are settled: `drafter` is
    None where nothing is drafted, `gamma` is the most draft tokens of a step, reduced to what a
    sequence can use, and `rule` is the exact default if none is given.

    prompts, eos  lists of whole numbers, as `given_tokens` reads them
    numbers       the number of each prompt, which selects its random streams: 0, 1, ... unless
                  given
    keep_probs    whether the target's distribution of every new token is kept
    one_width     whether all steps have gamma draft tokens, whatever `gamma` asks for
    auto          what chooses the number of draft tokens of each step; None where it is fixed. It
                  follows from `gamma`

    >>> from specnb.models.shapes import Shape, empty_model
    >>> model = empty_model(Shape(1, 8, 8, 2), vocab=4, context=64, device="cpu", dtype=torch.float32)
    >>> request = Request(model, [[0], [1, 2]], gamma=4, max_new_tokens=3)
    >>> request.gamma, request.rows, request.slots, request.rule.__name__
    (0, 2, 6, 'token_verification')
    """

    target: PreTrainedModel
    prompts: Sequence[Sequence[int]]
    drafter: Drafter | None = None
    gamma: Any = 4  # a whole number, once it is settled
    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    rule: Any = None
    eos: Sequence[int] = ()
    seed: int = 0
    batch_size: int | None = None
    compile: bool | str = False
    numbers: Sequence[int] = ()
    keep_probs: bool = False
    one_width: bool = False
    auto: Auto | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        require_sampling(self.sampling)
        self.require_models()
        auto, most = self._choice()
        require_whole(gamma=(most, 0), max_new_tokens=(self.max_new_tokens, 1), seed=(self.seed, 0))
        require_tokens(self.prompts, self.eos, vocabulary(self.target))
        require_whole(batch_size=(len(self.prompts) if self.batch_size is None else self.batch_size, 1))
        gamma = _useful_gamma(index(most), index(self.max_new_tokens), self.drafter)
        drafter = self.drafter if gamma else None
        settled = {
            "drafter": drafter,
            "gamma": gamma,
            "auto": auto if drafter is not None else None,
            "max_new_tokens": index(self.max_new_tokens),
            "rule": _rule_for(self.rule, drafter),
            "numbers": _numbers_of(self.prompts, self.numbers),
        }
        for name, value in settled.items():
            object.__setattr__(self, name, value)
        require_context(self.target, self.drafter, self.longest, self.max_new_tokens)
        _require_refill(self.drafter, len(self.prompts), self.rows)
        _require_compile(self.compile, self.target.device, self.keep_probs)

    def require_models(self) -> None:
        """Raises `TypeError` or `ValueError` for models and drafters that the loop cannot run
        together."""
        require_models(self.target, self.drafter)

    def require_agreement(self) -> None:
        """Raises `TypeError` for a target that the loop would run wrongly
        (`specnb.models.probe`)."""
        require_agreement(self.target, self.slots, self.drafter is not None and self.drafter.parents is not None)

    def _choice(self) -> tuple[Auto | None, Any]:
        """What chooses the number of draft tokens of each step, None for a fixed number; and the
        most of a step."""
        drafter, auto = self.drafter, self.gamma
        by_default = isinstance(auto, str) and auto == "auto"
        if by_default:
            auto = Auto()
        if not isinstance(auto, Auto):
            return None, self.gamma
        usual = FIXED if drafter is None else drafter.usual or FIXED
        fixed = usual if drafter is None or drafter.parents is None else len(drafter.parents)
        if drafter is None or self.one_width or not varies(self.target, drafter, self.compile):
            return None, fixed
        if by_default and drafter.draft_model is not None and self.target.device.type != "cpu":
            # Every row pays for the widest of the batch: 16 rows were slower than plain decoding.
            return None, fixed
        most = FIXED if self.compile is True else CAPTURED[-1] if self.compile else LARGEST
        return auto, len(auto.costs) - 1 if auto.costs else most

    @property
    def rows(self) -> int:
        """How many prompts are generated at a time."""
        return len(self.prompts) if self.batch_size is None else min(self.batch_size, len(self.prompts))

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(map(len, self.prompts))

    @property
    def slots(self) -> int:
        """Cache slots of each row."""
        return slots_for(self.longest, self.max_new_tokens, self.gamma, self.compile)

    @property
    def steps(self) -> int:
        """The most steps of a row. Those of a compiled batch fill its slots, as it serves later
        requests too."""
        return self.slots if self.compile else self.max_new_tokens

    @property
    def probs_dtype(self) -> torch.dtype:
        """The dtype of the target's distributions."""
        return torch.float64 if self.target.dtype == torch.float64 else torch.float32


def slots_for(prompt: int, new_tokens: int, gamma: int, compile: bool | str = False) -> int:
    """The number of cache slots of each row, given the longest prompt.

    >>> slots_for(10, 64, 4), slots_for(10, 64, 4, compile=True)
    (79, 128)
    """
    slots = prompt + new_tokens + gamma + 1
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE if compile else slots


def require_memory(request: Request) -> None:
    """Raises `MemoryError`, naming the batch size that would fit, if caches and state are more than
    what is free.

    Hidden states and distributions count where they are kept. What a forward pass needs besides
    does not.
    """
    target, drafter, slots = request.target, request.drafter, request.slots
    row = slots * cache_bytes(target) + 8 * (slots + (request.steps + 1) * (4 * request.gamma + 4))
    if drafter is not None:
        row += slots * len(drafter.hidden_layers) * decoder_config(target).hidden_size * target.dtype.itemsize
        row += slots * cache_bytes(drafter.draft_model) if drafter.draft_model is not None else 0
    if request.keep_probs:
        row += (request.steps + request.gamma + 1) * vocabulary(target) * request.probs_dtype.itemsize
    free = free_memory(target.device)
    if max(request.rows, PROBED_ROWS) * row > free:
        fitting = free // row
        too_long = "two rows do not fit, which the model is checked with; ask for fewer tokens"
        advice = f"batch_size={fitting} would fit" if fitting >= PROBED_ROWS else too_long
        raise MemoryError(
            f"{request.rows} rows need {request.rows * row / GB:.3g} GB for caches and state, and {target.device} has "
            f"{free / GB:.3g} GB left: {advice}"
        )


def require_models(target: PreTrainedModel, drafter: Drafter | None) -> None:
    """Models that the loop can run, on one device and with one vocabulary; a `Drafter`."""
    require_supported(target)
    require_whole_head(target)
    if target.device.type == "meta":
        raise ValueError("the target is on the device meta, where it has no weights; load it on another")
    if target.device.type in ("mps", "xpu"):  # without float64, or without a copy to the host that does not wait
        raise ValueError(f"the target is on {target.device}; the loop runs on cpu and cuda: move it, target.to('cpu')")
    if drafter is None:
        return
    _require_drafter(drafter)
    node_depths(drafter.parents or ())  # raises for parents that are no tree
    require_hidden_layers(target, drafter.hidden_layers)
    require_same_vocabulary(target, type(drafter).__name__, drafter.vocab)
    model = drafter.draft_model
    if model is not None and model.device != target.device:
        raise ValueError(f"the target is on {target.device} and the draft on {model.device}; move one of them")


def _require_drafter(drafter: Any) -> None:
    if isinstance(drafter, type):
        name = drafter.__name__
        raise TypeError(f"draft is the class {name}; it must be a model, a Drafter, or None: give {name}(...)")
    if not isinstance(drafter, Drafter):
        raise TypeError(
            f"draft is a {type(drafter).__name__}; it must be a model, a Drafter, or None: load the model, or let the "
            "class inherit from specnb.drafting.base.Drafter"
        )


def require_tokens(prompts: Sequence[Sequence[int]], eos: Sequence[int], vocab: int) -> None:
    """At least one prompt, none empty, and all tokens in the vocabulary."""
    if not prompts:
        raise ValueError("there are no prompts; give at least one list of tokens")
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {number} is empty; give at least one token, such as the begin-of-text token")
        _require_in_vocabulary(f"prompt {number}", prompt, vocab)
    _require_in_vocabulary("eos", eos, vocab)


def _require_in_vocabulary(name: str, tokens: Sequence[int], vocab: int) -> None:
    for token in tokens:
        if not 0 <= token < vocab:
            raise ValueError(f"{name} has the token {token}; the vocabulary has the tokens 0 to {vocab - 1}")


def require_context(target: PreTrainedModel, drafter: Drafter | None, longest: int, max_new_tokens: int) -> None:
    """Enough positions in both models."""
    needed = longest + max_new_tokens
    for model in (target, drafter.draft_model if drafter is not None else None):
        limit = context_limit(model) if model is not None else None
        if limit is not None and needed > limit:
            raise ValueError(
                f"a prompt of {longest} and {max_new_tokens} new tokens need {needed} positions, and "
                f"{type(model).__name__} has {limit}; shorten the prompt or ask for fewer tokens"
            )


def _numbers_of(prompts: Sequence[Any], numbers: Collection[int]) -> Sequence[int]:
    if not len(numbers):
        return range(len(prompts))
    if len(numbers) != len(prompts):
        raise ValueError(f"there are {len(prompts)} prompts and {len(numbers)} rows; each prompt has one number")
    for number in numbers:
        require_whole(rows=(number, 0))
    return list(numbers)


def _useful_gamma(gamma: int, max_new_tokens: int, drafter: Drafter | None) -> int:
    """The number of draft tokens of a step: `gamma`, reduced where it exceeds what a sequence can
    use."""
    if drafter is None or gamma == 0:
        return 0
    if drafter.parents is None:
        return min(gamma, max(max_new_tokens - 1, LARGEST_SPARE_GAMMA))
    if gamma != len(drafter.parents):
        raise ValueError(
            f"gamma is {gamma}, and the tree of {type(drafter).__name__} has {len(drafter.parents)} nodes; "
            f"give gamma={len(drafter.parents)}, or 0 to decode without draft tokens"
        )
    return gamma


def _rule_for(rule: Any, drafter: Drafter | None) -> Any:
    """`rule`, or for None the exact default, `token_verification`; its recursion over siblings is
    that for trees."""
    if rule is None:
        return token_verification
    require_rule(rule, with_tree=drafter is not None and drafter.parents is not None)
    if drafter is not None and drafter.parents is not None and drafter.scheme is not None:
        require_exact(rule, drafter.scheme, drafter.parents)
    return rule


def _require_refill(drafter: Drafter | None, prompts: int, batch_size: int) -> None:
    if drafter is not None and prompts > batch_size and not drafter.can_refill:
        raise TypeError(
            f"{prompts} prompts take turns in {batch_size} rows, and {type(drafter).__name__} cannot restart single "
            "rows (can_refill is False); leave batch_size out"
        )


def _require_compile(compile: Any, device: torch.device, keep_probs: bool) -> None:
    if not isinstance(compile, bool) and compile != "graph":
        raise ValueError(f'compile is {shown(compile)}; it must be False, True or "graph"')
    if compile == "graph" and device.type != "cuda":
        raise ValueError(f"a graph needs a CUDA device, and the target is on {device}; try compile=True")
    # a compiled batch is kept for later requests, and so would be the distributions.
    if compile and keep_probs:
        raise ValueError(f"keep_probs is {keep_probs} and compile is {shown(compile)}; leave one of them out")
