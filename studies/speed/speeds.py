"""Wall-clock time per token of speculative and plain decoding on this machine, for several
gammas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from specnb.decoding.generate import Hooks, generate
from specnb.decoding.record import PARTS
from specnb.distributions import Sampling
from specnb.measure.statistics import Estimate, bootstrap
from specnb.measure.timing import run_round
from specnb.models.loading import Pair

Array = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class Speeds:
    """Measured generations, one row per repetition.

    gammas           (gammas,)                          0 is plain decoding
    seconds          (repetitions, gammas, len(PARTS))  seconds per emitted token, in each part of a
                     step
    tokens_per_step  (repetitions, gammas)              of a row that has not ended
    active           (repetitions, gammas)              fraction of the rows that had not ended,
                     mean over steps

    >>> seconds = np.array([[[0.0, 2.0, 0.0], [0.25, 0.5, 0.25]]] * 4)
    >>> speeds = Speeds((0, 3), seconds, tokens_per_step=np.array([[1.0, 2.5]] * 4))
    >>> speeds.improvement(3).value, speeds.tokens(3), speeds.time_fraction(3, "draft")
    (2.0, 2.5, 0.25)
    >>> speeds
    gamma = 3: 2 [2, 2] (n = 4) times as fast as plain decoding, 2.50 tokens per step
    """

    gammas: tuple[int, ...]
    seconds: Array
    tokens_per_step: Array
    active: Array = field(default_factory=lambda: np.ones((1, 1)))

    def __repr__(self) -> str:
        return "\n".join(
            f"gamma = {gamma}: {self.improvement(gamma)} times as fast as plain decoding, {self.tokens(gamma):.2f} "
            "tokens per step"
            for gamma in self.gammas
            if gamma
        )

    def improvement(self, gamma: int, refilled: bool = False, over: int = 0) -> Estimate:
        """Wall-clock improvement over gamma = `over`, by default plain decoding.

        Raises `ValueError` for a gamma that was not measured.

        Timing noise and acceptance are averaged differently: the median over repetitions of the
        time of a step, and the mean of the steps per token, as in the theory.

        In a batch the rows that have ended wait for the last one. `refilled` gives the improvement
        with continuous batching, where a new prompt takes the place of a row that has ended.
        """
        baseline, measured = (self._per_token(one, refilled) for one in (over, gamma))
        return bootstrap(lambda chosen: baseline(chosen) / measured(chosen), len(self.seconds), 2000, 0)

    def _per_token(self, gamma: int, refilled: bool) -> Callable[[NDArray[np.int64]], Array]:
        """A function from repetitions `(..., n)` to seconds per token."""
        at = self.gammas.index(gamma)
        active = np.broadcast_to(self.active, self.tokens_per_step.shape)[:, at]
        # Per step and row, rows that have ended included.
        tokens = self.tokens_per_step[:, at] * active
        steps = self.seconds.sum(axis=-1)[:, at] * tokens
        # steps; sequences are equally long.
        per_token = 1 / (self.tokens_per_step[:, at] if refilled else tokens)
        return lambda chosen: np.median(steps[chosen], axis=-1) * np.mean(per_token[chosen], axis=-1)

    def tokens(self, gamma: int) -> float:
        """Tokens per step over all repetitions (block efficiency)."""
        return float(1 / np.mean(1 / self.tokens_per_step[:, self.gammas.index(gamma)]))

    def time_fraction(self, gamma: int, part: str) -> float:
        """The fraction of the time that one of `PARTS` took, over all repetitions."""
        seconds = self.seconds[:, self.gammas.index(gamma)].sum(axis=0)
        return float(seconds[PARTS.index(part)] / seconds.sum())


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
    """Times generation from each prompt with every gamma, in a random order; each prompt is one
    repetition.

    A batch is `rows` copies of one prompt. `compile` as in `generate`; compilation is not timed.
    `between` is called before each generation, for instance `CostMeter.round`, so that costs and
    speeds are measured under equal conditions. The forward pass over the prompt is not timed, since
    Theorem 3.8 is about long sequences. Raises `ValueError` when 0 is not among `gammas` or there
    are fewer than 3 prompts.

    >>> from specnb import load_pair
    >>> pair = load_pair()
    >>> measure_speeds(pair, [[1], [2], [3]], (0, 2), max_new_tokens=8).seconds.shape
    (3, 2, 3)
    """
    if 0 not in gammas or len(prompts) < 3:
        raise ValueError(
            f"gammas {list(gammas)} need a 0 to compare with, and {len(prompts)} prompts need to be at least 3"
        )

    def run(prompt: Sequence[int], gamma: int, row: int, before: Callable[[], Any]) -> tuple[Any, ...]:
        """An entry of each array of `Speeds`."""
        before()
        record = generate(
            pair.target, [prompt] * rows, pair.draft, gamma=gamma, max_new_tokens=max_new_tokens, sampling=sampling,
            seed=seed, compile=compile, progress=False, hooks=Hooks(range(row * rows, (row + 1) * rows), timed=True),
        ).record  # fmt: skip
        emitted = record.emitted.sum()
        seconds = [record.seconds[part].sum() / emitted for part in PARTS]
        return seconds, emitted / record.target_passes.sum(), record.active.mean()

    for gamma in tqdm(gammas, desc="warming up", delay=3, leave=False, disable=not progress):
        run(prompts[0], gamma, 0, lambda: None)
    order = np.random.default_rng(seed)
    bar = enumerate(tqdm(prompts, desc="timing sequences", delay=3, leave=False, disable=not progress))
    found = [run_round([partial(run, prompt, gamma, row, between) for gamma in gammas], order) for row, prompt in bar]
    seconds, tokens_per_step, active = (np.array([[run[at] for run in runs] for runs in found]) for at in range(3))
    return Speeds(tuple(gammas), seconds, tokens_per_step, active)
