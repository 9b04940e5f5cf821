"""Time of the steps of speculative and plain decoding on this machine, for several gammas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from specnb.cache import slots_for
from specnb.distributions import Sampling
from specnb.fast import Compile
from specnb.loading import Pair
from specnb.sampler import Instruments, Sampler
from specnb.statistics import Estimate, bootstrap, run_round

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Speeds:
    """Timed generations: arrays `(repetitions, gammas)`; gamma 0 is plain decoding.

    seconds  of a step
    tokens   of a step, for each row that has not ended
    active   fraction of the rows that have not ended, mean over steps

    >>> speeds = Speeds((0, 3), *np.array([[[2.0, 2.5]], [[1.0, 2.5]], [[1.0, 1.0]]]).repeat(4, axis=1))
    >>> speeds.improvement(3).value, speeds.tokens_per_step(3)
    (2.0, 2.5)
    """

    gammas: tuple[int, ...]
    seconds: Array
    tokens: Array
    active: Array

    def improvement(self, gamma: int, refilled: bool = False) -> Estimate:
        """Wall-clock improvement over plain decoding.

        Timing noise and acceptance are averaged differently: the median over repetitions of the time of a step, and
        the mean of the steps per token, as in the theory. In a batch the rows that have ended wait for the last one;
        `refilled` gives the improvement where a new prompt takes the place of a row that has ended.
        """
        emitted = self.tokens if refilled else self.tokens * self.active

        def per_token(gamma: int, rows: NDArray[np.int64]) -> Array:
            at = self.gammas.index(gamma)
            return np.asarray(np.median(self.seconds[rows, at], axis=-1) * np.mean(1 / emitted[rows, at], axis=-1))

        return bootstrap(lambda rows: per_token(0, rows) / per_token(gamma, rows), len(self.seconds), 2000, 0)

    def tokens_per_step(self, gamma: int) -> float:
        """Over all repetitions (block efficiency)."""
        return float(1 / np.mean(1 / self.tokens[:, self.gammas.index(gamma)]))


def measure_speeds(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    gammas: Sequence[int],
    *,
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    rows: int = 1,
    compile: Compile = False,
    between: Callable[[], Any] = lambda: None,
) -> Speeds:
    """Times generation from each prompt with every gamma, in a random order; each prompt is one repetition.

    A batch is `rows` copies of one prompt. `compile` as in `Sampler`; compilation is not timed. `between` is called
    before each generation, for instance `CostMeter.round`, so that costs and speeds are measured under equal
    conditions. The forward pass over the prompt is not timed, since Theorem 3.8 is about long sequences.

    >>> from specnb import load_pair
    >>> measure_speeds(load_pair(), [[1], [2], [3]], (0, 2), max_new_tokens=8).seconds.shape
    (3, 2)
    """
    longest = max(map(len, prompts))
    samplers = {
        gamma: Sampler(
            pair.target, pair.draft, gamma=gamma, sampling=sampling, compile=compile,
            slots=slots_for(longest, max_new_tokens, gamma), instruments=Instruments(timed=True), progress=False,
        )
        for gamma in gammas
    }  # fmt: skip

    def run(prompt: Sequence[int], gamma: int, row: int) -> tuple[float, float, float]:
        between()
        numbers = range(row * rows, (row + 1) * rows)
        record = samplers[gamma].generate([prompt] * rows, max_new_tokens=max_new_tokens, numbers=numbers).record
        seconds = sum(float(part.sum()) for part in record.seconds.values()) / record.active.shape[1]
        return seconds, record.emitted.sum() / record.target_passes.sum(), record.active.mean()

    for gamma in gammas:  # warms up
        run(prompts[0], gamma, 0)
    order, bar = np.random.default_rng(0), tqdm(prompts, desc="timing sequences", delay=3, leave=False)
    found = [run_round([partial(run, prompt, gamma, row) for gamma in gammas], order) for row, prompt in enumerate(bar)]
    return Speeds(tuple(gammas), *np.moveaxis(np.array(found), -1, 0))
