"""Does block verification pay by the clock? `make experiments ONLY=block_against_token`.

Both rules make the same forward passes in each step, so the time of a completion is the number of its steps times the
time of a step. The two are measured apart: a step takes almost the same time in every call, but the number of steps
varies so much between completions that timed calls alone would need hours. The table
`data/results/block_against_token.csv` has a line for each temperature:

- `token_per_step`, `block_per_step`: tokens per step of `sequences` completions, `prompts` prompts completed again and
  again with other random numbers
- `tokens_ratio`: the second over the first; `step_ratio`: the seconds of a step of token verification over those of
  block verification, in `calls` timed whole calls of each, in turn; `speed_ratio`: their product, how many times as
  fast block verification is
- each with its interval (`_low`, `_high`), by resampling prompts
- `token_ms`, `block_ms`: milliseconds of a step, median over the calls
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from tqdm import tqdm

from specnb.decoding.loop import Generation, generate
from specnb.drafting.model import ModelDrafter
from specnb.experiments.bench.generators import prompts_for
from specnb.measure.statistics import Estimate, over_rows
from specnb.measure.timing import run_round
from specnb.models.loading import Pair, load_pair
from specnb.sampling.block_verification import block_verification
from specnb.sampling.distributions import Sampling
from specnb.sampling.verification import Rule, token_verification

TABLE = "block_against_token"
SETTINGS: dict[str, Any] = {"prompts": 51, "repeats": 20, "new_tokens": 60, "timed_rounds": 2}
SMOKE: dict[str, Any] = {"prompts": 8, "repeats": 1, "new_tokens": 8, "timed_rounds": 1}
GAMMA, PROMPT_TOKENS = 4, 32
RULES: dict[str, Rule] = {"token": token_verification, "block": block_verification}


class Measured(NamedTuple):
    """Of one rule: the steps of all completions of each prompt, and the seconds of a step in each call, per prompt."""

    steps: NDArray[np.int64]
    seconds: NDArray[np.float64]


def items(**_: Any) -> list[str]:
    """Temperatures."""
    return ["0", "0-5", "1"]


def measure(item: str, prompts: int, repeats: int, new_tokens: int, timed_rounds: int) -> pd.DataFrame:
    """The line of one temperature."""
    temperature = float(item.replace("-", "."))
    pair = load_pair(packed=False)
    starts = prompts_for(pair, "trained", prompts, PROMPT_TOKENS)
    complete = partial(_complete, pair, Sampling(temperature=temperature), new_tokens)
    seconds = timed_steps(complete, starts, timed_rounds)
    repeats = repeats if temperature > 0 else 1  # completions of temperature 0 are all equal
    token, block = (Measured(steps_of(complete, name, starts, repeats), seconds[name]) for name in RULES)
    tokens = repeats * new_tokens
    estimates = {
        "token_per_step": over_rows(lambda chosen: tokens / token.steps[chosen].mean(), prompts),
        "block_per_step": over_rows(lambda chosen: tokens / block.steps[chosen].mean(), prompts),
        "tokens_ratio": over_rows(lambda chosen: steps_ratio(token, block, chosen), prompts),
        "step_ratio": over_rows(lambda chosen: seconds_ratio(token, block, chosen), prompts),
        "speed_ratio": over_rows(
            lambda chosen: steps_ratio(token, block, chosen) * seconds_ratio(token, block, chosen), prompts
        ),
    }
    row: dict[str, Any] = {"temperature": temperature}
    for name, estimate in estimates.items():
        row |= _with_interval(name, estimate)
    row |= {"prompts": prompts, "sequences": prompts * repeats, "calls": token.seconds.size}
    row |= {f"{name}_ms": 1000 * float(np.median(own)) for name, own in seconds.items()}
    return pd.DataFrame([row])


def steps_ratio(token: Measured, block: Measured, chosen: NDArray[np.int64]) -> float:
    """Steps of token verification over those of block verification, on the `chosen` prompts: both emit equally much."""
    return float(token.steps[chosen].sum() / block.steps[chosen].sum())


def seconds_ratio(token: Measured, block: Measured, chosen: NDArray[np.int64]) -> float:
    """The median seconds of a step of token verification over those of block verification, on the `chosen` prompts."""
    return float(np.median(token.seconds[chosen]) / np.median(block.seconds[chosen]))


def steps_of(complete: Any, name: str, prompts: list[list[int]], repeats: int) -> NDArray[np.int64]:
    """The steps `(prompts,)` of `repeats` completions of each prompt, each with random numbers of its own."""
    total = np.zeros(len(prompts), dtype=np.int64)
    for repeat in tqdm(range(repeats), desc=f"completions, {name}", delay=3, leave=False):
        rows = range(repeat * len(prompts), (repeat + 1) * len(prompts))
        total += complete(RULES[name], prompts, rows).record.active.sum(1)
    return total


def timed_steps(complete: Any, prompts: list[list[int]], rounds: int) -> dict[str, NDArray[np.float64]]:
    """Seconds of a step `(prompts, rounds)` in whole calls, by the rule; on each prompt the rules take turns."""
    order, found = np.random.default_rng(0), []
    starts = [prompts[0], *prompts * rounds]  # the first is the warm-up
    for row, prompt in enumerate(tqdm(starts, desc="timing", delay=3, leave=False)):
        found.append(
            run_round([partial(_seconds_of_a_step, complete, rule, prompt, row) for rule in RULES.values()], order)
        )
    by_rule = np.array(found[1:]).reshape(rounds, len(prompts), len(RULES)).T
    return {name: by_rule[number] for number, name in enumerate(RULES)}


def _seconds_of_a_step(complete: Any, rule: Rule, prompt: list[int], row: int) -> float:
    start = perf_counter()
    steps = complete(rule, [prompt], [row]).record.active.sum()
    return float((perf_counter() - start) / steps)


def _complete(
    pair: Pair, sampling: Sampling, new_tokens: int, rule: Rule, prompts: list[list[int]], rows: Any
) -> Generation:
    return generate(
        pair.target, prompts, ModelDrafter(pair.draft, sampling), gamma=GAMMA, max_new_tokens=new_tokens,
        sampling=sampling, rule=rule, rows=rows, seed=9, progress=False,
    )  # fmt: skip


def _with_interval(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def gather(parts: pd.DataFrame) -> pd.DataFrame:
    """The table."""
    return parts
