"""Our loop beside the generation of transformers, on this machine, and the goals of `make bench` that rest on it."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from specnb.experiments.bench.tables import NEW_TOKENS, Rows, goal_row, keep, keep_goals, settings
from specnb.experiments.side_by_side import (
    GenerateFunction,
    prompts_for,
    specnb_generate,
    time_side_by_side,
    transformers_generate,
)
from specnb.measure.statistics import ratio_of_medians
from specnb.models.loading import Pair, load_pair
from specnb.models.synthetic import synthetic_pair

ASSISTED_GAMMA = 3  # where transformers' assisted generation is at its fastest with the synthetic pair


def measure_against_transformers(repetitions: int) -> None:
    """Our loop and transformers' on the same prompts, and the goals that rest on that."""
    timed, reached = against_transformers(repetitions)
    keep("bench_against_transformers", timed)
    keep_goals(reached)


def against_transformers(repetitions: int) -> tuple[pd.DataFrame, Rows]:
    """Seconds of our loop and of transformers' on the same prompts; and the goals that rest on them."""
    dialled, plain = synthetic_pair(), synthetic_pair(packed=False)
    trained, plain_trained, half = load_pair(), load_pair(packed=False), load_pair(dtype=torch.bfloat16)
    races: dict[str, dict[str, GenerateFunction]] = {
        "synthetic": {
            "transformers": transformers_generate(plain.target, None, None, NEW_TOKENS),
            "transformers, packed": transformers_generate(dialled.target, None, None, NEW_TOKENS),
            "transformers assisted, defaults": transformers_generate(plain.target, plain.draft, None, NEW_TOKENS),
            "transformers assisted": transformers_generate(plain.target, plain.draft, ASSISTED_GAMMA, NEW_TOKENS),
            "transformers assisted, packed": transformers_generate(
                dialled.target, dialled.draft, ASSISTED_GAMMA, NEW_TOKENS
            ),
            "target only, plain weights": specnb_generate(plain, 0, NEW_TOKENS),
            "target only": specnb_generate(dialled, 0, NEW_TOKENS),
            "target only, compiled": specnb_generate(dialled, 0, NEW_TOKENS, compile=True),
            "speculative, plain weights": specnb_generate(plain, ASSISTED_GAMMA, NEW_TOKENS),
            "speculative": specnb_generate(dialled, ASSISTED_GAMMA, NEW_TOKENS),
            "speculative, compiled": specnb_generate(dialled, ASSISTED_GAMMA, NEW_TOKENS, compile=True),
        },
        "trained": {
            "transformers": transformers_generate(plain_trained.target, None, None, NEW_TOKENS),
            "transformers, packed": transformers_generate(trained.target, None, None, NEW_TOKENS),
            "transformers assisted": transformers_generate(
                plain_trained.target, plain_trained.draft, ASSISTED_GAMMA, NEW_TOKENS
            ),
            "target only": specnb_generate(trained, 0, NEW_TOKENS),
            "target only, compiled": specnb_generate(trained, 0, NEW_TOKENS, compile=True),
            "speculative": specnb_generate(trained, ASSISTED_GAMMA, NEW_TOKENS),
            "speculative, compiled": specnb_generate(trained, ASSISTED_GAMMA, NEW_TOKENS, compile=True),
            "target only, bfloat16": specnb_generate(half, 0, NEW_TOKENS),
            "speculative, bfloat16": specnb_generate(half, ASSISTED_GAMMA, NEW_TOKENS),
        },
    }
    pairs = {"synthetic": dialled, "trained": trained}
    timed = {
        name: time_side_by_side(samplers, prompts_for(pairs[name], name, repetitions))
        for name, samplers in races.items()
    }

    def goal(name: str, pair: str, slow: str, fast: str, least: float, packed: Pair) -> dict[str, Any]:
        ratio = ratio_of_medians(timed[pair][slow], timed[pair][fast])
        return goal_row(name, ratio, least, settings(packed, "compiled" in fast))

    goals = [
        goal("synthetic: over transformers assisted", "synthetic", "transformers assisted", "speculative, compiled", 2.5,
             dialled),
        goal("synthetic: over transformers assisted", "synthetic", "transformers assisted", "speculative", 1.1, dialled),
        goal("synthetic: over transformers assisted, its weights packed too", "synthetic", "transformers assisted, packed",
             "speculative", 1.1, dialled),
        goal("synthetic: target only over transformers generate", "synthetic", "transformers", "target only", 1.0, dialled),
        goal("synthetic: target only over transformers generate, its weights packed too", "synthetic",
             "transformers, packed", "target only", 1.0, dialled),
        goal("trained: over target only", "trained", "target only, compiled", "speculative, compiled", 2.0, trained),
        goal("trained: over target only", "trained", "target only", "speculative", 2.0, trained),
        goal("trained, bfloat16: over target only", "trained", "target only, bfloat16", "speculative, bfloat16", 2.0,
             half),
        goal("trained: target only over transformers generate", "trained", "transformers", "target only", 1.0, trained),
        goal("trained: target only over transformers generate, its weights packed too", "trained",
             "transformers, packed", "target only", 1.0, trained),
    ]  # fmt: skip
    long = [
        {"pair": name, "sampler": sampler} | settings(half if "bfloat16" in sampler else dialled, "compiled" in sampler)
        | {"ms_per_token": 1e3 * float(times.median()) / NEW_TOKENS, "runs": len(times)}
        for name, seconds in timed.items() for sampler, times in seconds.items()
    ]  # fmt: skip
    return pd.DataFrame(long), goals
