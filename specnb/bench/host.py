"""What this project promises about time, measured on this machine: `python -m specnb.bench`, or `make bench`.

Everything that is compared runs in turn, prompt by prompt, in a new order each time. Rows of this machine
replace its older ones in `data/results/bench*.csv`; what other machines measured stays. Notebook 05 reads them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specnb.acceptance import measure_acceptance
from specnb.bench.ledger import (
    Rows,
    columns,
    counted,
    curve,
    goal_row,
    keep,
    keep_curves,
    keep_goals,
    machine,
    settings,
)
from specnb.cost import CostMeter, Costs, Speeds, measure_costs, measure_speeds, ratio_of_medians
from specnb.decode import generate, slots_for
from specnb.dialled import DRAFT, TARGET, Shape, dialled_pair
from specnb.estimate import Estimate, ratio_of_sums
from specnb.law import Sampling
from specnb.models import Pair, load_pair
from specnb.race import PROMPT_TOKENS, Entrant, ours, prompts_for, race, transformers_generate
from specnb.recommend import predict
from specnb.record import PARTS
from specnb.results import out, stamp, write

NEW_TOKENS = 128
FEW_TOKENS = 48  # where many pairs are compared
GAMMAS = tuple(range(9))
COMPILED_GAMMAS = (0, 2, 3, 4, 5)
CONTEXTS = (32, PROMPT_TOKENS + NEW_TOKENS // 2, 384)  # the middle one is that of the texts that are timed
TEXTS = 32  # of the target alone, for alpha
ALPHAS = (0.1, 0.2, 0.3, 0.5, 0.76, 0.9)
DRAFTS = (DRAFT, Shape(4, 384, 1536, 6), Shape(6, 512, 2048, 8), Shape(9, 640, 2560, 10), TARGET)
BATCHES = (1, 2, 4, 8, 16, 32)
TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
GAMMA = 4
PEER_GAMMA = 3  # where transformers' assisted generation is at its fastest with the dialled pair


def walltime(
    name: str, pair: Pair, gammas: Sequence[int], repetitions: int, compile: bool
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predicted and measured walltime improvement for each gamma, and where the time went; and the cost curve."""
    prompts = prompts_for(pair, name, TEXTS)
    found = measure_acceptance(pair.target, {"draft": pair.draft}, prompts, new_tokens=NEW_TOKENS)
    beta = found.beta["draft"]
    alpha = ratio_of_sums(beta.sum(axis=1), np.full(len(beta), beta.shape[1]))
    # What predicts and what is predicted are timed in turn, so that a machine that changes changes both.
    slots = slots_for(PROMPT_TOKENS, NEW_TOKENS, max(gammas), compile)
    meter = CostMeter(pair, CONTEXTS[1], [gamma + 1 for gamma in gammas], slots=slots, compile=compile)
    speeds = measure_speeds(
        pair, prompts[:repetitions], gammas, max_new_tokens=NEW_TOKENS, compile=compile, between=meter.round
    )
    costs = meter.costs()
    rows = [
        {"pair": name} | settings(pair, compile) | {"gamma": gamma, "temperature": 1.0}
        | columns("alpha", alpha) | columns("c", costs.cost_ratio)
        | {"v": float(costs.verify_cost(gamma + 1)), "target_ms": 1e3 * float(np.median(costs.target[:, 0]))}
        | columns("predicted", predict(beta, costs, gamma)) | columns("measured", speeds.improvement(gamma))
        | {"tokens_per_step": speeds.tokens(gamma)}
        | {part: speeds.share(gamma, part) for part in PARTS} | {"own": own_share(costs, speeds, gamma)}
        for gamma in gammas if gamma
    ]  # fmt: skip
    layout = "compiled" if compile else "packed"
    labels = {"pair": name, "layout": layout, "context": CONTEXTS[1]} | settings(pair, compile)
    return pd.DataFrame(rows), pd.DataFrame(curve(costs, labels))


def own_share(costs: Costs, speeds: Speeds, gamma: int) -> float:
    """The share of a step that is neither a draft run nor the target run, both as timed alone."""
    at = speeds.gammas.index(gamma)
    step = np.median(speeds.seconds[:, at].sum(axis=-1) * speeds.tokens_per_step[:, at])
    runs = gamma * np.median(costs.draft) + np.median(costs.target[:, costs.lengths.index(gamma + 1)])
    return float(1 - runs / step)


def cost_curves(name: str, layout: str, pair: Pair, repetitions: int) -> pd.DataFrame:
    """Milliseconds of target runs over 1 to 17 tokens and of a draft run, at several contexts."""
    rows: Rows = []
    for context in CONTEXTS:
        costs = measure_costs(pair, context=context, largest=17, repetitions=repetitions)
        rows += curve(costs, {"pair": name, "layout": layout, "context": context} | settings(pair, False))
    return pd.DataFrame(rows)


