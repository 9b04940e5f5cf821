"""How fast is the trained pair with each of its drafters?

Whole calls of `Sampler.generate`, the pass over the prompt included, one prompt at a time in float32 at temperatures
1 and 0 (compiled: at 1), with the check on and `compile="auto"`, in item "compiled" `compile=True`. Prompts: the
beginnings of held-out files of the corpus, and of modules of Python's standard library, which is not in the corpus.
The columns are those of `studies.speed.calls`, and `gamma`: without compilation the fastest of `GAMMAS` on other
prompts of the same kind, compiled, where every gamma has to be compiled, 4.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import torch

from specnb.cache import slots_for
from specnb.distributions import Sampling
from specnb.drafters import Drafter, ModelDrafter
from specnb.fast import Compile
from specnb.loading import TRAINED_PAIR, Pair, load_model, load_pair
from specnb.released import load_drafter
from specnb.sampler import Sampler
from specnb.statistics import machine
from studies.drafters.heads import FeatureDrafter, load_head
from studies.speed.calls import compared, fastest, way_of
from studies.speed.pairs import PROMPTS, prompts_of
from studies.study import Study

NONE, GAMMA, GAMMAS = "none", 4, (3, 4, 5, 6, 8)


def drafters_of(pair: Pair, sampling: Sampling, compile: Compile) -> dict[str, Drafter | None]:
    """Plain decoding, and every drafter that is timed. The layers of a head are not compiled."""
    models = {"draft model": pair.draft, "distilled draft model": load_model(TRAINED_PAIR / "draft-distilled")}
    drafters: dict[str, Any] = {NONE: None}
    drafters |= {name: ModelDrafter(model, sampling, compile=compile) for name, model in models.items()}
    pack: Compile = "auto" if compile else False
    recurrent = load_head(TRAINED_PAIR / "draft-recurrent")
    drafters["recurrent head"] = FeatureDrafter(pair.target, recurrent, sampling, compile=pack)
    for name, folder in {"EAGLE-3 head": "draft-eagle3", "next-token layer": "draft-next-token"}.items():
        drafters[name] = load_drafter(pair.target, TRAINED_PAIR / folder, sampling, compile=pack)
    return drafters


def measure(item: str, prompts: int, chosen_on: int, prompt_tokens: int, new_tokens: int) -> pd.DataFrame:
    """The lines of one item; the last `chosen_on` prompts of a kind are for the choice of gamma."""
    how, temperature = item.split("-")
    pair, sampling, compiled = load_pair(), Sampling(temperature=float(temperature)), how == "compiled"
    compile: Compile = True if compiled else "auto"
    found = []
    for kind in PROMPTS["trained"]:
        given = prompts_of(pair, kind, prompts + chosen_on, prompt_tokens)
        slots = slots_for(max(map(len, given)), new_tokens, max(GAMMAS))
        sampler = partial(Sampler, pair.target, sampling=sampling, compile=compile, slots=slots, progress=False)
        chosen, ways = {}, {}
        for name, drafter in drafters_of(pair, sampling, compile).items():
            gammas = (0,) if drafter is None else (GAMMA,) if compiled else GAMMAS
            tried = {str(gamma): way_of(sampler(drafter, gamma=gamma), new_tokens) for gamma in gammas}
            best = fastest(tried, given[prompts:]) if len(tried) > 1 else str(gammas[0])
            chosen[name], ways[name] = int(best), tried[best]
        table = compared(ways, given[:prompts])[0].rename(columns={"way": "drafter"})
        found.append(table.assign(gamma=list(chosen.values()), prompts=kind))
    under = {"temperature": float(temperature), "compiled": compiled, "target": "shipped", "sequences": prompts}
    return pd.concat(found).assign(**under, machine=machine(), threads=torch.get_num_threads())


STUDY = Study(
    measure,
    settings={"prompts": 32, "chosen_on": 12, "prompt_tokens": 32, "new_tokens": 64},
    small={"prompts": 8, "chosen_on": 1, "prompt_tokens": 8, "new_tokens": 8},
    items=("eager-1", "eager-0", "compiled-1"),
    small_items=("eager-1",),
)
