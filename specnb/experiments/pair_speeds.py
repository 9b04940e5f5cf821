"""How fast is the trained pair with each of its drafters? `make experiments ONLY=pair_speeds`.

Whole calls of `generate`, the pass over the prompt included, one prompt at a time in float32 at temperatures 1 and 0
(compiled: at 1), with weights in the layout that is fastest on the machine. Plain decoding of the same target with the
same compilation, and every drafter, take turns in one run, in a new random order for each prompt. Targets: the shipped
one and the larger one. Prompts: the beginnings of held-out files of the corpus, and of modules of Python's standard
library, which is not in the corpus. One line of `data/results/pair_speeds.csv` for each of these:

- `ms`: milliseconds per token, over all prompts
- `tokens_per_step`, with a 95% interval over prompts
- `speed_up`: the time of plain decoding with the same compilation, for all prompts, over this one's, with a 95%
  interval over prompts. Across compilations compare `ms`

Drafters and their common gamma were fixed before the run. Each call is timed once; the interval is over what is
decoded, and says nothing about other machines.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from specnb.decoding.loop import forget_compiled, generate
from specnb.decoding.study import Study
from specnb.drafting.base import Drafter
from specnb.drafting.features import AttentionDrafter, FeatureDrafter, HeadDrafter
from specnb.drafting.model import ModelDrafter
from specnb.experiments.bench.tables import columns
from specnb.experiments.larger_target import LARGER
from specnb.experiments.recommendation import PROMPTS, prompts_of
from specnb.machine import machine
from specnb.measure.statistics import ratio_of_sums
from specnb.measure.timing import run_round
from specnb.models.draft_heads import AttentionHead, Head, RecurrentHead, load_head
from specnb.models.loading import TRAINED_PAIR, Pair, load_model, load_pair
from specnb.models.packing import pack
from specnb.sampling.distributions import Sampling

TABLE = "pair_speeds"
SETTINGS: dict[str, Any] = {"prompts": 32, "prompt_tokens": 32, "new_tokens": 64}
SMOKE: dict[str, Any] = {"prompts": 8, "prompt_tokens": 8, "new_tokens": 8}
NONE, GAMMA = "none", 4
HEADS = {
    "shipped": {"recurrent head": "draft-recurrent", "attention head": "draft-attention"},
    "larger": {"attention head": "draft-attention-larger"},
}
"""The folders of the heads that each target has, by what they are called in the table."""
DRAFTERS: dict[type[Head], type[HeadDrafter]] = {RecurrentHead: FeatureDrafter, AttentionHead: AttentionDrafter}


class Entry(NamedTuple):
    """What is timed: a drafter, None for plain decoding, and its gamma."""

    name: str
    drafter: Drafter | None
    gamma: int


def pair_of(target: str) -> Pair:
    """The pair with the "shipped" or the "larger" target."""
    return load_pair(target=LARGER if target == "larger" else TRAINED_PAIR / "target")


def entries(pair: Pair, heads: Mapping[str, str], sampling: Sampling, compiled: bool) -> list[Entry]:
    """Plain decoding, and every drafter that is timed."""
    models = {"draft model": pair.draft, "distilled draft model": load_model(TRAINED_PAIR / "draft-distilled")}
    drafters: dict[str, Drafter] = {
        name: ModelDrafter(model, sampling, compile=compiled) for name, model in models.items()
    }
    for name, folder in heads.items():
        head: Any = load_head(TRAINED_PAIR / folder)
        pack(head)
        drafters[name] = DRAFTERS[type(head)](pair.target, head, sampling, compile=compiled)
    return [Entry(NONE, None, 0), *[Entry(name, drafter, GAMMA) for name, drafter in drafters.items()]]


def items(**_: Any) -> list[str]:
    """Without compilation at both temperatures; with it, which takes minutes for each drafter, at temperature 1."""
    return [f"{target}-{how}" for target in HEADS for how in ("eager-1", "eager-0", "compiled-1")]


def measure(item: str, prompts: int, prompt_tokens: int, new_tokens: int) -> pd.DataFrame:
    """The lines of one item."""
    target, how, temperature = item.split("-")
    pair, sampling = pair_of(target), Sampling(temperature=float(temperature))
    chosen = entries(pair, HEADS[target], sampling, how == "compiled")
    found = []
    for kind in PROMPTS["trained"]:
        given = prompts_of(pair, kind, prompts, prompt_tokens)
        lines = compared(pair, chosen, given, sampling, how == "compiled", new_tokens)
        found.append(lines.assign(prompts=kind, temperature=float(temperature), compiled=how == "compiled"))
    forget_compiled()
    return pd.concat(found).assign(target=target, sequences=prompts, machine=machine(), threads=torch.get_num_threads())


def compared(
    pair: Pair, chosen: list[Entry], prompts: list[list[int]], sampling: Sampling, compiled: bool, new_tokens: int
) -> pd.DataFrame:
    """One line for each of `chosen`; the first is plain decoding."""

    def run(entry: Entry, row: int) -> tuple[float, int]:
        began = time.perf_counter()
        made = generate(
            pair.target, prompts[row : row + 1], entry.drafter, gamma=entry.gamma, max_new_tokens=new_tokens,
            sampling=sampling, compile=compiled, progress=False, study=Study(rows=[row]),
        )  # fmt: skip
        return time.perf_counter() - began, int(made.record.target_passes.sum())

    for entry in chosen:
        run(entry, 0)
    order = np.random.default_rng(0)
    rounds = [run_round([partial(run, entry, row) for entry in chosen], order) for row in range(len(prompts))]
    seconds, passes = np.moveaxis(np.array(rounds), -1, 0)
    lines = []
    for at, entry in enumerate(chosen):
        tokens = ratio_of_sums(np.full(len(prompts), float(new_tokens)), passes[:, at])
        speed_up = ratio_of_sums(seconds[:, 0], seconds[:, at])
        lines.append({"drafter": entry.name, "gamma": entry.gamma, "ms": 1e3 * seconds[:, at].mean() / new_tokens})
        lines[-1] |= columns("tokens_per_step", tokens) | columns("speed_up", speed_up)
    return pd.DataFrame(lines)


def gather(parts: pd.DataFrame) -> pd.DataFrame:
    """The table: all items."""
    return parts
