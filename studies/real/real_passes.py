"""How long does a pass of the real model take over more than one token, and what do weights of 4 bits gain?

One line for each number `n` of new tokens after `CONTEXT` others, packed as a sampler has the model by default, timed
in turn: the median `ms`, `v`, that over the time of one token, and `gain`, the time with `bits` 16 over this one's,
with 95% intervals over repetitions. The layers' weights come from a file with 4 bits, and are read so in passes over up
to `specnb.fast.FEW_ROWS` tokens; with `bits` 16 they are changed a little, so that they need all bits of their dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from specnb.cost import CostMeter
from specnb.loading import Pair
from specnb.statistics import ratio_of_medians
from studies.real.smollm2 import model_and_tokenizer
from studies.real.workloads import CONTEXT
from studies.study import Study, columns

NOISE = 0.05  # of each weight


def measure(
    item: str, lengths: tuple[int, ...], repetitions: int, dtype: str, threads: int
) -> Iterator[dict[str, Any]]:
    """The passes; `item` has no meaning."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    meters = {}
    for bits in (4, 16):
        target, tokenizer = model_and_tokenizer(dtype)
        for layer in target.modules():
            if bits == 16 and isinstance(layer, nn.Linear):
                layer.weight.data *= 1 + NOISE * torch.randn_like(layer.weight)
        pair = Pair(target, target, tokenizer)  # nothing is drafted
        meters[bits] = CostMeter(pair, CONTEXT, lengths, compile="auto")
    for _ in tqdm(range(repetitions), desc="timing passes", delay=3, leave=False):
        for meter in meters.values():
            meter.round()
    timed = {bits: meter.costs().target.T for bits, meter in meters.items()}
    for bits, of_lengths in timed.items():
        for n, seconds, usual in zip(lengths, of_lengths, timed[16], strict=True):
            v, gain = ratio_of_medians(seconds, of_lengths[0]), ratio_of_medians(usual, seconds)
            yield {"bits": bits, "n": n, "ms": 1e3 * np.median(seconds)} | columns("v", v) | columns("gain", gain)


STUDY = Study(
    measure,
    settings={"lengths": (1, 2, 3, 4, 5, 7, 11, 17), "repetitions": 30, "dtype": "bfloat16", "threads": 2},
    small={"lengths": (1, 3), "repetitions": 3, "dtype": "bfloat16", "threads": 1},
    items=("all",),
)
