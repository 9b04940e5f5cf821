"""Improvement at gamma = 4 over alpha, size of the draft model, temperature and batch size, for
notebook 12.

Batches are decoded with continuous batching and `compile="auto"`. `x` is alpha, the parameters of the draft model over
those of the target, the temperature, or the rows of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from specnb.cost import measure_costs, mid_generation
from specnb.distributions import Sampling
from specnb.loading import Pair, load_pair
from studies.speed.pairs import PROMPT_TOKENS, prompts_of
from studies.speed.speeds import measure_speeds
from studies.speed.synthetic import DRAFT, TARGET, Shape, synthetic_pair
from studies.study import Study, columns, conditions

GAMMA = 4
ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.76, 0.9)
DRAFTS = (DRAFT, Shape(4, 384, 1536, 6), Shape(6, 512, 2048, 8), Shape(9, 640, 2560, 10), TARGET)
BATCHES = (1, 4, 16, 64, 128, 256)
TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 4.0)
Case = tuple[float, Pair, int, Sampling]


def cases(regime: str) -> Iterator[Case]:
    """x, the pair, the rows of a batch and the sampling of each point of one regime."""
    one = Sampling()
    if regime == "alpha":
        yield from ((alpha, synthetic_pair(alpha), 1, one) for alpha in ALPHAS)
    elif regime == "draft":
        for draft in DRAFTS:
            pair = synthetic_pair(draft=draft)
            yield pair.draft.num_parameters() / pair.target.num_parameters(), pair, 1, one
    elif regime == "temperature":
        pair = load_pair()
        yield from ((temperature, pair, 1, Sampling(temperature)) for temperature in TEMPERATURES)
    else:
        for dtype in (torch.float32, torch.bfloat16):
            pair = load_pair(dtype=dtype)
            yield from ((batch, pair, batch, one) for batch in BATCHES)


def measure(regime: str, repetitions: int, new_tokens: int) -> Iterator[dict[str, Any]]:
    """The lines of one regime."""
    name = "synthetic" if regime in ("alpha", "draft") else "trained"
    context, slots = mid_generation(PROMPT_TOKENS, new_tokens, GAMMA)
    for x, pair, batch, sampling in cases(regime):
        prompts = prompts_of(pair, "random" if name == "synthetic" else "held-out", repetitions)
        speeds = measure_speeds(
            pair, prompts, (0, GAMMA), max_new_tokens=new_tokens, rows=batch, sampling=sampling, compile="auto"
        )
        costs = measure_costs(
            pair, context=context, slots=slots, lengths=(1, GAMMA + 1), rows=batch, repetitions=9, compile="auto",
            progress=False,
        )  # fmt: skip
        yield (
            {"regime": regime, "x": x, "pair": name, "gamma": GAMMA} | conditions(pair)
            | columns("c", costs.cost_ratio) | columns("v", costs.verify_costs[1])
            | columns("measured", speeds.improvement(GAMMA, refilled=True))
            | {"tokens_per_step": speeds.tokens_per_step(GAMMA)}
        )  # fmt: skip


STUDY = Study(
    measure,
    settings={"repetitions": 11, "new_tokens": 48},
    small={"repetitions": 3, "new_tokens": 4},
    items=("alpha", "draft", "temperature", "batch"),
    small_items=("temperature",),
)
