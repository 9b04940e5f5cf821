"""Predicted and measured improvement of speculative over plain decoding, for each gamma, of both
pairs.

Notebook 12 reads it. Times of forward passes and of generations alternate, so that both are
measured under equal conditions. `draft`, `target` and `rest` are fractions of a step; `own` is the
fraction beyond the draft and target forward passes as they were timed alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from specnb.acceptance import measure_acceptance
from specnb.cost import CostMeter, Costs, mid_generation
from specnb.distributions import Sampling
from specnb.record import PARTS
from specnb.speedup import predicted_speedup
from specnb.theory import step_cost
from studies.speed.pairs import PAIRS, PROMPT_TOKENS, PROMPTS, packed, prompts_of
from studies.speed.speeds import Speeds, measure_speeds
from studies.study import Study, columns, conditions

SEQUENCES = 32  # of the target alone, for alpha
GAMMAS, COMPILED_GAMMAS = tuple(range(9)), (0, 2, 3, 4, 5)
WAYS: dict[str, dict[str, Any]] = {"float32": {}, "bfloat16": {"dtype": torch.bfloat16}, "compiled": {}, "greedy": {}}


def measure(item: str, repetitions: int, new_tokens: int) -> pd.DataFrame:
    """A line for each gamma of one pair, decoded in one of `WAYS`."""
    name, way = item.split("-")
    temperature, compiled = float(way != "greedy"), way == "compiled"
    gammas, sampling = COMPILED_GAMMAS if compiled else GAMMAS, Sampling(temperature)
    # Its alpha holds at one temperature.
    made_for = {"temperature": temperature} if name == "synthetic" else {}
    pair = packed(PAIRS[name](**WAYS[way], **made_for))
    prompts = prompts_of(pair, PROMPTS[name][0], SEQUENCES)
    found = measure_acceptance(pair.target, {"draft": pair.draft}, prompts, new_tokens=new_tokens, sampling=sampling)
    beta = found.beta["draft"]
    context, slots = mid_generation(PROMPT_TOKENS, new_tokens, max(gammas), compiled)
    meter = CostMeter(pair, context, [gamma + 1 for gamma in gammas], slots=slots, compile=compiled)
    speeds = measure_speeds(
        pair, prompts[:repetitions], gammas, max_new_tokens=new_tokens, sampling=sampling, compile=compiled,
        between=meter.round,
    )  # fmt: skip
    costs = meter.costs()
    alpha = columns("alpha", found.alpha("draft"))
    return pd.DataFrame(
        {"pair": name} | conditions(pair, compiled) | {"gamma": gamma, "temperature": temperature}
        | alpha | columns("c", costs.cost_ratio)
        | {"v": float(costs.verify_cost(gamma + 1)), "target_ms": 1e3 * float(np.median(costs.target[:, 0]))}
        | columns("predicted", predicted_speedup(beta, costs, gamma)) | columns("measured", speeds.improvement(gamma))
        | {"tokens_per_step": speeds.tokens(gamma)}
        | {part: speeds.time_fraction(gamma, part) for part in PARTS} | {"own": overhead_fraction(costs, speeds, gamma)}
        for gamma in gammas if gamma
    )  # fmt: skip


def overhead_fraction(costs: Costs, speeds: Speeds, gamma: int) -> float:
    """The fraction of a step beyond the draft and target forward passes, both as timed alone."""
    at = speeds.gammas.index(gamma)
    step = np.median(speeds.seconds[:, at].sum(axis=-1) * speeds.tokens_per_step[:, at])
    passes = gamma * np.median(costs.draft) + np.median(costs.target[:, costs.lengths.index(gamma + 1)])
    return float(1 - passes / step)


def counted(lines: Any) -> Any:
    """The prediction from the counted tokens per step instead of alpha, for a row or a table with
    the columns tokens_per_step, gamma, c and v."""
    return lines["tokens_per_step"] / step_cost(lines["gamma"], lines["c"], lambda _: lines["v"])


STUDY = Study(
    measure,
    settings={"repetitions": 11, "new_tokens": 64},
    small={"repetitions": 3, "new_tokens": 8},
    items=[f"{name}-{way}" for way in WAYS for name in PAIRS],
    small_items=("trained-float32",),
)