def regimes(repetitions: int) -> pd.DataFrame:
    """Speed-up at gamma = 4 along four ways to lose: alpha, cost of the draft, batch, temperature."""
    rows: Rows = []

    def measure(regime: str, x: float, name: str, pair: Pair, **how: Any) -> None:
        prompts = prompts_for(pair, name, repetitions)
        speeds = measure_speeds(pair, prompts, (0, GAMMA), max_new_tokens=FEW_TOKENS, **how)
        context, slots = PROMPT_TOKENS + FEW_TOKENS // 2, slots_for(PROMPT_TOKENS, FEW_TOKENS, GAMMA)
        costs = measure_costs(pair, context=context, slots=slots, lengths=(1, GAMMA + 1), repetitions=9)
        rows.append(
            {"regime": regime, "x": x, "pair": name, "gamma": GAMMA} | settings(pair, False)
            | columns("c", costs.cost_ratio) | columns("measured", speeds.improvement(GAMMA))
            | {"tokens_per_step": speeds.tokens(GAMMA)}
        )  # fmt: skip

    for alpha in tqdm(ALPHAS, desc="alpha"):
        measure("alpha", alpha, "dialled", dialled_pair(alpha))
    for draft in tqdm(DRAFTS, desc="draft"):
        pair = dialled_pair(draft=draft)
        measure("draft", pair.draft.num_parameters() / pair.target.num_parameters(), "dialled", pair)
    pair = load_pair()
    for temperature in tqdm(TEMPERATURES, desc="temperature"):
        measure("temperature", temperature, "trained", pair, sampling=Sampling(temperature))
    for dtype in (torch.float32, torch.bfloat16):
        pair = load_pair(dtype=dtype)
        for batch in tqdm(BATCHES, desc="batch"):
            measure("batch", batch, "trained", pair, rows=batch)
    return pd.DataFrame(rows)


