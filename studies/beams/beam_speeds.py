"""The wall-clock time of speculative beam search, on the trained pair.

Whole searches with several (draft width u, gamma) are timed in turn with the target's own search of
the same width, on held-out prompts, in float32. The table `data/results/beam_speeds.csv` has a line
for each choice:

- `levels_per_step` with its interval over prompts, counted on the same searches
- `cost_ratio`, `verify_cost`: c, and v of the largest forward pass of a step, measured just before
- `tokens_free`, `predicted`: the speed-up that levels per step and c predict if the number of
  tokens in a forward pass costs nothing, and with the measured v and d
- `measured`: the speed-up that was timed, with its interval over prompts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specnb.beam import beam_search
from specnb.cost import measure_costs
from specnb.loading import load_pair
from specnb.statistics import machine, ratio_of_sums
from studies.beams.beam_cost import improvement
from studies.speed.pairs import prompts_of
from studies.study import Study, columns, faster, timed_in_turn

WIDTH = 4
CHOICES = ((4, 2), (4, 4), (8, 2), (8, 4), (16, 4))
SIZES = (1, 4, 8, 16, 24, 36, 68)  # tokens in the forward passes that are timed for v and d


def measure(item: str, prompts: int, prompt_tokens: int, new_tokens: int, repetitions: int) -> Iterator[dict[str, Any]]:
    """One line per choice of draft width and gamma."""
    pair = load_pair()
    starts = prompts_of(pair, "held-out", prompts, prompt_tokens)
    costs, of_draft = (
        measure_costs(each, lengths=SIZES, repetitions=repetitions) for each in (pair, replace(pair, target=pair.draft))
    )
    search = partial(beam_search, pair.target, width=WIDTH, max_new_tokens=new_tokens, progress=False)
    # Levels by step of each search.
    made: dict[tuple[int, int], list[Any]] = {choice: [] for choice in CHOICES}

    def call(choice: tuple[int, int] | None, start: list[int], _: int) -> None:
        if choice is None:
            search(start)
        else:
            made[choice].append(search(start, pair.draft, draft_width=choice[0], gamma=choice[1]).record.levels)

    seconds = timed_in_turn(call, [None, *CHOICES], starts)
    c = costs.cost_ratio.value
    for (u, gamma), own in zip(CHOICES, seconds[:, 1:].T, strict=True):
        # The first search warmed up.
        speed, counted = faster(seconds[:, 0], own), made[u, gamma][1:]
        levels = ratio_of_sums([sum(of) for of in counted], [len(of) for of in counted])
        predicted = improvement(levels.value, WIDTH, u, gamma, c, costs.verify_cost, of_draft.verify_cost)
        yield (
            {"w": WIDTH, "u": u, "gamma": gamma, "prompts": len(starts)}
            | {"levels_per_step": levels.value, "levels_low": levels.low, "levels_high": levels.high}
            | {"cost_ratio": c, "verify_cost": float(costs.verify_cost(WIDTH + u * gamma))}
            | {"tokens_free": improvement(levels.value, WIDTH, u, gamma, c), "predicted": predicted}
            | columns("measured", speed)
            | {"dtype": "float32", "machine": machine(), "threads": torch.get_num_threads()}
        )


STUDY = Study(
    measure,
    settings={"prompts": 12, "prompt_tokens": 32, "new_tokens": 24, "repetitions": 30},
    small={"prompts": 8, "prompt_tokens": 8, "new_tokens": 4, "repetitions": 3},
)
