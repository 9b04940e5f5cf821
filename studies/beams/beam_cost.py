"""Speculative beam search: accepted levels per step, and the time of a step (Appendix A.4).

The target's search does not depend on the draft model, so it runs once; the levels that a draft model would have had
accepted are computed afterwards. The target keeps w beams (`width`), the draft model u (`draft_width`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from specnb.beam import Beams, BeamSettings, LogProbs, beam_search, draft_levels
from specnb.measure.statistics import Estimate, ratio_of_medians
from specnb.measure.timing import Job, device_clock, time_rounds
from specnb.models.loading import Pair

Cost = Callable[[int], ArrayLike]
"""Time of a forward pass over n tokens, in forward passes of the same model over one token."""


def min_draft_width(state: Beams, following: Beams, draft: LogProbs, settings: BeamSettings) -> int:
    """The smallest u at which the first drafted level contains all beams of `following`, the target's next state.

    >>> from studies.beams.beam_enumeration import DyadicLogProbs, trajectory
    >>> settings = BeamSettings(2, 3)
    >>> states = trajectory(DyadicLogProbs(4, seed=0), settings)
    >>> min_draft_width(states[0], states[1], DyadicLogProbs(4, seed=0), settings)  # the target as its own draft
    2
    """
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
    states: Sequence[Beams], draft: LogProbs, widths: Sequence[int], gamma: int, settings: BeamSettings
) -> NDArray[np.int64]:
    """Accepted levels `(len(widths), levels)` of a step of `gamma` drafted levels from each state of the target.

    `widths` are draft widths u; `states` is the target's search from its start to its end.

    >>> from studies.beams.beam_enumeration import DyadicLogProbs, trajectory
    >>> settings = BeamSettings(2, 3)
    >>> states = trajectory(DyadicLogProbs(4, seed=0), settings)
    >>> accepted_levels(states, DyadicLogProbs(4, seed=0), [2], gamma=2, settings=settings)
    array([[2, 1, 0]])
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


def levels_by_step(accepted: NDArray[np.int64], gamma: int) -> NDArray[np.int64]:
    """Levels `(steps,)` that each step of a search with `gamma` emits, from one row of `accepted_levels`.

    >>> levels_by_step(np.array([2, 1, 0]), gamma=2)
    array([3])
    """
    levels: list[int] = []
    while sum(levels) < len(accepted):
        levels.append(min(int(accepted[sum(levels)]), gamma) + 1)
    return np.array(levels)


def constant_cost(n: int) -> float:
    """The cost of a forward pass that does not depend on its number of tokens, as section 3.3 assumes.

    >>> constant_cost(9)
    1.0
    """
    return 1.0


def step_time(
    width: int,
    draft_width: int,
    gamma: int,
    c: float,
    verify_cost: Cost = constant_cost,
    draft_cost: Cost = constant_cost,
) -> float:
    """Time of a step in target forward passes over one token: v(w + u gamma) + c (d(w) + (gamma - 1) d(u)).

    v is `verify_cost`, d `draft_cost`. With constant costs this is gamma c + 1, as in Theorem 3.8.

    >>> step_time(width=4, draft_width=8, gamma=5, c=0.1)
    1.5
    """
    drafting = np.asarray(draft_cost(width)) + (gamma - 1) * np.asarray(draft_cost(draft_width))
    return float(np.asarray(verify_cost(width + draft_width * gamma)) + c * drafting)


def improvement(
    levels: float,
    width: int,
    draft_width: int,
    gamma: int,
    c: float,
    verify_cost: Cost = constant_cost,
    draft_cost: Cost = constant_cost,
) -> float:
    """Wall-clock improvement over the target's search alone, which takes v(w) per level, with `levels` per step.

    >>> improvement(levels=3, width=4, draft_width=8, gamma=5, c=0.1)
    2.0
    """
    plain = levels * float(np.asarray(verify_cost(width)))
    return plain / step_time(width, draft_width, gamma, c, verify_cost, draft_cost)


def measure_beam_speeds(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    choices: Sequence[tuple[int, int]],
    *,
    width: int,
    max_new_tokens: int,
    seed: int = 0,
    progress: bool = True,
) -> list[Estimate]:
    """Wall-clock improvement over the target's search alone for each (draft_width, gamma) of `choices`.

    Each prompt is searched with every choice and without a draft model, in a random order. Intervals are over
    prompts, of which there must be 3, else `ValueError`.
    """

    def jobs(prompt: Sequence[int]) -> list[Job]:
        search = partial(beam_search, pair.target, prompt, width=width, max_new_tokens=max_new_tokens, progress=False)
        drafted = [partial(search, pair.draft, draft_width=u, gamma=gamma) for u, gamma in choices]
        return [Job(search), *map(Job, drafted)]

    clock, order = device_clock(pair.target.device), np.random.default_rng(seed)
    seconds = time_rounds(map(jobs, [prompts[0], *prompts]), clock, order, progress=progress)
    return [ratio_of_medians(seconds[:, 0], column) for column in seconds[:, 1:].T]
