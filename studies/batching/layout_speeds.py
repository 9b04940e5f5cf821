"""The three cache layouts of a batch by the clock.

The trained pair generates a batch in float32. Then each layout repeats its steps: one forward pass of the target over
gamma + 1 tokens, and the crop of rejected ones. The layouts take turns, in a new random order in each step. The table
`data/results/layout_speeds.csv` has a line for each layout, number of rows and kind of prompts (`equal`: of one length;
`varied`: of lengths far apart):

- `ms`, `low`, `high`: milliseconds of a pass and a crop, the median over steps and its quartiles
- `steps`: the steps measured, in which no row has ended
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specnb.decoding.generate import generate
from specnb.decoding.record import StepRecord
from specnb.measure.timing import Job, device_clock, machine, time_round
from specnb.models.loading import load_pair
from studies import corpus
from studies.batching.batch_layouts import LAYOUTS, Layout, Rows, Sequences
from studies.study import Study

GAMMA, SEED = 4, 10
LENGTHS = {"equal": (48, 48), "varied": (4, 92)}  # tokens of the shortest and of the longest prompt


def steps_of(
    layout: Layout, model: PreTrainedModel, prompts: Sequences, record: StepRecord, new_tokens: int
) -> Iterator[Callable[[], None]]:
    """Of each step of `record` in which no row has ended, `model`'s forward pass and the crop, as a function.

    `record` is of a generation of `new_tokens` tokens after `prompts` and perhaps more prompts behind them.
    """
    newest = torch.tensor([prompt[-1:] for prompt in prompts], device=model.device)
    most = max(map(len, prompts)) + new_tokens + record.gamma
    rows = layout(model, [prompt[:-1] for prompt in prompts], most)
    for step in range(int(record.active.all(axis=0).sum())):
        draft_tokens, token, emitted = (
            torch.from_numpy(own[: len(prompts), step]).to(model.device)
            for own in (record.draft_tokens, record.token, record.emitted)
        )
        yield partial(_pass_and_crop, rows, torch.cat([newest, draft_tokens], dim=1), record.gamma + 1 - emitted)
        newest = token[:, None]


def _pass_and_crop(rows: Rows, tokens: Tensor, counts: Tensor) -> None:
    rows.run(tokens)
    rows.crop(counts)


@torch.inference_mode()
def measure(item: str, largest: int, new_tokens: int) -> pd.DataFrame:
    """The lines of one kind of prompts: batches of 1, 2, 4, ... up to `largest` rows."""
    pair, order = load_pair(), np.random.default_rng(SEED)
    shortest, longest = LENGTHS[item]
    texts = [text for text in map(pair.encode, corpus.read("held-out")) if len(text) >= longest][:largest]
    lengths = order.permutation(np.linspace(shortest, longest, len(texts)).astype(int))
    prompts = [text[:length] for text, length in zip(texts, lengths, strict=True)]
    record = generate(
        pair.target, prompts, pair.draft, gamma=GAMMA, max_new_tokens=new_tokens, seed=SEED, progress=False
    ).record
    lines: list[dict[str, Any]] = []
    for size in (2**k for k in range(largest.bit_length())):
        asked = pair.target, prompts[:size], record, new_tokens
        steps = zip(*(steps_of(layout, *asked) for layout in LAYOUTS.values()), strict=True)
        clock = device_clock(pair.target.device)
        seconds = np.stack([time_round([Job(once) for once in step], clock, order) for step in steps])[1:]  # warmed up
        quartiles = 1e3 * np.quantile(seconds, (0.25, 0.5, 0.75), axis=0)
        for layout, (low, middle, high) in zip(LAYOUTS, quartiles.T, strict=True):
            lines.append({"prompts": item, "rows": size, "layout": layout, "steps": len(seconds)})
            lines[-1] |= {"ms": middle, "low": low, "high": high, "dtype": "float32"}
            lines[-1] |= {"machine": machine(), "threads": torch.get_num_threads()}
    return pd.DataFrame(lines)


STUDY = Study(
    measure, settings={"largest": 16, "new_tokens": 64}, small={"largest": 2, "new_tokens": 8}, items=tuple(LENGTHS)
)
