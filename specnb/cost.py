"""What runs and generations cost on this machine: c, v(n) and seconds per token.

A cost is a ratio of times that were taken in turn: every repetition times everything that is compared,
in a new order, so that a machine that gets slower gets slower for all of it. What single runs cost
predicts the speed-up (`specnb.theory`); what generations cost is what the prediction is held against.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.decode import Generation, generate
from specnb.draft import prefill
from specnb.estimate import Estimate, interval, resampled
from specnb.fast import Captured, Compiled
from specnb.law import Sampling
from specnb.models import Pair, Runner
from specnb.record import PARTS, now

Array = NDArray[np.float64]
WARM_UP = 3  # runs of everything before the first one that counts
DRAFT_RUNS = 4  # in a row, as in a step


def ratio_of_medians(top: ArrayLike, bottom: ArrayLike, resamples: int = 2000, seed: int = 0) -> Estimate:
    """median(top) / median(bottom) of times taken in the same repetitions; the interval resamples those.

    n is the number of repetitions. Raises `ValueError` for unequal lengths or fewer than 3 repetitions.
    """
    top, bottom = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    if top.shape != bottom.shape or top.ndim != 1 or len(top) < 3:
        raise ValueError(f"need two equally long rows of at least 3 times, got shapes {top.shape} and {bottom.shape}")
    chosen = resampled(len(top), resamples, seed)
    ratios = np.median(top[chosen], axis=1) / np.median(bottom[chosen], axis=1)
    return Estimate(float(np.median(top) / np.median(bottom)), *interval(ratios), len(top))


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
    `specnb.decode.slots_for` says how many a loop has; by default there are no more than are needed. `compile` as in
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
        runs = [run_of(pair.target, n, tokens, context, compile) for n in lengths]
        draft = run_of(pair.draft, 1, tokens, context, compile)
        # Caches make the time of a run depend on what ran before it. So each is timed after what comes before it in
        # a loop: a draft run after a target run, verification after its like and drafts, plain decoding after itself.
        plain, *verifying = runs
        self.jobs = [Job(plain, before=[plain])]
        self.jobs += [Job(run, before=[run, *[draft] * DRAFT_RUNS]) for run in verifying]
        self.jobs += [Job(draft, before=[plain], times=DRAFT_RUNS)]
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


def in_turn(
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


def run_of(
    model: PreTrainedModel, n: int, tokens: Tensor, context: int, compile: bool | str = False
) -> Callable[[], Tensor]:
    """A run over the `n` tokens after `context`, of `tokens` `(rows, slots)`, to be made again and again.

    Each overwrites what the last one wrote. `compile` as in `generate`, done at the first run.
    """
    runner = Runner(model, tokens.shape[1])
    prefill(runner, tokens, torch.full((len(tokens),), context + 1, device=tokens.device))
    newest = tokens[:, context : context + n].contiguous()
    slots = torch.arange(context, context + n, device=tokens.device).repeat(len(tokens), 1)

    def once(newest: Tensor, slots: Tensor) -> Tensor:
        return runner.run(newest, slots, keep=n)

    made: Callable[..., Tensor] = Compiled(once) if compile is True else once
    if compile and tokens.device.type == "cuda":
        made = Captured(made)
    return partial(made, newest, slots)


@dataclass(frozen=True)
class Speeds:
    """What generating cost, one row per repetition.

    gammas   (gammas,)                             what was compared; 0 is plain decoding
    seconds  (repetitions, gammas, len(PARTS))     per emitted token, in each part of a step
    tokens_per_step  (repetitions, gammas)
    busy     (repetitions, gammas)                 share of the rows that a mean step was still generating
    """

    gammas: tuple[int, ...]
    seconds: Array
    tokens_per_step: Array
    busy: Array = field(default_factory=lambda: np.ones((1, 1)))

    def improvement(self, gamma: int, refilled: bool = False) -> Estimate:
        """How many times faster than gamma = 0. Raises `ValueError` for a gamma that was not measured.

        What disturbs a clock and what a text happens to accept are two things: of the time of a step this takes the
        median over repetitions, and of the tokens that it gave the mean, as the theory does.

        In a batch the rows that have ended wait for the last one, and with speculation they end apart. `refilled`
        takes that out: the improvement where new prompts take the places of rows that have ended.
        """
        plain, fast = (self._per_token(one, refilled) for one in (0, gamma))
        n = len(self.seconds)
        spread = plain(resampled(n, 2000, 0)) / fast(resampled(n, 2000, 0))
        every = np.arange(n)
        return Estimate(float(plain(every) / fast(every)), *interval(spread), n)

    def _per_token(self, gamma: int, refilled: bool) -> Callable[[NDArray[np.int64]], Array]:
        """Seconds per token of the repetitions `(..., n)`."""
        at = self.gammas.index(gamma)
        runs = 1 / self.tokens_per_step[:, at]  # target runs per token, in texts that are equally long
        step = (self.seconds.sum(axis=-1) * (self.busy if refilled else 1.0))[:, at] / runs
        return lambda chosen: np.median(step[chosen], axis=-1) * np.mean(runs[chosen], axis=-1)

    def tokens(self, gamma: int) -> float:
        """Tokens per step of all texts together."""
        return float(1 / np.mean(1 / self.tokens_per_step[:, self.gammas.index(gamma)]))

    def share(self, gamma: int, part: str) -> float:
        """The share of the time that one of `PARTS` took, over all repetitions."""
        mine = self.seconds[:, self.gammas.index(gamma)].sum(axis=0)
        return float(mine[PARTS.index(part)] / mine.sum())


def measure_speeds(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    gammas: Sequence[int],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    rows: int = 1,
    compile: bool | str = False,
    seed: int = 0,
    between: Callable[[], Any] = lambda: None,
    progress: bool = True,
) -> Speeds:
    """Times generation from each prompt with every gamma in turn: one prompt, one repetition.

    The prompt is alone in its batch, or there `rows` times. `compile` as in `generate`, done before the clock starts.
    `between` is called before each text, the round of a `CostMeter` say: what a machine does to one it does to both.

    Prompts are run before the clock starts, as in Theorem 3.8, which is about long texts. Raises
    `ValueError` when 0 is not among `gammas` or there are fewer than 3 prompts.
    """
    if 0 not in gammas or len(prompts) < 3:
        raise ValueError(f"gammas {list(gammas)} need a 0 to compare with, and {len(prompts)} prompts need to be 3")

    def run(prompt: Sequence[int], gamma: int, row: int) -> Generation:
        return generate(
            pair.target, [prompt] * rows, pair.draft, gamma=gamma, max_new_tokens=max_new_tokens, sampling=sampling,
            seed=seed, rows=range(row * rows, (row + 1) * rows), timed=True, compile=compile, progress=False,
        )  # fmt: skip

    for gamma in tqdm(gammas, desc="warming up", delay=3, leave=False, disable=not progress):
        run(prompts[0], gamma, 0)
    seconds = np.empty((len(prompts), len(gammas), len(PARTS)))
    tokens_per_step, busy = np.empty((2, *seconds.shape[:2]))
    order = np.random.default_rng(seed)
    for row, prompt in enumerate(tqdm(prompts, desc="timing texts", delay=3, leave=False, disable=not progress)):
        for at in order.permutation(len(gammas)):
            between()
            record = run(prompt, gammas[at], row).record
            seconds[row, at] = [record.seconds[part].sum() / record.emitted.sum() for part in PARTS]
            tokens_per_step[row, at] = record.emitted.sum() / record.target_runs.sum()
            busy[row, at] = record.active.mean()
    return Speeds(tuple(gammas), seconds, tokens_per_step, busy)
