"""What speculative beam search gains: levels per step, counted and replayed, and the time of a step.

The target's search is the same whatever the draft does, so it is run once; how far each draft would have
carried each of its steps is then a matter of the draft alone. Widths are the target's w and the draft's u.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from specnb.decoding.beam import beam_search
from specnb.decoding.timing import now
from specnb.measure.statistics import Estimate, ratio_of_medians
from specnb.models.cached_model import CachedModel, prefill
from specnb.models.loading import Pair
from specnb.sampling.beam_rules import BeamSettings, LogProbs, State, draft_levels

Array = NDArray[np.float64]
Cost = Callable[[int], float]
"""The time of a run over n tokens, in runs of the same model over one."""


def needed_width(state: State, following: State, draft: LogProbs, settings: BeamSettings) -> int:
    """The least u at which the draft's first level holds all beams that follow `state` in the target's search."""
    totals = state.scores[:, None] + draft(state.paths).to(state.scores)
    totals[:, list(settings.eos)] = -torch.inf
    rows = {path: row for row, path in enumerate(state.paths)}
    flat = totals.flatten()
    ranks = []
    for path in following.paths:
        at = rows[path[:-1]] * totals.shape[1] + path[-1]
        ranks.append(int((flat > flat[at]).sum() + (flat[:at] == flat[at]).sum()) + 1)
    return max(ranks)


def accepted_levels(
    states: Sequence[State], draft: LogProbs, widths: Sequence[int], gamma: int, settings: BeamSettings
) -> NDArray[np.int64]:
    """How many drafted levels, up to `gamma`, a step from each of the target's states would accept.

    `(len(widths), levels)` for the draft's `widths`; `states` is the search from its start to its end.
    """
    accepted = np.zeros((len(widths), len(states) - 1), dtype=np.int64)
    for at, state in enumerate(states[:-1]):
        for row, width in enumerate(widths):
            levels = draft_levels(state, draft, width, gamma, settings)
            for own, level in zip(states[at + 1 :], levels, strict=False):
                if own.ended or not set(own.paths) <= set(level):
                    break
                accepted[row, at] += 1
        draft.keep(states[at + 1].paths)
    return accepted


def replayed(accepted: NDArray[np.int64], gamma: int) -> NDArray[np.int64]:
    """The levels of each step of a search with `gamma`, from one row of what `accepted_levels` returns."""
    levels: list[int] = []
    while sum(levels) < len(accepted):
        levels.append(min(int(accepted[sum(levels)]), gamma) + 1)
    return np.array(levels)


def free(n: int) -> float:
    """A run that takes no longer over many tokens than over one, as section 3.3 assumes."""
    return 1.0


def step_time(width: int, draft_width: int, gamma: int, c: float, verify: Cost = free, drafting: Cost = free) -> float:
    """Time of a step in target runs over one token: v(w + u gamma) + c (d(w) + (gamma - 1) d(u)).

    v is `verify`, d `drafting`. Where both are free, gamma c + 1 is left, as in Theorem 3.8.
    """
    draft_tokens = drafting(width) + (gamma - 1) * drafting(draft_width)
    return verify(width + draft_width * gamma) + c * draft_tokens


def improvement(
    levels: float, width: int, draft_width: int, gamma: int, c: float, verify: Cost = free, drafting: Cost = free
) -> float:
    """How many times faster than the target's search alone, whose levels take v(w) each, with `levels` a step."""
    return levels * verify(width) / step_time(width, draft_width, gamma, c, verify, drafting)


@dataclass(frozen=True)
class RunCosts:
    """Seconds `(repetitions, len(sizes))` of runs over `sizes` tokens, the first of which is 1."""

    sizes: tuple[int, ...]
    target: Array
    draft: Array

    @property
    def cost_ratio(self) -> Estimate:
        """c: a draft run over one token in target runs over one."""
        return ratio_of_medians(self.draft[:, 0], self.target[:, 0])

    def verify(self, n: int) -> float:
        """v(n), a straight line between the sizes measured."""
        return self._relative(self.target, n)

    def drafting(self, n: int) -> float:
        """The same of the draft."""
        return self._relative(self.draft, n)

    def _relative(self, seconds: Array, n: int) -> float:
        if not 1 <= n <= self.sizes[-1]:
            raise ValueError(f"runs over 1 to {self.sizes[-1]} tokens were measured, not over {n}")
        medians = np.median(seconds, axis=0)
        return float(np.interp(n, self.sizes, medians / medians[0]))


@torch.inference_mode()
def measure_run_costs(
    pair: Pair, sizes: Sequence[int], *, context: int = 128, repetitions: int = 20, seed: int = 0, progress: bool = True
) -> RunCosts:
    """Times runs of both models over each of `sizes` tokens after `context`, in turn and in a new order each time.

    Raises `ValueError` unless `sizes` begin with 1 and grow.
    """
    if not sizes or sizes[0] != 1 or any(b <= a for a, b in pairwise(sizes)):
        raise ValueError(f"sizes are {list(sizes)}; they must begin with 1 and grow")
    order = np.random.default_rng(seed)
    tokens = torch.from_numpy(order.integers(pair.target.config.vocab_size, size=(1, context + sizes[-1])))
    tokens = tokens.to(pair.target.device)
    runners = [CachedModel(model, context + sizes[-1]) for model in (pair.target, pair.draft)]
    for runner in runners:
        prefill(runner, tokens, torch.tensor([context + 1]))
    jobs = [(runner, n) for runner in runners for n in sizes]
    seconds = np.empty((repetitions, len(jobs)))
    for repetition in tqdm(range(-2, repetitions), desc="timing runs", delay=3, leave=False, disable=not progress):
        for job in order.permutation(len(jobs)):
            runner, n = jobs[job]
            slots = torch.arange(context, context + n, device=tokens.device)[None]
            began = now(tokens.device)
            runner.run(tokens[:, context : context + n], slots, keep=n)
            seconds[max(repetition, 0), job] = now(tokens.device) - began
    return RunCosts(tuple(sizes), seconds[:, : len(sizes)], seconds[:, len(sizes) :])


def measure_speeds(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[tuple[int, int]],
    *,
    width: int,
    max_new_tokens: int,
    seed: int = 0,
    progress: bool = True,
) -> list[Estimate]:
    """How many times faster than the target alone the search is with each (draft_width, gamma) of `choices`.

    Every prompt is searched with each choice and with none, in turn; the interval is over prompts.
    """
    order = np.random.default_rng(seed)
    jobs: list[tuple[int, int] | None] = [None, *choices]
    seconds = np.empty((len(prompts), len(jobs)))
    rounds = [prompts[0], *prompts]  # the first one warms up, and is overwritten
    for number, prompt in enumerate(tqdm(rounds, desc="timing", delay=3, leave=False, disable=not progress)):
        for job in order.permutation(len(jobs)):
            choice = jobs[job]
            drafting = {} if choice is None else {"draft_width": choice[0], "gamma": choice[1]}
            began = time.perf_counter()
            beam_search(
                pair.target, prompt, pair.draft if choice else None, width=width,
                max_new_tokens=max_new_tokens, progress=False, **drafting,
            )  # fmt: skip
            seconds[max(number - 1, 0), job] = time.perf_counter() - began
    return [ratio_of_medians(seconds[:, 0], column) for column in seconds[:, 1:].T]
