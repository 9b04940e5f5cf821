"""The stages of the bench on a CPU: walltime, temperature 0, a trace, regimes, cost curves.

Rows of this machine replace its older ones in `data/results/bench*.csv`; those of other machines stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specnb.decoding.generate import Study, generate
from specnb.decoding.record import PARTS
from specnb.distributions import Sampling
from specnb.measure.acceptance import measure_acceptance
from specnb.measure.cost import CostMeter, Costs, measure_costs, mid_generation
from specnb.measure.recommend import predict
from specnb.measure.speed import Speeds, measure_speeds
from specnb.measure.statistics import Estimate, ratio_of_sums
from specnb.models.loading import Pair, load_pair
from specnb.models.shapes import Shape
from studies.speed.bench.against_transformers import measure_against_transformers
from studies.speed.bench.generators import PAIRS, PROMPT_TOKENS, pair_named, pairs_named, prompts_for
from studies.speed.bench.tables import (
    NEW_TOKENS,
    Rows,
    columns,
    counted,
    curve,
    goal_row,
    keep,
    keep_curves,
    keep_goals,
    settings,
)
from studies.speed.shapes import DRAFT, TARGET
from studies.speed.synthetic import synthetic_pair

FEW_TOKENS = 48  # of a timed sequence where many pairs are compared
GAMMAS = tuple(range(9))
COMPILED_GAMMAS = (0, 2, 3, 4, 5)
CONTEXTS = (32, PROMPT_TOKENS + NEW_TOKENS // 2, 384)  # the middle one is that of the timed sequences
SEQUENCES = 32  # of the target alone, for alpha
ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.76, 0.9)
DRAFTS = (DRAFT, Shape(4, 384, 1536, 6), Shape(6, 512, 2048, 8), Shape(9, 640, 2560, 10), TARGET)
BATCHES = (1, 4, 16, 64, 128, 256)
TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
GAMMA = 4


def walltime(
    name: str, pair: Pair, repetitions: int, compile: bool = False, sampling: Sampling = Sampling()
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predicted and measured wall-clock improvement and the parts of a step for each gamma; and the cost curve."""
    gammas = COMPILED_GAMMAS if compile else GAMMAS
    prompts = prompts_for(pair, name, SEQUENCES)
    found = measure_acceptance(pair.target, {"draft": pair.draft}, prompts, new_tokens=NEW_TOKENS, sampling=sampling)
    beta = found.beta["draft"]
    alpha = ratio_of_sums(beta.sum(axis=1), np.full(len(beta), beta.shape[1]))
    # Costs and generations alternate, so that both are measured under equal conditions.
    context, slots = mid_generation(PROMPT_TOKENS, NEW_TOKENS, max(gammas), compile)
    meter = CostMeter(pair, context, [gamma + 1 for gamma in gammas], slots=slots, compile=compile)
    speeds = measure_speeds(
        pair, prompts[:repetitions], gammas, max_new_tokens=NEW_TOKENS, sampling=sampling, compile=compile,
        between=meter.round,
    )  # fmt: skip
    costs = meter.costs()
    rows = [
        {"pair": name} | settings(pair, compile) | {"gamma": gamma, "temperature": sampling.temperature}
        | columns("alpha", alpha) | columns("c", costs.cost_ratio)
        | {"v": float(costs.verify_cost(gamma + 1)), "target_ms": 1e3 * float(np.median(costs.target[:, 0]))}
        | columns("predicted", predict(beta, costs, gamma)) | columns("measured", speeds.improvement(gamma))
        | {"tokens_per_step": speeds.tokens(gamma)}
        | {part: speeds.time_fraction(gamma, part) for part in PARTS} | {"own": overhead_fraction(costs, speeds, gamma)}
        for gamma in gammas if gamma
    ]  # fmt: skip
    layout = "compiled" if compile else "packed"
    labels = {"pair": name, "layout": layout, "context": context} | settings(pair, compile)
    return pd.DataFrame(rows), pd.DataFrame(curve(costs, labels))


