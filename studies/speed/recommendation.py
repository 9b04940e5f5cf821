"""The choice of `recommend_gamma` beside timed decoding, for notebook 12.

Plain decoding and gamma 1 to `largest` are timed in turn on prompts that the recommendation did not
see: held-out files of the corpus, and files of Python's standard library, which is not in the
corpus (the synthetic pair: random tokens). Both pairs are measured with weights as saved and with
the products of `compile="auto"`, chosen for this machine, which must do nothing else.
"""

from __future__ import annotations

import pandas as pd

from specnb.fast import Compile
from specnb.speedup import recommend_gamma
from specnb.statistics import Estimate
from studies.speed.pairs import PAIRS, PROMPTS, prompts_of
from studies.speed.speeds import measure_speeds
from studies.study import Study, columns, conditions

LAYOUTS: dict[str, Compile] = {"saved": False, "chosen": "auto"}


def measure(
    item: str, largest: int, advised_on: int, repetitions: int, prompt_tokens: int, new_tokens: int
) -> pd.DataFrame:
    """One line per gamma from 0: predicted and measured improvement over plain decoding.

    The first `advised_on` prompts are for the recommendation, the `repetitions` that follow are
    timed.
    """
    name, layout, kind = item.split("-", maxsplit=2)
    pair, compile = PAIRS[name](), LAYOUTS[layout]
    prompts = prompts_of(pair, kind, advised_on + repetitions, prompt_tokens)
    advice = recommend_gamma(
        pair, prompts[:advised_on], largest=largest, new_tokens=new_tokens,
        repetitions=max(repetitions, 3), compile=compile,
    )  # fmt: skip
    speeds = measure_speeds(pair, prompts[advised_on:], range(largest + 1), max_new_tokens=new_tokens, compile=compile)
    predicted = {0: Estimate(1.0, 1.0, 1.0, 0)} | advice.predicted
    return pd.DataFrame(
        {"pair": name, "layout": layout, "prompts": kind} | conditions(pair)
        | {"gamma": gamma, "recommended": gamma == advice.gamma}
        | columns("predicted", predicted[gamma]) | columns("measured", speeds.improvement(gamma))
        for gamma in predicted
    )  # fmt: skip


STUDY = Study(
    measure,
    settings={"largest": 6, "advised_on": 16, "repetitions": 11, "prompt_tokens": 32, "new_tokens": 64},
    small={"largest": 2, "advised_on": 8, "repetitions": 3, "prompt_tokens": 8, "new_tokens": 8},
    items=[f"{pair}-{layout}-{prompts}" for pair, kinds in PROMPTS.items() for layout in LAYOUTS for prompts in kinds],
    small_items=("trained-saved-stdlib",),
)
