"""The cost ratio c and the verification cost v(n) of a pair on this machine (Definition 3.7, and
`specnb.theory`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decoding.record import now
from specnb.decoding.request import slots_for
from specnb.measure.statistics import Estimate, ratio_of_medians
from specnb.measure.timing import Job, time_round
from specnb.models.cached_model import CachedModel, prefill
from specnb.models.compilation import Captured, Compiled
from specnb.models.loading import Pair
from specnb.models.support import vocabulary

Array = NDArray[np.float64]
WARM_UP = 3  # rounds that are not counted
DRAFT_PASSES = 4  # draft forward passes in a row, as in a step


@dataclass(frozen=True)
class Costs:
    """Seconds of single forward passes, one row per repetition.

    draft    (repetitions, len(draft_lengths))  draft forward passes over so many tokens
    target   (repetitions, len(lengths))        target forward passes over so many tokens
    lengths, draft_lengths                      numbers of tokens; both begin with 1

    >>> costs = Costs(np.full((3, 1), 0.1), np.array([[1.0, 1.2, 2.0]] * 3), lengths=(1, 2, 4))
    >>> costs.cost_ratio.value, costs.verify_cost([1, 2, 3]).tolist()
    (0.1, [1.0, 1.2, 1.6])
    """

    draft: Array
    target: Array
    lengths: tuple[int, ...]
    draft_lengths: tuple[int, ...] = (1,)

    @property
    def cost_ratio(self) -> Estimate:
        """c: time of a draft forward pass over one token, in target forward passes over one token
        (Definition 3.7)."""
        return ratio_of_medians(self.draft[:, 0], self.target[:, 0])

    @property
    def verify_costs(self) -> list[Estimate]:
        """v(n) for each of `lengths`, with intervals."""
        return [ratio_of_medians(column, self.target[:, 0]) for column in self.target.T]

    def verify_cost(self, n: ArrayLike) -> Array:
        """v(n): time of a target forward pass over n tokens, in target forward passes over one
        token.

        Linear between measured lengths. Raises `ValueError` outside their range.
        """
        return _relative(self.target, self.lengths, n)

    def draft_cost(self, n: ArrayLike) -> Array:
        """Time of a draft forward pass over n tokens, in draft forward passes over one; otherwise
        as `verify_cost`."""
        return _relative(self.draft, self.draft_lengths, n)


def _relative(seconds: Array, lengths: Sequence[int], n: ArrayLike) -> Array:
    n = np.asarray(n)
    if n.size and (n.min() < 1 or n.max() > lengths[-1]):
        raise ValueError(
            f"forward passes over 1 to {lengths[-1]} tokens were measured, not over {n.tolist()}; measure longer ones"
        )
    medians = np.median(seconds, axis=0)
    return np.asarray(np.interp(n, lengths, medians / medians[0]))


def mid_generation(prompt: int, new_tokens: int, gamma: int, compile: bool | str = False) -> tuple[int, int]:
    """Context and cache slots of a forward pass half-way through a generation: arguments for
    `measure_costs`.

    >>> mid_generation(prompt=32, new_tokens=64, gamma=4)
    (64, 101)
    """
    return prompt + new_tokens // 2, slots_for(prompt, new_tokens, gamma, compile)


@torch.inference_mode()
def measure_costs(
    pair: Pair,
    *,
    context: int = 128,
    slots: int | None = None,
    largest: int = 9,
    lengths: Sequence[int] = (),
    draft_lengths: Sequence[int] = (1,),
    rows: int = 1,
    repetitions: int = 30,
    compile: bool | str = False,
    seed: int = 0,
    progress: bool = True,
) -> Costs:
    """Times forward passes of the target over `lengths` (default 1 to `largest`) and of the draft
    over `draft_lengths`.

    Only forward passes are timed, of a batch of `rows`, after `context` tokens: no sampling and no
    verification. With one row c and v(n) are those of Definition 3.7, with more those of a batch.
    On a GPU a forward pass attends to all `slots` of the cache, the empty ones included;
    `mid_generation` gives those of a generation, and by default there are no more than needed.
    `compile` as in `generate`; compilation is not timed. Raises `ValueError` for context, largest,
    rows < 1, repetitions < 3, too few slots, and lengths that do not begin with 1 and grow.

    >>> from specnb import load_pair
    >>> pair = load_pair()
    >>> measure_costs(pair, context=8, largest=4, repetitions=3).target.shape
    (3, 4)
    """
    lengths = tuple(lengths) or tuple(range(1, largest + 1))
    if largest < 1 or repetitions < 3:
        raise ValueError(f"largest and repetitions are {largest} and {repetitions}; they must be at least 1 and 3")
    meter = CostMeter(
        pair, context, lengths, draft_lengths=draft_lengths, slots=slots, rows=rows, compile=compile, seed=seed
    )
    for _ in tqdm(range(repetitions), desc="timing forward passes", delay=3, leave=False, disable=not progress):
        meter.round()
    return meter.costs()


class CostMeter:
    """Times forward passes one round at a time, so that rounds can alternate with other timed work.

    The arguments are those of `measure_costs`.

    >>> from specnb import load_pair
    >>> pair = load_pair()
    >>> meter = CostMeter(pair, 8, (1, 3))
    >>> for _ in range(3):
    ...     meter.round()
    >>> meter.costs().target.shape
    (3, 2)
    """

    runner_class: type[CachedModel] = CachedModel

    @torch.inference_mode()
    def __init__(
        self, pair: Pair, context: int, lengths: Sequence[int], *, draft_lengths: Sequence[int] = (1,),
        slots: int | None = None, rows: int = 1, compile: bool | str = False, seed: int = 0,
    ) -> None:  # fmt: skip
        if context < 1 or rows < 1:
            raise ValueError(f"context and rows are {context} and {rows}; they must be at least 1")
        for one in (lengths, draft_lengths):
            if not one or one[0] != 1 or list(one) != sorted(set(one)):
                raise ValueError(f"lengths are {list(one)}; they must begin with 1, the unit of cost, and grow")
        longest = max(lengths[-1], draft_lengths[-1])
        required = context + longest
        if slots is not None and slots < required:
            raise ValueError(
                f"{slots} slots are too few; {context} tokens and a forward pass over {longest} need {required}"
            )
        self.lengths, self.draft_lengths = tuple(lengths), tuple(draft_lengths)
        self.order = np.random.default_rng(seed)
        vocab = min(vocabulary(model) for model in (pair.target, pair.draft))
        tokens = torch.from_numpy(self.order.integers(vocab, size=(rows, slots or required)))
        tokens = tokens.to(pair.target.device)
        plain, *verify = [self._forward_pass_of(pair.target, n, tokens, context, compile) for n in lengths]
        drafts = [self._forward_pass_of(pair.draft, n, tokens, context, compile) for n in draft_lengths]
        # What ran before is in the processor's caches and changes the time of a forward pass. So
        # each is timed after what precedes it in a loop: drafts after the target, verification
        # after its like and drafts, plain decoding after itself.
        self.jobs = [Job(plain, before=[plain])]
        self.jobs += [Job(one, before=[one, *[drafts[0]] * DRAFT_PASSES]) for one in verify]
        self.jobs += [Job(draft, before=[plain], times=DRAFT_PASSES) for draft in drafts]
        self.clock = partial(now, tokens.device)
        self.rounds: list[Array] = []
        for _ in range(WARM_UP):
            self.round()
        self.rounds.clear()

    @torch.inference_mode()
    def round(self) -> None:
        """Times one forward pass of each length of each model, in a random order."""
        self.rounds.append(time_round(self.jobs, self.clock, self.order))

    def costs(self) -> Costs:
        """The costs of all rounds so far."""
        seconds = np.stack(self.rounds)
        target, draft = np.split(seconds, [len(self.lengths)], axis=1)
        return Costs(draft, target, self.lengths, self.draft_lengths)

    def _forward_pass_of(
        self, model: PreTrainedModel, n: int, tokens: Tensor, context: int, compile: bool | str = False
    ) -> Callable[[], Tensor]:
        """A function that runs `model` over the `n` tokens after `context` and returns logits
        `(rows, n, vocab)`."""
        cached = self.runner_class(model, tokens.shape[1])
        prefill(cached, tokens, torch.full((len(tokens),), context + 1, device=tokens.device))
        newest = tokens[:, context : context + n].contiguous()
        slots = torch.arange(context, context + n, device=tokens.device).repeat(len(tokens), 1)

        seen = cached.cache.least(slots)

        def once(newest: Tensor, slots: Tensor) -> Tensor:
            return cached.run(newest, slots, keep=n, seen=seen)

        compiled: Callable[..., Tensor] = Compiled(once, model.dtype) if compile is True else once
        if compile and tokens.device.type == "cuda":
            compiled = Captured(compiled)
        return partial(compiled, newest, slots)
