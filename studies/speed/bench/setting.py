"""One pair at one setting: predicted and measured improvement, the memory bound of a step, and the memory used.

The prediction is Theorem 3.8 with alpha along sequences of the target, and c and v(n) of a batch of that size. It is
compared with timed steps. The time of whole calls, which include the forward pass over the prompt, is measured too.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specnb.decoding import generate as loop
from specnb.decoding.request import GB
from specnb.distributions import Sampling
from specnb.measure.acceptance import measure_acceptance
from specnb.measure.cost import measure_costs, mid_generation
from specnb.measure.recommend import predict
from specnb.measure.speed import Speeds, measure_speeds
from specnb.measure.statistics import ratio_of_medians, ratio_of_sums
from specnb.models.loading import Pair
from studies.batching.memory import measured_peak, predicted_peak
from studies.speed.bench.generators import specnb_generate, time_generators
from studies.speed.bench.tables import columns, counted, settings
from studies.speed.memory_bandwidth import min_seconds
from studies.speed.shapes import size_of

Array = NDArray[np.float64]
Row = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """A pair, its prompts, and the overlaps `beta` `(sequences, tokens)` along sequences of its target."""

    name: str
    pair: Pair
    prompts: list[list[int]]
    sampling: Sampling
    beta: Array


def workload(name: str, pair: Pair, prompts: list[list[int]], sampling: Sampling, new_tokens: int) -> Workload:
    """`pair` with its overlaps measured on all of `prompts`, of which there must be 8."""
    found = measure_acceptance(pair.target, {"draft": pair.draft}, prompts, new_tokens=new_tokens, sampling=sampling)
    return Workload(name, pair, prompts, sampling, found.beta["draft"])


@dataclass(frozen=True)
class Setting:
    """How a pair decodes: draft tokens per step, rows of a batch, `compile` of `generate`, new tokens, repetitions."""

    gamma: int = 4
    rows: int = 1
    compile: bool | str = False
    new_tokens: int = 128
    repetitions: int = 7


def measure_setting(load: Workload, setting: Setting, bandwidth: float) -> Row:
    """One row of a table, with these columns:

    alpha, c, v               c and v are those of a batch of so many rows, v that of gamma + 1 tokens
    predicted, counted        by Theorem 3.8; with the counted tokens per step instead of alpha
    measured                  wall-clock improvement of timed steps over gamma = 0
    refilled, over_predicted  the same with continuous batching; and that over `predicted`
    calls                     the improvement of whole calls, the forward pass over the prompt included
    tokens_per_s, plain_*     of those calls, with and without speculation
    step_ms, plain_ms         of one step with and without speculation
    bound_*, gb_per_s         memory bound of such a step at `bandwidth`; that bandwidth
    active                    fraction of the rows that had not ended, mean over speculative steps
    weights_gb, peak_gb, predicted_gb   memory of both models, of the rest of a call at its peak, and that as predicted
    """
    pair, gamma, rows = load.pair, setting.gamma, setting.rows
    prompts = load.prompts[: setting.repetitions]
    context, slots = mid_generation(len(prompts[0]), setting.new_tokens, gamma, setting.compile)
    speculative, plain = (
        specnb_generate(pair, drafted, setting.new_tokens, setting.compile, rows, load.sampling)
        for drafted in (gamma, 0)
    )
    taken = memory(load, setting)
    costs = measure_costs(
        pair, context=context, slots=slots, lengths=(1, gamma + 1), rows=rows, repetitions=3 * setting.repetitions,
        compile=setting.compile,
    )  # fmt: skip
    speeds = measure_speeds(
        pair,
        prompts,
        (0, gamma),
        max_new_tokens=setting.new_tokens,
        sampling=load.sampling,
        rows=rows,
        compile=setting.compile,
    )
    free_memory()
    calls = time_generators({"speculative": speculative, "plain": plain}, prompts, pair.target.device)
    alpha = ratio_of_sums(load.beta.sum(axis=1), np.full(len(load.beta), load.beta.shape[1]))
    row = (
        label(load.name, pair, load.sampling, setting) | {"context": context}
        | columns("alpha", alpha) | columns("c", costs.cost_ratio) | columns("v", costs.verify_costs[1])
        | columns("predicted", predict(load.beta, costs, gamma))
        | columns("measured", speeds.improvement(gamma)) | columns("refilled", speeds.improvement(gamma, refilled=True))
        | columns("calls", ratio_of_medians(calls.plain, calls.speculative))
        | {"tokens_per_step": speeds.tokens(gamma), "active": float(speeds.active[:, 1].mean())}
        | {"tokens_per_s": rows * setting.new_tokens / calls.speculative.median()}
        | {"plain_tokens_per_s": rows * setting.new_tokens / calls.plain.median()}
        | step_times(speeds, rows) | memory_bounds(pair, gamma, rows, context, bandwidth) | taken
    )  # fmt: skip
    return row | {"counted": counted(row), "over_predicted": row["refilled"] / row["predicted"]}


def label(name: str, pair: Pair, sampling: Sampling, setting: Setting) -> Row:
    """The columns with what was measured, and the conditions."""
    return (
        {"pair": name, "target_weights": size_of(pair.target).held, "draft_weights": size_of(pair.draft).held}
        | {"gamma": setting.gamma, "temperature": sampling.temperature, "rows": setting.rows}
        | {"new_tokens": setting.new_tokens, "repetitions": setting.repetitions} | settings(pair, setting.compile)
    )  # fmt: skip


def step_times(speeds: Speeds, rows: int) -> Row:
    """Milliseconds of a mean step of a batch of `rows`, without and with the one other gamma of `speeds`."""
    emitted = rows * speeds.active * speeds.tokens_per_step  # in a step, by all rows
    plain, step = 1e3 * (speeds.seconds.sum(axis=-1) * emitted).T
    once = np.ones_like(plain)
    return columns("step_ms", ratio_of_medians(step, once)) | columns("plain_ms", ratio_of_medians(plain, once))


def memory_bounds(pair: Pair, gamma: int, rows: int, context: int, bandwidth: float) -> Row:
    """Memory bounds in milliseconds of a step with `gamma` draft tokens, and of a step of plain decoding."""
    draft, verify, plain = (
        1e3 * min_seconds(model, bandwidth, rows, tokens, context)
        for model, tokens in ((pair.draft, 1), (pair.target, gamma + 1), (pair.target, 1))
    )
    return {"bound_step_ms": gamma * draft + verify, "bound_plain_ms": plain, "gb_per_s": bandwidth / 1e9}


def memory(load: Workload, setting: Setting) -> Row:
    """Gigabytes of a speculative call: both models' weights, the rest at its peak, and the rest as predicted."""
    prompt, device = load.prompts[0], load.pair.target.device
    call = specnb_generate(load.pair, setting.gamma, setting.new_tokens, setting.compile, setting.rows, load.sampling)
    free_memory()
    peak = measured_peak(lambda: call(prompt), device)
    free_memory()
    need = predicted_peak(
        load.pair.target, load.pair.draft, rows=setting.rows, prompt=len(prompt), new_tokens=setting.new_tokens,
        gamma=setting.gamma,
    )  # fmt: skip
    weights = sum(one.nbytes for model in (load.pair.target, load.pair.draft) for one in model.parameters())
    return {"weights_gb": weights / GB, "peak_gb": peak / GB, "predicted_gb": need / GB}


def free_memory() -> None:
    """Releases compiled steps and unused device memory before the next measurement."""
    loop.forget_compiled()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
