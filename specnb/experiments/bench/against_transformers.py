"""Our loop beside the generation of transformers, on this machine, and the goals of `make bench` that rest on it."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from specnb.bench.ledger import NEW_TOKENS, Rows, goal_row, keep, keep_goals, settings
from specnb.dialled import dialled_pair
from specnb.estimate import ratio_of_medians
from specnb.models import Pair, load_pair
from specnb.race import Entrant, ours, prompts_for, race, transformers_generate

PEER_GAMMA = 3  # where transformers' assisted generation is at its fastest with the dialled pair


def measure_peers(repetitions: int) -> None:
    """Our loop and transformers' on the same prompts, and the goals that rest on that."""
    timed, reached = peers(repetitions)
    keep("bench_peers", timed)
    keep_goals(reached)


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