def peers(repetitions: int) -> tuple[pd.DataFrame, Rows]:
    """Seconds of our loop and of transformers' on the same prompts; and the goals that rest on them."""
    dialled, plain = dialled_pair(), dialled_pair(packed=False)
    trained, plain_trained, half = load_pair(), load_pair(packed=False), load_pair(dtype=torch.bfloat16)
    races: dict[str, dict[str, Entrant]] = {
        "dialled": {
            "transformers": transformers_generate(plain.target, None, None, NEW_TOKENS),
            "transformers, packed": transformers_generate(dialled.target, None, None, NEW_TOKENS),
            "transformers assisted, defaults": transformers_generate(plain.target, plain.draft, None, NEW_TOKENS),
            "transformers assisted": transformers_generate(plain.target, plain.draft, PEER_GAMMA, NEW_TOKENS),
            "transformers assisted, packed": transformers_generate(
                dialled.target, dialled.draft, PEER_GAMMA, NEW_TOKENS
            ),
            "target only, plain weights": ours(plain, 0, NEW_TOKENS),
            "target only": ours(dialled, 0, NEW_TOKENS),
            "target only, compiled": ours(dialled, 0, NEW_TOKENS, compile=True),
            "speculative, plain weights": ours(plain, PEER_GAMMA, NEW_TOKENS),
            "speculative": ours(dialled, PEER_GAMMA, NEW_TOKENS),
            "speculative, compiled": ours(dialled, PEER_GAMMA, NEW_TOKENS, compile=True),
        },
        "trained": {
            "transformers": transformers_generate(plain_trained.target, None, None, NEW_TOKENS),
            "transformers, packed": transformers_generate(trained.target, None, None, NEW_TOKENS),
            "transformers assisted": transformers_generate(
                plain_trained.target, plain_trained.draft, PEER_GAMMA, NEW_TOKENS
            ),
            "target only": ours(trained, 0, NEW_TOKENS),
            "target only, compiled": ours(trained, 0, NEW_TOKENS, compile=True),
            "speculative": ours(trained, PEER_GAMMA, NEW_TOKENS),
            "speculative, compiled": ours(trained, PEER_GAMMA, NEW_TOKENS, compile=True),
            "target only, bfloat16": ours(half, 0, NEW_TOKENS),
            "speculative, bfloat16": ours(half, PEER_GAMMA, NEW_TOKENS),
        },
    }
    pairs = {"dialled": dialled, "trained": trained}
    timed = {name: race(entrants, prompts_for(pairs[name], name, repetitions)) for name, entrants in races.items()}

    def goal(name: str, pair: str, slow: str, fast: str, least: float, packed: Pair) -> dict[str, Any]:
        ratio = ratio_of_medians(timed[pair][slow], timed[pair][fast])
        return goal_row(name, ratio, least, settings(packed, "compiled" in fast))

    goals = [
        goal("dialled: over transformers assisted", "dialled", "transformers assisted", "speculative, compiled", 2.5,
             dialled),
        goal("dialled: over transformers assisted", "dialled", "transformers assisted", "speculative", 1.1, dialled),
        goal("dialled: over transformers assisted, its weights packed too", "dialled", "transformers assisted, packed",
             "speculative", 1.1, dialled),
        goal("dialled: target only over transformers generate", "dialled", "transformers", "target only", 1.0, dialled),
        goal("dialled: target only over transformers generate, its weights packed too", "dialled",
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


def trace(pair: Pair, new_tokens: int = 40) -> pd.DataFrame:
    """Every part of every step of one text, in order, with the tokens that the step emitted beside its target run."""
    prompt = prompts_for(pair, "trained", 1)[0]
    rows: Rows = []
    for gamma in (7, 3, 0):
        for _ in range(2):  # the first warms up
            made = generate(
                pair.target, [prompt], pair.draft, gamma=gamma, max_new_tokens=new_tokens, timed=True, progress=False
            ).record
        for step in range(made.emitted.shape[1]):
            for part in PARTS:
                emitted = int(made.emitted[0, step]) if part == "target" else 0
                rows.append(
                    {"gamma": gamma, "step": step, "part": part, "seconds": made.seconds[part][step]}
                    | {"emitted": emitted} | settings(pair, False)
                )  # fmt: skip
    return pd.DataFrame(rows)


def walltime_goals(table: pd.DataFrame) -> Rows:
    """The goals that rest on predictions: measured over predicted, and the loop's own share at gamma = 4."""
    rows: Rows = []
    for row in table.to_dict("records"):
        under = {name: row[name] for name in ("machine", "threads", "dtype", "compiled")}
        ratio = [row[name] / row["predicted"] for name in ("measured", "measured_low", "measured_high")]
        half = ", bfloat16" if row["dtype"] == "bfloat16" else ""
        who = f"{row['pair']}{half}"
        label = f"{who}: measured over predicted, gamma {row['gamma']}"
        rows.append(goal_row(label, Estimate(ratio[0], ratio[1], ratio[2], 0), 0.95, under))
        same = row["measured"] / counted(row)
        rows.append(goal_row(f"{label}, tokens as counted", Estimate(same, np.nan, np.nan, 0), 0.95, under))
        if row["gamma"] == GAMMA:
            shares = {"outside both models' parts": row["rest"], "outside both models' runs": row["own"]}
            rows += [
                goal_row(f"{who}: own share of a step, {where}", Estimate(own, own, own, 0), 0.03, under)
                for where, own in shares.items()
            ]
    return rows


def measure_curves(repetitions: int) -> None:
    """Cost curves of both pairs in every layout that needs no compiler."""
    half = torch.bfloat16
    pairs = (
        ("dialled", "plain", dialled_pair(packed=False)), ("trained", "plain", load_pair(packed=False)),
        ("dialled", "packed", dialled_pair()), ("trained", "packed", load_pair()),
        ("dialled", "packed", dialled_pair(dtype=half)), ("trained", "packed", load_pair(dtype=half)),
    )  # fmt: skip
    keep_curves(cost_curves(name, layout, pair, 2 * repetitions) for name, layout, pair in pairs)


def measure_walltime(repetitions: int) -> None:
    """Prediction and measurement for every gamma, and the goals that rest on them."""
    half = torch.bfloat16
    ways = [
        ("dialled", dialled_pair(), False), ("trained", load_pair(), False),
        ("dialled", dialled_pair(dtype=half), False), ("trained", load_pair(dtype=half), False),
        ("dialled", dialled_pair(), True), ("trained", load_pair(), True),
    ]  # fmt: skip
    made = [
        walltime(name, pair, COMPILED_GAMMAS if compile else GAMMAS, repetitions, compile)
        for name, pair, compile in ways
    ]
    table = keep("bench_walltime", pd.concat([rows for rows, _ in made], ignore_index=True))
    keep_curves(curves for _, curves in made if curves.layout[0] == "compiled")
    keep_goals(walltime_goals(table[table.machine == machine()]))


def measure_peers(repetitions: int) -> None:
    """Our loop and transformers' on the same prompts, and the goals that rest on that."""
    timed, reached = peers(repetitions)
    keep("bench_peers", timed)
    keep_goals(reached)


STAGES: dict[str, Callable[[int], Any]] = {
    "peers": measure_peers,
    "walltime": measure_walltime,
    "trace": lambda repetitions: keep("bench_trace", trace(load_pair())),
    "regimes": lambda repetitions: keep("bench_regimes", regimes(repetitions)),
    "curves": measure_curves,
}


def main() -> None:
    """Measures everything, or the stages that are named, writes the tables, and prints the goals."""
    about = "Measures what is promised about time; about twenty minutes."
    parser = argparse.ArgumentParser("python -m specnb.bench", description=about)
    parser.add_argument("stages", nargs="*", choices=[*STAGES, []], help="what to measure (default: everything)")
    parser.add_argument("--repetitions", type=int, default=11, help="prompts for each figure (default 11)")
    asked = parser.parse_args()
    path = out() / "data" / "results" / "bench.json"
    stamps = json.loads(path.read_text()) if path.exists() else {}
    for stage in asked.stages or STAGES:
        STAGES[stage](asked.repetitions)
        under = {"repetitions": asked.repetitions, "machine": machine(), "new_tokens": NEW_TOKENS}
        stamps[stage] = stamp(under)
        write(path, json.dumps(stamps, indent=1) + "\n")
    bench = pd.read_csv(out() / "data" / "results" / "bench.csv")
    print(bench[bench.machine == machine()].drop(columns="machine").round(3).to_string(index=False))
