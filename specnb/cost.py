"""The cost ratio c and the verification cost v(n) of a pair on this machine (Definition 3.7, and `specnb.theory`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from tqdm import tqdm

from specnb.cache import CachedModel, LengthBound, prefill, slots_for
from specnb.fast import Captured, Compile, PrivateModel
from specnb.loading import Pair
from specnb.record import now
from specnb.statistics import Array, Estimate, Job, ratio_of_medians, time_round
from specnb.support import vocabulary

WARM_UP = 3  # rounds that are not counted
DRAFT_PASSES = 4  # draft forward passes in a row, as in a step


@dataclass(frozen=True)
class Costs:
    """Seconds of forward passes: `draft` `(repetitions,)` over one token, `target` over each of `lengths`.

    >>> costs = Costs(np.full(3, 0.1), np.array([[1.0, 1.2, 2.0]] * 3), lengths=(1, 2, 4))
    >>> costs.cost_ratio.value, costs.verify_cost([1, 2, 3]).tolist()
    (0.1, [1.0, 1.2, 1.6])
    """

    draft: Array
    target: Array
    lengths: tuple[int, ...]

    @property
    def cost_ratio(self) -> Estimate:
        """c: a draft pass over one token, in target passes over one token (Definition 3.7)."""
        return ratio_of_medians(self.draft, self.target[:, 0])

    @property
    def verify_costs(self) -> list[Estimate]:
        return [ratio_of_medians(column, self.target[:, 0]) for column in self.target.T]

    def verify_cost(self, n: ArrayLike) -> Array:
        """v(n): a target pass over n tokens, in passes over one; linear between measured lengths."""
        n = np.asarray(n)
        if n.size and (n.min() < 1 or n.max() > self.lengths[-1]):
            raise ValueError(f"passes over 1 to {self.lengths[-1]} tokens were measured, not over {n.tolist()}")
        medians = np.median(self.target, axis=0)
        return np.asarray(np.interp(n, self.lengths, medians / medians[0]))


def mid_generation(prompt: int, new_tokens: int, gamma: int) -> tuple[int, int]:
    """Context and cache slots of a forward pass half-way through a generation."""
    return prompt + new_tokens // 2, slots_for(prompt, new_tokens, gamma)


@torch.inference_mode()
def measure_costs(
    pair: Pair,
    *,
    context: int = 128,
    slots: int | None = None,
    lengths: Sequence[int] = tuple(range(1, 10)),
    rows: int = 1,
    repetitions: int = 30,
    compile: Compile = False,
    seed: int = 0,
    progress: bool = True,
) -> Costs:
    """Time forward passes.

    Parameters
    ----------
    context, slots
        Tokens before the pass, and slots of the cache.
    lengths
        Tokens of the target's passes, growing from 1.
    rows
        Rows of the batch; Definition 3.7 is about one.
    compile
        As in `Sampler`.
    """
    meter = CostMeter(pair, context, lengths, slots=slots, rows=rows, compile=compile, seed=seed)
    for _ in tqdm(range(repetitions), desc="timing forward passes", delay=3, leave=False, disable=not progress):
        meter.round()
    return meter.costs()


class CostMeter:
    """Times forward passes one round at a time; its arguments are those of `measure_costs`."""

    runner_class: type[CachedModel] = CachedModel

    @torch.inference_mode()
    def __init__(
        self, pair: Pair, context: int, lengths: Sequence[int], *, slots: int | None = None, rows: int = 1,
        compile: Compile = False, seed: int = 0,
    ) -> None:  # fmt: skip
        if lengths[0] != 1 or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"lengths are {list(lengths)}; they must begin with 1, the unit of cost, and grow")
        self.lengths = tuple(lengths)
        self.order = np.random.default_rng(seed)
        vocab = min(vocabulary(model) for model in (pair.target, pair.draft))
        tokens = torch.from_numpy(self.order.integers(vocab, size=(rows, slots or context + lengths[-1])))
        tokens = tokens.to(pair.target.device)
        target, draft = (PrivateModel(model, compile) for model in (pair.target, pair.draft))
        plain, *verify = [self._forward_pass_of(target, n, tokens, context, compile) for n in lengths]
        drafting = self._forward_pass_of(draft, 1, tokens, context, compile)
        # The pass before fills the processor's caches, so each pass is timed after the one that precedes it
        # in the loop: drafts after the target, verification after drafts, plain decoding after itself.
        self.jobs = [Job(plain, before=[plain])]
        self.jobs += [Job(each, before=[each, *[drafting] * DRAFT_PASSES]) for each in verify]
        self.jobs.append(Job(drafting, before=[plain], times=DRAFT_PASSES))
        self.clock = partial(now, tokens.device)
        self.rounds: list[Array] = []
        for _ in range(WARM_UP):
            self.round()
        self.rounds.clear()

    @torch.inference_mode()
    def round(self) -> None:
        self.rounds.append(time_round(self.jobs, self.clock, self.order))

    def costs(self) -> Costs:
        seconds = np.stack(self.rounds)
        return Costs(seconds[:, -1], seconds[:, :-1], self.lengths)

    def _forward_pass_of(
        self, private: PrivateModel, n: int, tokens: Tensor, context: int, compile: Compile
    ) -> Callable[[], Tensor]:
        cached = self.runner_class(private.modules, tokens.shape[1])
        prefill(cached, tokens, torch.full((len(tokens),), context + 1, device=tokens.device))
        newest = tokens[:, context : context + n].contiguous()
        slots = torch.arange(context, context + n, device=tokens.device).repeat(len(tokens), 1)
        bound = LengthBound(tokens.shape[1], n)
        bound.enter([context])
        bound.step()
        seen = cached.cache.least(slots, bound=bound)
        if private.compiled is not None:
            private.compiled.widths |= {n}

        def once(newest: Tensor, slots: Tensor) -> Tensor:
            return cached.run(newest, slots, keep=n, seen=seen)

        captures = compile is not False and tokens.device.type == "cuda"
        return partial(Captured(once) if captures else once, newest, slots)