def overhead_fraction(costs: Costs, speeds: Speeds, gamma: int) -> float:
    """The fraction of a step beyond the draft and target forward passes, both as timed alone."""
    at = speeds.gammas.index(gamma)
    step = np.median(speeds.seconds[:, at].sum(axis=-1) * speeds.tokens_per_step[:, at])
    passes = gamma * np.median(costs.draft) + np.median(costs.target[:, costs.lengths.index(gamma + 1)])
    return float(1 - passes / step)


def cost_curves(name: str, layout: str, pair: Pair, repetitions: int) -> pd.DataFrame:
    """Milliseconds of target forward passes over 1 to 17 tokens and of a draft forward pass, at several contexts.

    Cache slots are those half-way through a generation of `NEW_TOKENS`.
    """
    rows: Rows = []
    for prompt in (context - NEW_TOKENS // 2 for context in CONTEXTS):
        context, slots = mid_generation(prompt, NEW_TOKENS, gamma=16)
        costs = measure_costs(pair, context=context, slots=slots, largest=17, repetitions=repetitions)
        rows += curve(costs, {"pair": name, "layout": layout, "context": context} | settings(pair, False))
    return pd.DataFrame(rows)


def compiled_curve(name: str, pair: Pair, repetitions: int) -> pd.DataFrame:
    """The same for compiled forward passes, over the lengths that `walltime` compiles, at its context only."""
    context, slots = mid_generation(PROMPT_TOKENS, NEW_TOKENS, max(COMPILED_GAMMAS), compile=True)
    costs = measure_costs(
        pair, context=context, slots=slots, lengths=[gamma + 1 for gamma in COMPILED_GAMMAS],
        repetitions=repetitions, compile=True,
    )  # fmt: skip
    labels = {"pair": name, "layout": "compiled", "context": context} | settings(pair, True)
    return pd.DataFrame(curve(costs, labels))


def regimes(repetitions: int) -> pd.DataFrame:
    """Improvement at gamma = 4 over alpha, cost ratio, batch size and temperature; batches with continuous batching."""
    made: Rows = []

    def measure(regime: str, x: float, name: str, pair: Pair, rows: int = 1, sampling: Sampling = Sampling()) -> None:
        prompts = prompts_for(pair, name, repetitions)
        speeds = measure_speeds(
            pair, prompts, (0, GAMMA), max_new_tokens=FEW_TOKENS, rows=rows, sampling=sampling, progress=False
        )
        context, slots = mid_generation(PROMPT_TOKENS, FEW_TOKENS, GAMMA)
        costs = measure_costs(
            pair, context=context, slots=slots, lengths=(1, GAMMA + 1), rows=rows, repetitions=9, progress=False
        )  # fmt: skip
        made.append(
            {"regime": regime, "x": x, "pair": name, "gamma": GAMMA} | settings(pair, False)
            | columns("c", costs.cost_ratio) | columns("v", costs.verify_costs[1])
            | columns("measured", speeds.improvement(GAMMA, refilled=True))
            | {"tokens_per_step": speeds.tokens(GAMMA)}
        )  # fmt: skip

    for alpha in tqdm(ALPHAS, desc="alpha"):
        measure("alpha", alpha, "synthetic", synthetic_pair(alpha))
    for draft in tqdm(DRAFTS, desc="draft"):
        pair = synthetic_pair(draft=draft)
        measure("draft", pair.draft.num_parameters() / pair.target.num_parameters(), "synthetic", pair)
    pair = load_pair()
    for temperature in tqdm(TEMPERATURES, desc="temperature"):
        measure("temperature", temperature, "trained", pair, sampling=Sampling(temperature))
    for dtype in (torch.float32, torch.bfloat16):
        pair = load_pair(dtype=dtype)
        for batch in tqdm(BATCHES, desc="batch"):
            measure("batch", batch, "trained", pair, rows=batch)
    return pd.DataFrame(made)


def trace(pair: Pair, new_tokens: int = 40) -> pd.DataFrame:
    """Every part of every step of one generation; the line of the target part has the tokens that the step emitted."""
    prompt = prompts_for(pair, "trained", 1)[0]
    rows: Rows = []
    for gamma in (7, 3, 0):
        for _ in range(2):  # the first warms up
            made = generate(
                pair.target, [prompt], pair.draft, gamma=gamma, max_new_tokens=new_tokens, progress=False,
                study=Study(timed=True),
            ).record  # fmt: skip
        for step in range(made.emitted.shape[1]):
            for part in PARTS:
                emitted = int(made.emitted[0, step]) if part == "target" else 0
                rows.append(
                    {"gamma": gamma, "step": step, "part": part, "seconds": made.seconds[part][step]}
                    | {"emitted": emitted} | settings(pair, False)
                )  # fmt: skip
    return pd.DataFrame(rows)


def walltime_goals(table: pd.DataFrame) -> Rows:
    """The goals about predictions: measured over predicted, and the overhead of a step at gamma = 4."""
    rows: Rows = []
    for row in table.to_dict("records"):
        under = {column: row[column] for column in ("machine", "threads", "dtype", "compiled")}
        ratio = [row[column] / row["predicted"] for column in ("measured", "measured_low", "measured_high")]
        half = ", bfloat16" if row["dtype"] == "bfloat16" else ""
        name = f"{row['pair']}{half}"
        label = f"{name}: measured over predicted, gamma {row['gamma']}"
        rows.append(goal_row(label, Estimate(ratio[0], ratio[1], ratio[2], 0), 0.95, under))
        same = row["measured"] / counted(row)
        rows.append(goal_row(f"{label}, tokens as counted", Estimate(same, np.nan, np.nan, 0), 0.95, under))
        if row["gamma"] == GAMMA:
            shares = {"outside both models' parts": row["rest"], "outside both models' runs": row["own"]}
            rows += [
                goal_row(f"{name}: own share of a step, {where}", Estimate(own, own, own, 0), 0.03, under)
                for where, own in shares.items()
            ]
    return rows


def measure_curves(repetitions: int, names: Sequence[str] = PAIRS) -> None:
    """Cost curves of both pairs in every layout; `walltime` measures the compiled ones in float32."""
    half = torch.bfloat16
    pairs = [
        (name, layout, pair_named(name, **how))
        for layout, how in (("plain", {"packed": False}), ("packed", {}), ("packed", {"dtype": half}))
        for name in names
    ]
    keep_curves(cost_curves(name, layout, pair, 2 * repetitions) for name, layout, pair in pairs)
    keep_curves(
        compiled_curve(name, pair, 2 * repetitions) for name, _, pair in pairs if pair.target.dtype == torch.bfloat16
    )


def measure_walltime(repetitions: int, names: Sequence[str] = PAIRS) -> None:
    """Prediction and measurement for every gamma, and the goals about them."""
    whole, half = pairs_named(names), pairs_named(names, dtype=torch.bfloat16)
    made = [
        walltime(name, pair, repetitions, compile)
        for pairs, compile in ((whole, False), (half, False), (whole, True))
        for name, pair in pairs.items()
    ]
    table = keep_walltime([rows for rows, _ in made])
    keep_curves(curves for _, curves in made if curves.layout[0] == "compiled")
    keep_goals(walltime_goals(table))


def measure_greedy(repetitions: int, names: Sequence[str] = PAIRS) -> None:
    """The same at temperature 0, as in the other half of Table 4."""
    made_for_it = {"synthetic": {"temperature": 0.0}}  # its alpha holds at one temperature
    pairs = {name: pair_named(name, **made_for_it.get(name, {})) for name in names}
    keep_walltime([walltime(name, pair, repetitions, sampling=Sampling(0.0))[0] for name, pair in pairs.items()])


def keep_walltime(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Adds rows to `bench_walltime.csv`, and returns those that were given."""
    made = pd.concat(tables, ignore_index=True)
    keep("bench_walltime", made, ("machine", "pair", "temperature"))
    return made


# "trace" and "regimes" measure what they always do, whatever pairs are asked for.
STAGES: dict[str, Callable[[int, Sequence[str]], Any]] = {
    "peers": measure_against_transformers,
    "walltime": measure_walltime,
    "greedy": measure_greedy,
    "trace": lambda repetitions, names: keep("bench_trace", trace(load_pair())),
    "regimes": lambda repetitions, names: keep("bench_regimes", regimes(repetitions)),
    "curves": measure_curves,
}
