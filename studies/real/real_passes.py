"""How long does a pass of the real model take over more than one token?

One line for each number `n` of new tokens after `CONTEXT` others, packed as a sampler has the model by default, timed
in turn: the median `ms`, and `v`, that over the time of one token, with a 95% interval over repetitions.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from specnb.cost import measure_costs
from specnb.loading import Pair
from specnb.statistics import ratio_of_medians
from studies.real.smollm2 import model_and_tokenizer
from studies.real.workloads import CONTEXT
from studies.study import Study, columns


def measure(item: str, lengths: tuple[int, ...], repetitions: int, dtype: str, threads: int) -> pd.DataFrame:
    """The passes; `item` has no meaning."""
    torch.set_num_threads(threads)
    target, tokenizer = model_and_tokenizer(dtype)
    pair = Pair(target, target, tokenizer)  # nothing is drafted
    timed = measure_costs(
        pair, context=CONTEXT, lengths=lengths, repetitions=repetitions, compile="auto", progress=False
    ).target
    return pd.DataFrame(
        {"n": n, "ms": 1e3 * np.median(seconds)} | columns("v", ratio_of_medians(seconds, timed[:, 0]))
        for n, seconds in zip(lengths, timed.T, strict=True)
    )


STUDY = Study(
    measure,
    settings={"lengths": (1, 2, 3, 4, 5, 7, 11, 17), "repetitions": 30, "dtype": "bfloat16", "threads": 2},
    small={"lengths": (1, 3), "repetitions": 3, "dtype": "bfloat16", "threads": 1},
    items=("all",),
)
