"""What this project promises about time, measured on this machine: `python -m specnb.bench`, or `make bench`.

Everything that is compared runs in turn, prompt by prompt, in a new order each time. Rows of this machine
replace its older ones in `data/results/bench*.csv`; what other machines measured stays. Notebook 05 reads them.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specnb.acceptance import measure_acceptance
from specnb.cost import Costs, Speeds, measure_costs, measure_speeds, ratio_of_medians
from specnb.decode import generate
from specnb.dialled import DRAFT, TARGET, Shape, dialled_pair
from specnb.estimate import Estimate, ratio_of_sums
from specnb.law import Sampling
from specnb.models import Pair, load_pair
from specnb.race import PROMPT_TOKENS, Entrant, ours, prompts_for, race, transformers_generate
from specnb.recommend import predict
from specnb.record import PARTS
from specnb.results import out, stamp, write
from specnb.theory import step_cost

NEW_TOKENS = 128
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

Rows = list[dict[str, Any]]


def machine(device: torch.device = torch.device("cpu")) -> str:
    """The device's own name; of a processor, and the number of its cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
        return f"{names[0]}, {len(names)} cores"
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def settings(pair: Pair, compiled: bool | str) -> dict[str, Any]:
    """The columns that say under what a row was measured."""
    threads = torch.get_num_threads()
    dtype = str(pair.target.dtype).removeprefix("torch.")
    return {"machine": machine(pair.target.device), "threads": threads, "dtype": dtype, "compiled": compiled}


