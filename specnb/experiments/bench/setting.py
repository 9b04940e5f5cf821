"""One pair at one setting: what the theory predicts, what the loop does, the floor under both, and the memory.

The prediction is Theorem 3.8 with alpha as it is along texts of the target, and with c and v(n) of a batch of that
size. It is held against timed steps, and beside these stand whole untimed calls, prompts and all: what a user gets.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from specnb.decoding import loop
from specnb.experiments.bench.tables import columns, counted, settings
from specnb.experiments.side_by_side import specnb_generate, time_side_by_side
from specnb.measure.acceptance import measure_acceptance
from specnb.measure.cost import measure_costs
from specnb.measure.memory_bandwidth import min_seconds
from specnb.measure.recommend import predict
from specnb.measure.speed import Speeds, measure_speeds
from specnb.measure.statistics import ratio_of_medians, ratio_of_sums
from specnb.models.loading import Pair
from specnb.models.memory import GB, measured_peak, predicted
from specnb.models.shapes import size_of
from specnb.sampling.distributions import Sampling

Array = NDArray[np.float64]
Row = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """A pair, the prompts it continues, and the overlaps `beta` `(texts, tokens)` along what its target writes."""

    name: str
    pair: Pair
    prompts: list[list[int]]
    sampling: Sampling
    beta: Array


def subject(name: str, pair: Pair, prompts: list[list[int]], sampling: Sampling, new_tokens: int) -> Subject:
    """`pair` with its alpha measured on all of `prompts`, of which there must be 8."""
    found = measure_acceptance(pair.target, {"draft": pair.draft}, prompts, new_tokens=new_tokens, sampling=sampling)
    return Subject(name, pair, prompts, sampling, found.beta["draft"])


@dataclass(frozen=True)
class Setting:
    """How a subject decodes: drafts per step, rows at a time, `compile` of `generate`, tokens, repetitions."""

    gamma: int = 4
    rows: int = 1
    compile: bool | str = False
    new_tokens: int = 128
    repetitions: int = 7


def measure_cell(who: Subject, how: Setting, bandwidth: float) -> Row:
    """One row of a table: everything about `who` decoding as `how` says; the columns are explained below.

    alpha, c, v               measured on their own: v is that of gamma + 1 tokens, c and v those of so many rows
    predicted, counted        by Theorem 3.8; with the tokens per step that there were in place of alpha's
    measured                  walltime improvement of timed steps over gamma = 0
    refilled, over_predicted  the same, where a row that has ended would not wait for the last of its batch; and
                              that over what was predicted
    calls                     the same of whole untimed calls, prompts run by both models included
    tokens_per_s, plain_*     of those calls, with and without speculation
    step_ms, plain_ms         of one step with and without speculation
    floor_*, gb_per_s         what the memory traffic of such a step alone would take at `bandwidth`; that bandwidth
    busy                      share of the rows that a mean speculative step was still generating
    weights_gb, peak_gb, predicted_gb   of memory: both models, the rest of a call at its peak, and that as predicted
    """
    pair, gamma, rows = who.pair, how.gamma, how.rows
    prompts = who.prompts[: how.repetitions]
    context = len(prompts[0]) + how.new_tokens // 2
    slots = loop.slots_for(len(prompts[0]), how.new_tokens, gamma, how.compile)
    speculative, plain = (
        specnb_generate(pair, drafts, how.new_tokens, how.compile, rows, who.sampling) for drafts in (gamma, 0)
    )
    taken = memory(who, how)
    costs = measure_costs(
        pair, context=context, slots=slots, lengths=(1, gamma + 1), rows=rows, repetitions=3 * how.repetitions,
        compile=how.compile,
    )  # fmt: skip
    speeds = measure_speeds(
        pair, prompts, (0, gamma), max_new_tokens=how.new_tokens, sampling=who.sampling, rows=rows, compile=how.compile
    )
    empty()
    calls = time_side_by_side({"speculative": speculative, "plain": plain}, prompts)
    alpha = ratio_of_sums(who.beta.sum(axis=1), np.full(len(who.beta), who.beta.shape[1]))
    row = (
        label(who.name, pair, who.sampling, how) | {"context": context}
        | columns("alpha", alpha) | columns("c", costs.cost_ratio) | columns("v", costs.verify_costs[1])
        | columns("predicted", predict(who.beta, costs, gamma))
        | columns("measured", speeds.improvement(gamma)) | columns("refilled", speeds.improvement(gamma, refilled=True))
        | columns("calls", ratio_of_medians(calls.plain, calls.speculative))
        | {"tokens_per_step": speeds.tokens(gamma), "busy": float(speeds.busy[:, 1].mean())}
        | {"tokens_per_s": rows * how.new_tokens / calls.speculative.median()}
        | {"plain_tokens_per_s": rows * how.new_tokens / calls.plain.median()}
        | step_times(speeds, rows) | memory_bounds(pair, gamma, rows, context, bandwidth) | taken
    )  # fmt: skip
    return row | {"counted": counted(row), "over_predicted": row["refilled"] / row["predicted"]}


def label(name: str, pair: Pair, sampling: Sampling, how: Setting) -> Row:
    """The columns that say what was measured, and under what."""
    return (
        {"pair": name, "target_weights": size_of(pair.target).held, "draft_weights": size_of(pair.draft).held}
        | {"gamma": how.gamma, "temperature": sampling.temperature, "rows": how.rows}
        | {"new_tokens": how.new_tokens, "repetitions": how.repetitions} | settings(pair, how.compile)
    )  # fmt: skip


def step_times(speeds: Speeds, rows: int) -> Row:
    """Milliseconds of a mean step of a batch of `rows`, without and with the one other gamma of `speeds`."""
    emitted = rows * speeds.busy * speeds.tokens_per_step  # in a step, by all rows
    plain, step = 1e3 * (speeds.seconds.sum(axis=-1) * emitted).T
    once = np.ones_like(plain)
    return columns("step_ms", ratio_of_medians(step, once)) | columns("plain_ms", ratio_of_medians(plain, once))


def memory_bounds(pair: Pair, gamma: int, rows: int, context: int, bandwidth: float) -> Row:
    """Milliseconds that the memory traffic of a step with `gamma` drafts, and of a plain one, takes at the least."""
    draft, verify, plain = (
        1e3 * min_seconds(model, bandwidth, rows, tokens, context)
        for model, tokens in ((pair.draft, 1), (pair.target, gamma + 1), (pair.target, 1))
    )
    return {"floor_step_ms": gamma * draft + verify, "floor_plain_ms": plain, "gb_per_s": bandwidth / 1e9}


def memory(who: Subject, how: Setting) -> Row:
    """Gigabytes of a speculative call: both models' weights, the rest at its peak, and that as predicted."""
    prompt, device = who.prompts[0], who.pair.target.device
    call = specnb_generate(who.pair, how.gamma, how.new_tokens, how.compile, how.rows, who.sampling)
    empty()
    peak = measured_peak(lambda: call(prompt), device)
    empty()
    need = predicted(
        who.pair.target, who.pair.draft, rows=how.rows, prompt=len(prompt), new_tokens=how.new_tokens, gamma=how.gamma,
        sampling=who.sampling,
    )  # fmt: skip
    return {"weights_gb": need.weights / GB, "peak_gb": peak / GB, "predicted_gb": need.generation / GB}


def empty() -> None:
    """Lets go of what compiled steps hold, and gives the memory back to the device: the next phase begins alone."""
    loop.forget_compiled()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
