"""Predicted and measured improvement of speculative over plain decoding, for each gamma, of both
pairs.

Notebook 12 reads it. A sampler with `compile="auto"` decodes, in items "compiled" one with
`compile=True`. Times of forward passes and of generations alternate, so that both are
measured under equal conditions.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from specnb.acceptance import measure_acceptance
from specnb.cost import CostMeter, mid_generation
from specnb.distributions import Sampling
from specnb.fast import Compile
from specnb.speedup import predicted_speedup
from studies.speed.pairs import PAIRS, PROMPT_TOKENS, PROMPTS, prompts_of
from studies.speed.speeds import measure_speeds
from studies.study import Study, columns, conditions

SEQUENCES = 32  # of the target alone, for alpha
GAMMAS, COMPILED_GAMMAS = tuple(range(9)), (0, 2, 3, 4, 5)
WAYS = ("float32", "bfloat16", "compiled", "greedy")


def measure(item: str, repetitions: int, new_tokens: int) -> pd.DataFrame:
    """A line for each gamma of one pair, decoded in one of `WAYS`."""
    name, way = item.split("-")
    temperature, compiled = float(way != "greedy"), way == "compiled"
    gammas, sampling = COMPILED_GAMMAS if compiled else GAMMAS, Sampling(temperature)
    # Its alpha holds at one temperature.
    made_for = {"temperature": temperature} if name == "synthetic" else {}
    pair = PAIRS[name](dtype=torch.bfloat16 if way == "bfloat16" else torch.float32, **made_for)
    compile: Compile = True if compiled else "auto"
    prompts = prompts_of(pair, PROMPTS[name][0], SEQUENCES)
    found = measure_acceptance(pair, prompts, new_tokens=new_tokens, sampling=sampling)
    beta = found.beta["draft"]
    context, slots = mid_generation(PROMPT_TOKENS, new_tokens, max(gammas))
    meter = CostMeter(pair, context, [gamma + 1 for gamma in gammas], slots=slots, compile=compile)
    speeds = measure_speeds(
        pair, prompts[:repetitions], gammas, max_new_tokens=new_tokens, sampling=sampling, compile=compile,
        between=meter.round,
    )  # fmt: skip
    costs = meter.costs()
    alpha = columns("alpha", found.alpha())
    return pd.DataFrame(
        {"pair": name} | conditions(pair, compiled) | {"gamma": gamma, "temperature": temperature}
        | alpha | columns("c", costs.cost_ratio)
        | {"v": float(costs.verify_cost(gamma + 1)), "target_ms": 1e3 * float(np.median(costs.target[:, 0]))}
        | columns("predicted", predicted_speedup(beta, costs, gamma)) | columns("measured", speeds.improvement(gamma))
        | {"tokens_per_step": speeds.tokens_per_step(gamma)}
        for gamma in gammas if gamma
    )  # fmt: skip


STUDY = Study(
    measure,
    settings={"repetitions": 11, "new_tokens": 64},
    small={"repetitions": 3, "new_tokens": 8},
    items=[f"{name}-{way}" for way in WAYS for name in PAIRS],
    small_items=("trained-float32",),
)