def walltime(
    name: str, pair: Pair, gammas: Sequence[int], repetitions: int, compile: bool
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predicted and measured walltime improvement for each gamma, and where the time went; and the cost curve."""
    prompts = prompts_for(pair, name, TEXTS)
    found = measure_acceptance(pair.target, {"draft": pair.draft}, prompts, new_tokens=NEW_TOKENS)
    beta = found.beta["draft"]
    alpha = ratio_of_sums(beta.sum(axis=1), np.full(len(beta), beta.shape[1]))
    costs = measure_costs(
        pair, context=CONTEXTS[1], lengths=[gamma + 1 for gamma in gammas],
        repetitions=3 * repetitions, compile=compile,
    )  # fmt: skip
    speeds = measure_speeds(pair, prompts[:repetitions], gammas, max_new_tokens=NEW_TOKENS, compile=compile)
    rows = [
        {"pair": name} | settings(pair, compile) | {"gamma": gamma, "temperature": 1.0}
        | columns("alpha", alpha) | columns("c", costs.cost_ratio)
        | {"v": float(costs.verify_cost(gamma + 1)), "target_ms": 1e3 * float(np.median(costs.target[:, 0]))}
        | columns("predicted", predict(beta, costs, gamma)) | columns("measured", speeds.improvement(gamma))
        | {"tokens_per_step": float(np.median(speeds.tokens_per_step[:, speeds.gammas.index(gamma)]))}
        | {part: speeds.share(gamma, part) for part in PARTS} | {"own": own_share(costs, speeds, gamma)}
        for gamma in gammas if gamma
    ]  # fmt: skip
    layout = "compiled" if compile else "packed"
    labels = {"pair": name, "layout": layout, "context": CONTEXTS[1]} | settings(pair, compile)
    return pd.DataFrame(rows), pd.DataFrame(curve(costs, labels))


def counted(row: dict[str, Any]) -> float:
    """The prediction for the very texts that were timed, whatever was accepted in them, of a row of `walltime`."""
    return float(row["tokens_per_step"] / step_cost(row["gamma"], row["c"], lambda _: row["v"]))


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


def curve(costs: Costs, labels: dict[str, Any]) -> Rows:
    """One row for each number of tokens of a target run, and one for the draft."""
    runs = [("target", n, times) for n, times in zip(costs.lengths, costs.target.T, strict=True)]
    rows: Rows = []
    for model, n, times in [*runs, ("draft", 1, costs.draft)]:
        low, middle, high = 1e3 * np.quantile(times, [0.25, 0.5, 0.75])
        rows.append(labels | {"model": model, "n": n, "ms": middle, "ms_low": low, "ms_high": high})
    return rows


def columns(name: str, estimate: Estimate) -> dict[str, float]:
    """An estimate as three columns."""
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def regimes(repetitions: int) -> pd.DataFrame:
    """Speed-up at gamma = 4 along four ways to lose: alpha, cost of the draft, batch, temperature."""
    rows: Rows = []

    def measure(regime: str, x: float, name: str, pair: Pair, **how: Any) -> None:
        prompts = prompts_for(pair, name, repetitions)
        speeds = measure_speeds(pair, prompts, (0, GAMMA), max_new_tokens=48, **how)
        costs = measure_costs(pair, context=64, lengths=(1, GAMMA + 1), repetitions=9)
        rows.append(
            {"regime": regime, "x": x, "pair": name, "gamma": GAMMA} | settings(pair, False)
            | columns("c", costs.cost_ratio) | columns("measured", speeds.improvement(GAMMA))
            | {"tokens_per_step": float(speeds.tokens_per_step[:, 1].mean())}
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
    trained, plain_trained = load_pair(), load_pair(packed=False)
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
        },
    }
    timed = {
        name: race(entrants, prompts_for(dialled if name == "dialled" else trained, name, repetitions))
        for name, entrants in races.items()
    }

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
        goal("trained: target only over transformers generate", "trained", "transformers", "target only", 1.0, trained),
        goal("trained: target only over transformers generate, its weights packed too", "trained",
             "transformers, packed", "target only", 1.0, trained),
    ]  # fmt: skip
    long = [
        {"pair": name, "sampler": sampler} | settings(dialled, "compiled" in sampler)
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


def goal_row(name: str, ratio: Estimate, goal: float, under: dict[str, Any]) -> dict[str, Any]:
    """One row of `bench.csv`."""
    return {"name": name, "ratio": ratio.value, "low": ratio.low, "high": ratio.high, "goal": goal} | under


def walltime_goals(table: pd.DataFrame) -> Rows:
    """The goals that rest on predictions: measured over predicted, and the loop's own share at gamma = 4."""
    rows: Rows = []
    for row in table.to_dict("records"):
        under = {name: row[name] for name in ("machine", "threads", "dtype", "compiled")}
        ratio = [row[name] / row["predicted"] for name in ("measured", "measured_low", "measured_high")]
        label = f"{row['pair']}: measured over predicted, gamma {row['gamma']}"
        rows.append(goal_row(label, Estimate(ratio[0], ratio[1], ratio[2], 0), 0.95, under))
        same = row["measured"] / counted(row)
        rows.append(goal_row(f"{label}, tokens as counted", Estimate(same, np.nan, np.nan, 0), 0.95, under))
        if row["gamma"] == GAMMA:
            shares = {"outside both models' parts": row["rest"], "outside both models' runs": row["own"]}
            rows += [
                goal_row(f"{row['pair']}: own share of a step, {where}", Estimate(own, own, own, 0), 0.03, under)
                for where, own in shares.items()
            ]
    return rows


def keep(name: str, table: pd.DataFrame) -> pd.DataFrame:
    """Writes `data/results/<name>.csv`: these rows, and those of other machines that were there."""
    path = out() / "data" / "results" / f"{name}.csv"
    if path.exists():
        before = pd.read_csv(path)
        table = pd.concat([before[before.machine != machine()], table], ignore_index=True)
    write(path, table.to_csv(index=False, lineterminator="\n", float_format="%.5g"))
    return table


def main() -> None:
    """Measures everything, prints the goals, and writes the tables."""
    parser = argparse.ArgumentParser(description="Measures what is promised about time; a quarter of an hour.")
    parser.add_argument("--repetitions", type=int, default=7, help="prompts for each figure (default 7)")
    repetitions = parser.parse_args().repetitions
    dialled, trained = dialled_pair(), load_pair()
    pairs = {"dialled": dialled, "trained": trained}
    half = torch.bfloat16
    curves = [
        cost_curves(name, layout, pair, 2 * repetitions)
        for name, layout, pair in (
            ("dialled", "plain", dialled_pair(packed=False)), ("trained", "plain", load_pair(packed=False)),
            ("dialled", "packed", dialled), ("trained", "packed", trained),
            ("dialled", "packed", dialled_pair(dtype=half)), ("trained", "packed", load_pair(dtype=half)),
        )
    ]  # fmt: skip
    tables = []
    for compile, gammas in ((False, GAMMAS), (True, COMPILED_GAMMAS)):
        for name, pair in pairs.items():
            table, costs = walltime(name, pair, gammas, repetitions, compile)
            tables.append(table)
            curves += [costs] if compile else []
    predicted = pd.concat(tables, ignore_index=True)
    timed, goals = peers(repetitions)
    bench = pd.DataFrame([*goals, *walltime_goals(predicted)])
    keep("bench_walltime", predicted)
    keep("bench_trace", trace(trained))
    keep("bench_peers", timed)
    keep("bench_costs", pd.concat(curves, ignore_index=True))
    keep("bench_regimes", regimes(repetitions))
    keep("bench", bench)
    about = stamp({"repetitions": repetitions, "machine": machine(), "new_tokens": NEW_TOKENS})
    write(out() / "data" / "results" / "bench.json", json.dumps(about, indent=1) + "\n")
    print(bench.drop(columns="machine").round(3).to_string(index=False))


if __name__ == "__main__":
    main()
