"""The decoding loops of specnb and transformers on the same prompts, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from specnb.measure.statistics import ratio_of_medians
from specnb.models.loading import Pair, load_pair
from studies.speed.bench.generators import (
    PAIRS,
    Generator,
    pairs_named,
    prompts_for,
    specnb_generate,
    time_generators,
    transformers_generate,
)
from studies.speed.bench.setting import Setting, Workload
from studies.speed.bench.tables import NEW_TOKENS, Rows, columns, goal_row, keep, keep_goals, settings

ASSISTED_GAMMA = 3  # where transformers' assisted generation is fastest with the synthetic pair on a CPU
ASSISTED_GAMMAS = (2, 4, 7)  # compared on a GPU, for assisted generation and for specnb; the best of each counts
GOALS = (  # name, pair, slow, fast, least ratio
    ("over transformers assisted", "synthetic", "transformers assisted", "speculative, compiled", 2.5),
    ("over transformers assisted", "synthetic", "transformers assisted", "speculative", 1.1),
    ("over transformers assisted, its weights packed too", "synthetic", "transformers assisted, packed", "speculative",
     1.1),
    ("target only over transformers generate", "synthetic", "transformers", "target only", 1.0),
    ("target only over transformers generate, its weights packed too", "synthetic", "transformers, packed",
     "target only", 1.0),
    ("over target only", "trained", "target only, compiled", "speculative, compiled", 2.0),
    ("over target only", "trained", "target only", "speculative", 2.0),
    ("over target only", "trained", "target only, bfloat16", "speculative, bfloat16", 2.0),
    ("target only over transformers generate", "trained", "transformers", "target only", 1.0),
    ("target only over transformers generate, its weights packed too", "trained", "transformers, packed",
     "target only", 1.0),
)  # fmt: skip


def measure_against_transformers(repetitions: int, names: Sequence[str] = PAIRS) -> None:
    """The pairs on this machine's processor, and the goals that depend on it."""
    table, reached = against_transformers(repetitions, names)
    keep("bench_against_transformers", table, ("machine", "pair"))
    keep_goals(reached)


def against_transformers(repetitions: int, names: Sequence[str] = PAIRS) -> tuple[pd.DataFrame, Rows]:
    """Milliseconds per token of each generator with each pair; and the goals that depend on them."""
    pairs, saved = pairs_named(names), pairs_named(names, packed=False)
    half = load_pair(dtype=torch.bfloat16)
    rows, goals, seconds = [], [], {}
    for name, pair in pairs.items():
        generators = _common(pair, saved[name]) | (
            _synthetic(pair, saved[name]) if name == "synthetic" else _half(half)
        )
        seconds[name] = time_generators(generators, prompts_for(pair, name, repetitions), pair.target.device)
        rows += [
            {"pair": name, "sampler": sampler} | _conditions(sampler, pair, half) | _per_token(times, NEW_TOKENS)
            for sampler, times in seconds[name].items()
        ]
    for name, pair_name, slow, fast, least in GOALS:
        if pair_name not in pairs:
            continue
        ratio = ratio_of_medians(seconds[pair_name][slow], seconds[pair_name][fast])
        label = f"{pair_name}, bfloat16" if "bfloat16" in fast else pair_name
        goals.append(goal_row(f"{label}: {name}", ratio, least, _conditions(fast, pairs[pair_name], half)))
    return pd.DataFrame(rows), goals


def _assisted(pair: Pair, gamma: int | None = ASSISTED_GAMMA) -> Generator:
    return transformers_generate(pair.target, pair.draft, gamma, NEW_TOKENS)


def _common(pair: Pair, saved: Pair) -> dict[str, Generator]:
    return {
        "transformers": transformers_generate(saved.target, None, None, NEW_TOKENS),
        "transformers, packed": transformers_generate(pair.target, None, None, NEW_TOKENS),
        "transformers assisted": _assisted(saved),
        "target only": specnb_generate(pair, 0, NEW_TOKENS),
        "target only, compiled": specnb_generate(pair, 0, NEW_TOKENS, compile=True),
        "speculative": specnb_generate(pair, ASSISTED_GAMMA, NEW_TOKENS),
        "speculative, compiled": specnb_generate(pair, ASSISTED_GAMMA, NEW_TOKENS, compile=True),
    }


def _synthetic(pair: Pair, saved: Pair) -> dict[str, Generator]:
    return {
        "transformers assisted, defaults": _assisted(saved, None),
        "transformers assisted, packed": _assisted(pair),
        "target only, plain weights": specnb_generate(saved, 0, NEW_TOKENS),
        "speculative, plain weights": specnb_generate(saved, ASSISTED_GAMMA, NEW_TOKENS),
    }


def _half(half: Pair) -> dict[str, Generator]:
    return {
        "target only, bfloat16": specnb_generate(half, 0, NEW_TOKENS),
        "speculative, bfloat16": specnb_generate(half, ASSISTED_GAMMA, NEW_TOKENS),
    }


def _conditions(sampler: str, pair: Pair, half: Pair) -> dict[str, Any]:
    return settings(half if "bfloat16" in sampler else pair, "compiled" in sampler)


def _per_token(seconds: pd.Series, new_tokens: int) -> dict[str, Any]:
    return {"ms_per_token": 1e3 * float(seconds.median()) / new_tokens, "runs": len(seconds)}


def compare_gammas(workload: Workload, setting: Setting) -> Rows:
    """Milliseconds per token of both loops with each of `ASSISTED_GAMMAS`, whole calls, one row at a time.

    `over_assisted` is the speed relative to transformers' assisted generation at its fastest.
    """
    pair, tokens = workload.pair, setting.new_tokens
    generators: dict[tuple[str, int, bool | str], Generator] = {
        ("transformers", 0, False): transformers_generate(pair.target, None, None, tokens),
        ("transformers assisted, defaults", -1, False): transformers_generate(pair.target, pair.draft, None, tokens),
    }
    for gamma in ASSISTED_GAMMAS:
        generators["transformers assisted", gamma, False] = transformers_generate(
            pair.target, pair.draft, gamma, tokens
        )
    for compile in {setting.compile: None, False: None}:
        for gamma in (0, *ASSISTED_GAMMAS):
            name = "speculative" if gamma else "target only"
            generators[name, gamma, compile] = specnb_generate(pair, gamma, tokens, compile)
    names = {", ".join(map(str, key)): key for key in generators}
    prompts = workload.prompts[: setting.repetitions]
    seconds = time_generators({name: generators[key] for name, key in names.items()}, prompts, pair.target.device)
    assisted = [name for name in names if name.startswith("transformers assisted")]
    best = seconds[assisted].median().idxmin()
    return [
        {"pair": workload.name, "sampler": sampler, "gamma": gamma} | settings(pair, compile)
        | _per_token(seconds[name], tokens) | columns("over_assisted", ratio_of_medians(seconds[best], seconds[name]))
        for name, (sampler, gamma, compile) in names.items()
    ]  # fmt: skip
