"""How fast is the trained pair with each of its drafters?

Whole calls of `generate`, the pass over the prompt included, one prompt at a time in float32 at
temperatures 1 and 0 (compiled: at 1), with weights in the layout that is fastest on the machine.
Plain decoding with the same compilation, and every drafter, take turns in one run, in a new random
order for each prompt. Prompts: the beginnings of held-out files of the corpus, and of modules of
Python's standard library, which is not in the corpus. The columns:

- `gamma`: draft tokens per step. Without compilation the fastest of `GAMMAS` on other prompts of
  the same kind, timed in the same way before; compiled, where every gamma of every drafter takes a
  minute to compile, 4
- `ms`: milliseconds per token, over all prompts
- `tokens_per_step`, with a 95% interval over prompts
- `speed_up`: the time of plain decoding with the same compilation, for all prompts, over this
  one's, with a 95% interval over prompts. Across compilations compare `ms`

Each call is timed once; the interval is over what is decoded, and says nothing about other
machines. Nothing is chosen on the prompts that are timed.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from specnb.distributions import Sampling
from specnb.drafters import Drafter, ModelDrafter
from specnb.fast import pack
from specnb.heads import AttentionDrafter, load_head
from specnb.loading import TRAINED_PAIR, Pair, load_model, load_pair
from specnb.sampler import Hooks, forget_compiled, generate
from specnb.statistics import machine, over_rows, ratio_of_sums
from studies import study
from studies.drafters.heads import FeatureDrafter
from studies.speed.pairs import PROMPTS, packed, prompts_of
from studies.study import columns, timed_in_turn

NONE, GAMMA = "none", 4
GAMMAS = (3, 4, 5, 6, 8)
HEADS: dict[str, Any] = {"recurrent": FeatureDrafter, "attention": AttentionDrafter}


class Entry(NamedTuple):
    """What is timed: a drafter, None for plain decoding, and its gamma."""

    name: str
    drafter: Drafter | None
    gamma: int


def entries(pair: Pair, sampling: Sampling, compiled: bool) -> list[Entry]:
    """Plain decoding, and every drafter that is timed."""
    models = {"draft model": pair.draft, "distilled draft model": pack(load_model(TRAINED_PAIR / "draft-distilled"))}
    drafters: dict[str, Drafter] = {
        name: ModelDrafter(model, sampling, compile=compiled) for name, model in models.items()
    }
    for name, drafter in HEADS.items():
        head: Any = load_head(TRAINED_PAIR / f"draft-{name}")
        pack(head)
        drafters[f"{name} head"] = drafter(pair.target, head, sampling, compile=compiled)
    return [Entry(NONE, None, 0), *[Entry(name, drafter, GAMMA) for name, drafter in drafters.items()]]


class Calls(NamedTuple):
    """Timed calls of `generate`, one prompt at a time, that differ only in the drafter and its
    gamma.

    A call makes `new_tokens` tokens, or fewer where `eos` ends them.
    """

    target: Any
    sampling: Sampling
    new_tokens: int
    compiled: bool = False
    eos: int | None = None
    hooks: Hooks = Hooks()

    def made(self, entry: Entry, prompt: list[int], row: int) -> tuple[list[int], int]:
        """The tokens of one call, and its target forward passes; `row` numbers its random
        numbers."""
        found = generate(
            self.target, [prompt], entry.drafter, gamma=entry.gamma, max_new_tokens=self.new_tokens,
            sampling=self.sampling, eos=self.eos, compile=self.compiled, progress=False,
            hooks=replace(self.hooks, rows=[row]),
        )  # fmt: skip
        return found.tokens[0], int(found.record.target_passes.sum())

    def timed(self, chosen: list[Entry], prompts: list[list[int]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of whole calls `(prompts, chosen)`; tokens and target passes of each
        `(2, prompts, chosen)`."""
        counts = np.zeros((2, len(prompts), len(chosen)))

        def call(at: int, prompt: list[int], row: int) -> None:
            tokens, passes = self.made(chosen[at], prompt, row)
            counts[:, row, at] = len(tokens), passes

        return timed_in_turn(call, range(len(chosen)), prompts), counts

    def with_gamma(self, entry: Entry, prompts: list[list[int]], gammas: tuple[int, ...] = GAMMAS) -> Entry:
        """`entry` with the fastest of `gammas` on `prompts`; plain decoding as it is."""
        if entry.drafter is None:
            return entry
        seconds, (tokens, _) = self.timed([entry._replace(gamma=gamma) for gamma in gammas], prompts)
        return entry._replace(gamma=gammas[int((seconds.sum(axis=0) / tokens.sum(axis=0)).argmin())])

    def compared(self, chosen: list[Entry], prompts: list[list[int]]) -> pd.DataFrame:
        """One line for each of `chosen`; the first is plain decoding."""
        seconds, (tokens, passes) = self.timed(chosen, prompts)

        def speed_up(at: int, rows: NDArray[np.int64]) -> float:
            plain, own = (seconds[rows, one].sum() / tokens[rows, one].sum() for one in (0, at))
            return float(plain / own)

        return pd.DataFrame(
            {"drafter": entry.name, "gamma": entry.gamma, "ms": 1e3 * seconds[:, at].sum() / tokens[:, at].sum()}
            | columns("tokens_per_step", ratio_of_sums(tokens[:, at], passes[:, at]))
            | columns("speed_up", over_rows(partial(speed_up, at), len(prompts)))
            for at, entry in enumerate(chosen)
        )  # fmt: skip


def measure(item: str, prompts: int, chosen_on: int, prompt_tokens: int, new_tokens: int) -> pd.DataFrame:
    """The lines of one item; the last `chosen_on` prompts of a kind are for the choice of gamma."""
    how, temperature = item.split("-")
    pair, sampling, compiled = packed(load_pair()), Sampling(temperature=float(temperature)), how == "compiled"
    calls, fixed = Calls(pair.target, sampling, new_tokens, compiled), entries(pair, sampling, compiled)
    found = []
    for kind in PROMPTS["trained"]:
        given = prompts_of(pair, kind, prompts + chosen_on, prompt_tokens)
        chosen = fixed if compiled else [calls.with_gamma(entry, given[prompts:]) for entry in fixed]
        lines = calls.compared(chosen, given[:prompts])
        found.append(lines.assign(prompts=kind, temperature=float(temperature), compiled=compiled))
    forget_compiled()
    under = {"target": "shipped", "sequences": prompts, "machine": machine(), "threads": torch.get_num_threads()}
    return pd.concat(found).assign(**under)


STUDY = study.Study(
    measure,
    settings={"prompts": 32, "chosen_on": 12, "prompt_tokens": 32, "new_tokens": 64},
    small={"prompts": 8, "chosen_on": 1, "prompt_tokens": 8, "new_tokens": 8},
    items=("eager-1", "eager-0", "compiled-1"),
    small_items=("eager-1",),
)
