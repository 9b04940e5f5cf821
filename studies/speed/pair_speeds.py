"""How fast is the trained pair with each of its drafters? `make experiments ONLY=pair_speeds`.

Whole calls of `generate`, the pass over the prompt included, one prompt at a time in float32 at temperatures 1 and 0
(compiled: at 1), with weights in the layout that is fastest on the machine. Plain decoding of the same target with the
same compilation, and every drafter, take turns in one run, in a new random order for each prompt. Targets: the shipped
one and the larger one. Prompts: the beginnings of held-out files of the corpus, and of modules of Python's standard
library, which is not in the corpus. One line of `data/results/pair_speeds.csv` for each of these:

- `gamma`: draft tokens per step. Without compilation the fastest of `GAMMAS` on other prompts of the same kind, timed
  in the same way before; compiled, where every gamma of every drafter takes a minute to compile, 4
- `ms`: milliseconds per token, over all prompts
- `tokens_per_step`, with a 95% interval over prompts
- `speed_up`: the time of plain decoding with the same compilation, for all prompts, over this one's, with a 95%
  interval over prompts. Across compilations compare `ms`

Each call is timed once; the interval is over what is decoded, and says nothing about other machines. Nothing is chosen
on the prompts that are timed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from specnb.decoding.generate import Study, forget_compiled, generate
from specnb.distributions import Sampling
from specnb.drafting.base import Drafter
from specnb.drafting.heads import (
    AttentionDrafter,
    AttentionHead,
    FeatureDrafter,
    Head,
    HeadDrafter,
    RecurrentHead,
    load_head,
)
from specnb.drafting.model import ModelDrafter
from specnb.measure.statistics import ratio_of_sums
from specnb.measure.timing import machine, run_round
from specnb.models.loading import TRAINED_PAIR, Pair, load_model, load_pair
from specnb.models.packing import pack
from studies.speed.bench.tables import columns
from studies.speed.recommendation import PROMPTS, prompts_of
from studies.training.larger_target import LARGER

TABLE = "pair_speeds"
SETTINGS: dict[str, Any] = {"prompts": 32, "chosen_on": 12, "prompt_tokens": 32, "new_tokens": 64}
SMOKE: dict[str, Any] = {"prompts": 8, "chosen_on": 1, "prompt_tokens": 8, "new_tokens": 8}
NONE, GAMMA = "none", 4
GAMMAS = (3, 4, 5, 6, 8)
HEADS = {
    "shipped": {"recurrent head": "draft-recurrent", "attention head": "draft-attention"},
    "larger": {"attention head": "draft-attention-larger"},
}
"""The folders of the heads that each target has, by what they are called in the table."""
Array = NDArray[np.float64]
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


def measure(item: str, prompts: int, chosen_on: int, prompt_tokens: int, new_tokens: int) -> pd.DataFrame:
    """The lines of one item; the last `chosen_on` prompts of a kind are for the choice of gamma."""
    target, how, temperature = item.split("-")
    pair, sampling, compiled = pair_of(target), Sampling(temperature=float(temperature)), how == "compiled"
    fixed = entries(pair, HEADS[target], sampling, compiled)
    found = []
    for kind in PROMPTS["trained"]:
        given = prompts_of(pair, kind, prompts + chosen_on, prompt_tokens)
        calls = Calls(pair, sampling, compiled, new_tokens)
        chosen = fixed if compiled else [calls.with_gamma(entry, given[prompts:]) for entry in fixed]
        lines = calls.compared(chosen, given[:prompts])
        found.append(lines.assign(prompts=kind, temperature=float(temperature), compiled=compiled))
    forget_compiled()
    return pd.concat(found).assign(target=target, sequences=prompts, machine=machine(), threads=torch.get_num_threads())


class Calls(NamedTuple):
    """Timed calls of `generate`, one prompt at a time, that differ only in the drafter and its gamma."""

    pair: Pair
    sampling: Sampling
    compiled: bool
    new_tokens: int

    def once(self, entry: Entry, prompt: list[int], row: int) -> tuple[float, int]:
        """Seconds and target forward passes of one call; `row` numbers its random numbers."""
        began = time.perf_counter()
        made = generate(
            self.pair.target, [prompt], entry.drafter, gamma=entry.gamma, max_new_tokens=self.new_tokens,
            sampling=self.sampling, compile=self.compiled, progress=False, study=Study(rows=[row]),
        )  # fmt: skip
        return time.perf_counter() - began, int(made.record.target_passes.sum())

    def timed(self, chosen: list[Entry], prompts: list[list[int]]) -> tuple[Array, Array]:
        """Seconds and passes `(prompts, chosen)`; all of `chosen` take turns, after one call each that is not timed."""
        for entry in chosen:
            self.once(entry, prompts[0], 0)
        order = np.random.default_rng(0)
        rounds = [
            run_round([partial(self.once, entry, prompt, row) for entry in chosen], order)
            for row, prompt in enumerate(prompts)
        ]
        seconds, passes = np.moveaxis(np.array(rounds), -1, 0)
        return seconds, passes

    def with_gamma(self, entry: Entry, prompts: list[list[int]]) -> Entry:
        """`entry` with the fastest of `GAMMAS` on `prompts`; plain decoding as it is."""
        if entry.drafter is None:
            return entry
        seconds, _ = self.timed([entry._replace(gamma=gamma) for gamma in GAMMAS], prompts)
        return entry._replace(gamma=GAMMAS[int(seconds.sum(axis=0).argmin())])

    def compared(self, chosen: list[Entry], prompts: list[list[int]]) -> pd.DataFrame:
        """One line for each of `chosen`; the first is plain decoding."""
        seconds, passes = self.timed(chosen, prompts)
        lines = []
        for at, entry in enumerate(chosen):
            tokens = ratio_of_sums(np.full(len(prompts), float(self.new_tokens)), passes[:, at])
            ms = 1e3 * seconds[:, at].mean() / self.new_tokens
            lines.append({"drafter": entry.name, "gamma": entry.gamma, "ms": ms})
            lines[-1] |= columns("tokens_per_step", tokens)
            lines[-1] |= columns("speed_up", ratio_of_sums(seconds[:, 0], seconds[:, at]))
        return pd.DataFrame(lines)


def gather(parts: pd.DataFrame) -> pd.DataFrame:
    """The table: all items."""
    return parts
