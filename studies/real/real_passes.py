"""How long does a pass of the real model take over more than one token, and what do weights of 4 bits gain?

One line for each number `n` of new tokens after `CONTEXT` others, packed as a sampler has the model by default, timed
in turn: the median `ms`, `v`, that over the time of one token, and `gain`, the time with `bits` 16 over this one's,
with 95% intervals over repetitions. The layers' weights come from a file with 4 bits, and are read so in passes over up
to `specnb.fast.FEW_ROWS` tokens; with `bits` 16 they are changed a little, so that they need all bits of their dtype.
`tv` is how far the probabilities are from those in float32, in total variation: the mean over the tokens of a prompt of
each kind, which are read one at a time.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel

from specnb.cost import CostMeter
from specnb.fast import PrivateModel
from specnb.loading import Pair
from specnb.statistics import ratio_of_medians
from studies.real.smollm2 import model_and_tokenizer, prompts_of
from studies.real.workloads import CONTEXT, KINDS
from studies.study import Study, columns

NOISE = 0.05  # of each weight


@torch.no_grad()
def distance(target: PreTrainedModel, prompts: list[list[int]]) -> float:
    """The mean total variation between the probabilities of a packed model and those of the same in float32."""
    exact, packed, found = copy.deepcopy(target).float(), PrivateModel(target, "auto").modules, list[Tensor]()
    for prompt in prompts:
        cache, tokens = DynamicCache(), torch.tensor([prompt])
        read = [packed(one[None], past_key_values=cache).logits[0] for one in tokens.T]
        found.append((torch.cat(read).float().softmax(-1) - exact(tokens).logits[0].softmax(-1)).abs().sum(dim=-1) / 2)
    return torch.cat(found).mean().item()


def measure(
    item: str, lengths: tuple[int, ...], repetitions: int, tokens: int, dtype: str, threads: int
) -> Iterator[dict[str, Any]]:
    """The passes; `item` has no meaning."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    meters, tv = {}, {}
    for bits in (4, 16):
        target, tokenizer = model_and_tokenizer(dtype)
        if bits == 16:
            target = copy.deepcopy(target)
            for layer in target.modules():
                if isinstance(layer, nn.Linear):
                    layer.weight.data *= 1 + NOISE * torch.randn_like(layer.weight)
        pair = Pair(target, target, tokenizer)  # nothing is drafted
        meters[bits] = CostMeter(pair, CONTEXT, lengths, compile="auto")
        tv[bits] = distance(target, [prompts_of(tokenizer, kind, 1)[0][:tokens] for kind in KINDS])
    for _ in tqdm(range(repetitions), desc="timing passes", delay=3, leave=False):
        for meter in meters.values():
            meter.round()
    timed = {bits: meter.costs().target.T for bits, meter in meters.items()}
    for bits, of_lengths in timed.items():
        for n, seconds, usual in zip(lengths, of_lengths, timed[16], strict=True):
            v, gain = ratio_of_medians(seconds, of_lengths[0]), ratio_of_medians(usual, seconds)
            line = {"bits": bits, "n": n, "ms": 1e3 * np.median(seconds)} | columns("v", v) | columns("gain", gain)
            yield line | {"tv": tv[bits]}


STUDY = Study(
    measure,
    settings={
        "lengths": (1, 2, 3, 4, 5, 7, 11, 17),
        "repetitions": 30,
        "tokens": 100,
        "dtype": "bfloat16",
        "threads": 2,
    },
    small={"lengths": (1, 3), "repetitions": 3, "tokens": 4, "dtype": "bfloat16", "threads": 1},
    items=("all",),
)
