"""Milliseconds of target forward passes over 1 to 17 tokens and of a draft forward pass, at several
contexts.

Notebook 12 reads it. `ms_low` and `ms_high` are quartiles. Cache slots are those half-way through a
generation of 128 tokens; compiled passes are timed over the lengths that `bench_walltime` compiles,
at its context only.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from specnb.cost import Costs, measure_costs, mid_generation
from studies.speed.bench_walltime import COMPILED_GAMMAS
from studies.speed.pairs import PAIRS, PROMPT_TOKENS, packed
from studies.study import Study, conditions

LARGEST = 17
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "packed": {},
    "packed-bfloat16": {"dtype": torch.bfloat16},
    "compiled": {},
    "compiled-bfloat16": {"dtype": torch.bfloat16},
}


def measure(item: str, repetitions: int, new_tokens: int, contexts: tuple[int, ...]) -> pd.DataFrame:
    """The curves of one pair in one layout. `contexts` are tokens half-way through the
    generation."""
    name, layout = item.split("-", 1)
    pair, compiled = PAIRS[name](**LAYOUTS[layout]), layout.startswith("compiled")
    pair = packed(pair) if layout.startswith("packed") else pair
    lengths = [gamma + 1 for gamma in COMPILED_GAMMAS] if compiled else list(range(1, LARGEST + 1))
    found: list[dict[str, Any]] = []
    for middle in [PROMPT_TOKENS + new_tokens // 2] if compiled else contexts:
        context, slots = mid_generation(middle - new_tokens // 2, new_tokens, max(lengths) - 1, compiled)
        costs = measure_costs(
            pair, context=context, slots=slots, lengths=lengths, repetitions=2 * repetitions, compile=compiled
        )
        labels = {"pair": name, "layout": layout.removesuffix("-bfloat16"), "context": context}
        found += curve(costs, labels | conditions(pair, compiled))
    return pd.DataFrame(found)


def curve(costs: Costs, labels: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each length of a target forward pass, and one for the draft model."""
    passes = [("target", n, times) for n, times in zip(costs.lengths, costs.target.T, strict=True)]
    lines = []
    for model, n, times in [*passes, ("draft", 1, costs.draft[:, 0])]:
        low, middle, high = 1e3 * np.quantile(times, [0.25, 0.5, 0.75])
        lines.append(labels | {"model": model, "n": n, "ms": middle, "ms_low": low, "ms_high": high})
    return lines


STUDY = Study(
    measure,
    settings={"repetitions": 11, "new_tokens": 128, "contexts": (32, 96, 384)},
    small={"repetitions": 2, "new_tokens": 8, "contexts": (16,)},
    items=[f"{name}-{layout}" for layout in LAYOUTS for name in PAIRS],
    small_items=("trained-plain",),
)
