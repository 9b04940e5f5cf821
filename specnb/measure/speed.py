"""What generations cost on this machine: seconds per token with every gamma, which predictions are held against.

Speculative and plain decoding are timed in turn, text by text, in a new order each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from specnb.decoding.loop import Generation, generate
from specnb.decoding.timing import PARTS
from specnb.measure.statistics import Estimate, bootstrap_indices, interval
from specnb.models.loading import Pair
from specnb.sampling.distributions import Sampling

Array = NDArray[np.float64]


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
        spread = plain(bootstrap_indices(n, 2000, 0)) / fast(bootstrap_indices(n, 2000, 0))
        every = np.arange(n)
        return Estimate(float(plain(every) / fast(every)), *interval(spread), n)

    def _per_token(self, gamma: int, refilled: bool) -> Callable[[NDArray[np.int64]], Array]:
        """Seconds per token of the repetitions `(..., n)`."""
        at = self.gammas.index(gamma)
        busy = np.broadcast_to(self.busy, self.tokens_per_step.shape)[:, at]
        tokens = self.tokens_per_step[:, at] * busy  # of a step, a row; waiting rows included
        steps = self.seconds.sum(axis=-1)[:, at] * tokens
        runs = 1 / (self.tokens_per_step[:, at] if refilled else tokens)  # per token, in texts that are equally long
        return lambda chosen: np.median(steps[chosen], axis=-1) * np.mean(runs[chosen], axis=-1)

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
            tokens_per_step[row, at] = record.emitted.sum() / record.target_passes.sum()
            busy[row, at] = record.active.mean()
    return Speeds(tuple(gammas), seconds, tokens_per_step, busy)
