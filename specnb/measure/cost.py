"""What runs cost on this machine: c and v(n), with which the theory predicts the speed-up (`specnb.theory`).

A cost is a ratio of times that were taken in turn: every repetition times everything that is compared,
in a new order, so that a machine that gets slower gets slower for all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decoding.timing import now
from specnb.measure.statistics import Estimate, ratio_of_medians
from specnb.models.cached_model import CachedModel, prefill
from specnb.models.compilation import Captured, Compiled
from specnb.models.loading import Pair

Array = NDArray[np.float64]
WARM_UP = 3  # runs of everything before the first one that counts
DRAFT_PASSES = 4  # in a row, as in a step


@dataclass(frozen=True)
class Costs:
    """Seconds of single runs, one row per repetition.

    draft    (repetitions,)                a draft run over one token, the mean of `DRAFT_RUNS` in a row
    target   (repetitions, len(lengths))   target runs over so many tokens
    lengths  the numbers of tokens, the first of them 1
    """

    draft: Array
    target: Array
    lengths: tuple[int, ...]

    @property
    def cost_ratio(self) -> Estimate:
        """c: a draft run in target runs over one token (Definition 3.7)."""
        return ratio_of_medians(self.draft, self.target[:, 0])

    @property
    def verify_costs(self) -> list[Estimate]:
        """v(n) for each of `lengths`: target runs over n tokens in target runs over one."""
        return [ratio_of_medians(column, self.target[:, 0]) for column in self.target.T]

    def verify_cost(self, n: ArrayLike) -> Array:
        """v(n) for `specnb.theory`; raises `ValueError` where n was not measured."""
        asked = np.asarray(n)
        missing = sorted(set(asked.ravel().tolist()) - set(self.lengths))
        if missing:
            raise ValueError(f"runs over {list(self.lengths)} tokens were measured, not over {missing}")
        medians = np.median(self.target, axis=0)
        return medians[np.searchsorted(self.lengths, asked)] / medians[0]


@torch.inference_mode()
def measure_costs(
    pair: Pair,
    *,
    context: int = 128,
    slots: int | None = None,
    largest: int = 9,
    lengths: Sequence[int] = (),
    rows: int = 1,
    repetitions: int = 30,
    compile: bool | str = False,
    seed: int = 0,
    progress: bool = True,
) -> Costs:
    """Times draft runs over 1 token, and target runs over 1 to `largest` or over `lengths`, after `context` tokens.

    Runs only, of a batch of `rows`: no sampling, no verification, so that with one row c and v(n) are those of
    Definition 3.7, and with more those of a batch. A run attends to all `slots` of the cache, the empty ones too:
    `specnb.decoding.loop.slots_for` says how many a loop has; by default there are no more than are needed. `compile` as in
    `generate`; each length is compiled or captured first. Raises `ValueError` for context, largest, rows < 1,
    repetitions < 3, too few slots, and lengths that do not begin with 1 and grow.
    """
    lengths = tuple(lengths) or tuple(range(1, largest + 1))
    if largest < 1 or repetitions < 3:
        raise ValueError(f"largest and repetitions are {largest} and {repetitions}; they must be at least 1 and 3")
    meter = CostMeter(pair, context, lengths, slots=slots, rows=rows, compile=compile, seed=seed)
    for _ in tqdm(range(repetitions), desc="timing runs", delay=3, leave=False, disable=not progress):
        meter.round()
    return meter.costs()


class CostMeter:
    """Times runs round by round, so that rounds can lie between other things that are timed; see `measure_costs`."""

    @torch.inference_mode()
    def __init__(
        self,
        pair: Pair,
        context: int,
        lengths: Sequence[int],
        *,
        slots: int | None = None,
        rows: int = 1,
        compile: bool | str = False,
        seed: int = 0,
    ) -> None:
        if context < 1 or rows < 1:
            raise ValueError(f"context and rows are {context} and {rows}; they must be at least 1")
        if lengths[0] != 1 or list(lengths) != sorted(set(lengths)):
            raise ValueError(f"lengths are {list(lengths)}; they must begin with 1, the unit of cost, and grow")
        needed = context + lengths[-1]
        if slots is not None and slots < needed:
            raise ValueError(f"{slots} slots are too few; {context} tokens and a run over {lengths[-1]} need {needed}")
        self.lengths = tuple(lengths)
        self.order = np.random.default_rng(seed)
        vocab = pair.target.config.vocab_size
        tokens = torch.from_numpy(self.order.integers(vocab, size=(rows, slots or needed)))
        tokens = tokens.to(pair.target.device)
        runs = [forward_pass_of(pair.target, n, tokens, context, compile) for n in lengths]
        draft = forward_pass_of(pair.draft, 1, tokens, context, compile)
        # Caches make the time of a run depend on what ran before it. So each is timed after what comes before it in
        # a loop: a draft run after a target run, verification after its like and drafts, plain decoding after itself.
        plain, *verifying = runs
        self.jobs = [Job(plain, before=[plain])]
        self.jobs += [Job(run, before=[run, *[draft] * DRAFT_PASSES]) for run in verifying]
        self.jobs += [Job(draft, before=[plain], times=DRAFT_PASSES)]
        self.device = tokens.device
        self.rounds: list[Array] = []
        for _ in range(WARM_UP):
            self.round()
        self.rounds.clear()

    @torch.inference_mode()
    def round(self) -> None:
        """One run of each length and of the draft, in a new order."""
        self.rounds.append(one_round(self.jobs, self.device, self.order))

    def costs(self) -> Costs:
        """Of all rounds so far."""
        seconds = np.stack(self.rounds)
        return Costs(seconds[:, -1], seconds[:, :-1], self.lengths)


class Job(NamedTuple):
    """What is timed: `run`, so many `times` in a row, after the runs of `before`, which are not."""

    run: Callable[[], Any]
    before: Sequence[Callable[[], Any]]
    times: int = 1


def time_interleaved(
    jobs: Sequence[Job], device: torch.device, repetitions: int, order: np.random.Generator, progress: bool
) -> Array:
    """Seconds `(repetitions, jobs)` of one run of each job, in a new order each time; the first few do not count."""
    rounds = tqdm(range(-WARM_UP, repetitions), desc="timing runs", delay=3, leave=False, disable=not progress)
    return np.stack([one_round(jobs, device, order) for _ in rounds])[WARM_UP:]


def one_round(jobs: Sequence[Job], device: torch.device, order: np.random.Generator) -> Array:
    """Seconds `(jobs,)` of one run of each job, one after the other in a new order."""
    seconds = np.empty(len(jobs))
    for at in order.permutation(len(jobs)):
        run, before, times = jobs[at]
        for other in before:
            other()
        began = now(device)
        for _ in range(times):
            run()
        seconds[at] = (now(device) - began) / times
    return seconds


def forward_pass_of(
    model: PreTrainedModel, n: int, tokens: Tensor, context: int, compile: bool | str = False
) -> Callable[[], Tensor]:
    """A run over the `n` tokens after `context`, of `tokens` `(rows, slots)`, to be made again and again.

    Each overwrites what the last one wrote. `compile` as in `generate`, done at the first run.
    """
    runner = CachedModel(model, tokens.shape[1])
    prefill(runner, tokens, torch.full((len(tokens),), context + 1, device=tokens.device))
    newest = tokens[:, context : context + n].contiguous()
    slots = torch.arange(context, context + n, device=tokens.device).repeat(len(tokens), 1)

    def once(newest: Tensor, slots: Tensor) -> Tensor:
        return runner.run(newest, slots, keep=n)

    made: Callable[..., Tensor] = Compiled(once) if compile is True else once
    if compile and tokens.device.type == "cuda":
        made = Captured(made)
    return partial(made, newest, slots)
