"""Does block verification pay in wall-clock time?

Both rules make the same forward passes in each step, so the time of a completion is the number of
its steps times the time of a step. The two are measured apart: a step takes almost the same time in
every call, but the number of steps varies so much between completions that timed calls alone would
need hours. The table `data/results/block_against_token.csv` has a line for each temperature:

- `token_per_step`, `block_per_step`: tokens per step of `sequences` completions, `prompts` prompts
  completed again and again with other random numbers
- `tokens_ratio`: the second over the first; `step_ratio`: the seconds of a step of token
  verification over those of block verification, the median over `calls` pairs of whole calls, one
  right after the other, so that a pair shares what the machine does meanwhile; `speed_ratio`: their
  product, how many times as fast block verification is
- each with its interval (`_low`, `_high`), by resampling prompts
- `token_ms`, `block_ms`: milliseconds of a step, median over the calls

An item counts the steps at a temperature, or times them; timing needs a machine that does nothing
else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from tqdm import tqdm

from specnb.cache import slots_for
from specnb.distributions import Sampling
from specnb.loading import Pair, load_pair
from specnb.record import Generation
from specnb.rules import Rule, block_verification, token_verification
from specnb.sampler import Sampler
from specnb.statistics import over_rows, ratio_of_sums
from studies import study
from studies.speed.pairs import prompts_of
from studies.study import columns, timed_in_turn

GAMMA, PROMPT_TOKENS = 4, 32
RULES: dict[str, Rule] = {"token": token_verification, "block": block_verification}


def measure(item: str, prompts: int, repeats: int, new_tokens: int, timed_rounds: int) -> pd.DataFrame:
    """A line per prompt and repetition: the steps of a completion by each rule, or seconds per step
    of timed calls."""
    number, what = item.rsplit("-", 1)
    temperature = float(number.replace("-", "."))
    pair = load_pair()
    starts = prompts_of(pair, "held-out", prompts, PROMPT_TOKENS)
    samplers = _samplers(pair, Sampling(temperature=temperature), slots_for(PROMPT_TOKENS, new_tokens, GAMMA))

    def complete(name: str, given: list[list[int]], numbers: Sequence[int]) -> Generation:
        return samplers[name].generate(given, max_new_tokens=new_tokens, seed=9, numbers=numbers)

    if what == "timed":
        found = timed_steps(complete, starts, timed_rounds)
    else:  # completions of temperature 0 are all equal
        found = counted_steps(complete, starts, repeats if temperature > 0 else 1)
    return found.assign(temperature=temperature, measured=what, tokens=new_tokens)


def counted_steps(complete: Any, prompts: list[list[int]], repeats: int) -> pd.DataFrame:
    """The steps by each rule (columns) of `repeats` completions of each prompt, each with random
    numbers of its own."""
    parts = []
    for repeat in tqdm(range(repeats), desc="completions", delay=3, leave=False):
        rows = range(repeat * len(prompts), (repeat + 1) * len(prompts))
        steps = {name: complete(name, prompts, rows).record.active.sum(1) for name in RULES}
        parts.append(pd.DataFrame(steps).rename_axis("prompt").reset_index())
    return pd.concat(parts, ignore_index=True)


def timed_steps(complete: Any, prompts: list[list[int]], rounds: int) -> pd.DataFrame:
    """Seconds of a step by each rule (columns) in whole calls; on each prompt the rules take turns,
    `rounds` times."""
    steps: dict[str, list[int]] = {name: [] for name in RULES}

    def call(name: str, prompt: list[int], row: int) -> None:
        steps[name].append(int(complete(name, [prompt], [row]).record.active.sum()))

    seconds = timed_in_turn(call, [*RULES], prompts * rounds)
    table = pd.DataFrame(seconds / np.array([steps[name][1:] for name in RULES]).T, columns=[*RULES])
    return table.assign(prompt=[*range(len(prompts))] * rounds)  # the first call warmed up


def _samplers(pair: Pair, sampling: Sampling, slots: int) -> dict[str, Sampler]:
    """One for each rule, as users get it, with its check on."""
    given: dict[str, Any] = {"gamma": GAMMA, "sampling": sampling, "slots": slots, "progress": False}
    return {name: Sampler(pair.target, pair.draft, rule=rule, **given) for name, rule in RULES.items()}


def estimates(parts: pd.DataFrame) -> pd.DataFrame:
    """The table: a line for each temperature."""
    lines = [line(of) | {"temperature": temperature} for temperature, of in parts.groupby("temperature")]
    table = pd.DataFrame(lines)
    return table[["temperature", *table.columns.drop("temperature")]]


def line(measured: pd.DataFrame) -> dict[str, float]:
    """All estimates of one temperature, from the lines of `measure`.

    Both rules emit equally many tokens, so tokens per step are compared by the steps that they
    took.
    """
    counted = measured[measured.measured == "counted"]
    timed = measured[measured.measured == "timed"]
    steps = counted.groupby("prompt")[[*RULES]].sum()
    tokens = counted.groupby("prompt").tokens.sum().to_numpy()
    paired = timed.assign(ratio=timed.token / timed.block, call=timed.groupby("prompt").cumcount())
    ratios = paired.pivot_table(index="prompt", columns="call", values="ratio").to_numpy()

    def tokens_ratio(chosen: NDArray[np.int64]) -> float:
        sums = steps.to_numpy()[chosen].sum(0)
        return float(sums[0] / sums[1])

    def step_ratio(chosen: NDArray[np.int64]) -> float:
        return float(np.median(ratios[chosen]))

    found: dict[str, float] = {}
    for name in RULES:
        found |= columns(f"{name}_per_step", ratio_of_sums(tokens, steps[name]))
    found |= columns("tokens_ratio", over_rows(tokens_ratio, len(steps)))
    found |= columns("step_ratio", over_rows(step_ratio, len(steps)))
    found |= columns("speed_ratio", over_rows(lambda chosen: tokens_ratio(chosen) * step_ratio(chosen), len(steps)))
    found |= {"prompts": len(steps), "sequences": len(counted), "calls": len(timed)}
    return found | {f"{name}_ms": 1000 * float(timed[name].median()) for name in RULES}


STUDY = study.Study(
    measure,
    settings={"prompts": 51, "repeats": 20, "new_tokens": 60, "timed_rounds": 2},
    small={"prompts": 8, "repeats": 1, "new_tokens": 8, "timed_rounds": 1},
    items=[f"{temperature}-{what}" for what in ("counted", "timed") for temperature in ("0", "0-5", "1")],
    finish=estimates,
)
