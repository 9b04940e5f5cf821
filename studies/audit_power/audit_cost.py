"""What an audit costs in forward passes of its target, on the trained pair.

The table `data/results/audit_cost.csv` is that of `specnb_audit.cost.measure_audit_cost`, in float32, on completions of
the exact sampler.
"""

from __future__ import annotations

import pandas as pd
import torch

from specnb.decoding.generate import generate
from specnb.machine import machine
from specnb.models.loading import load_pair
from specnb.notebook import corpus
from specnb_audit.cost import measure_audit_cost
from specnb_audit.teacher_forcing import Completion
from studies.study import Study

FILES, PROMPT_TOKENS = 12, 24


def measure(item: str, completions: int, new_tokens: int, repetitions: int) -> pd.DataFrame:
    """One line per part of an audit."""
    pair = load_pair()
    starts = [pair.encode(text[:2000])[:PROMPT_TOKENS] for text in corpus.read("held-out", limit=FILES)]
    prompts = [starts[number % len(starts)] for number in range(completions)]
    made = generate(pair.target, prompts, max_new_tokens=new_tokens, seed=11, batch_size=min(64, completions))
    given = [Completion(prompt, tokens) for prompt, tokens in zip(prompts, made.tokens, strict=True)]
    costs = measure_audit_cost(pair, given, repetitions)
    return costs.assign(dtype="float32", machine=machine(), threads=torch.get_num_threads())


STUDY = Study(
    measure,
    settings={"completions": 48, "new_tokens": 160, "repetitions": 5},
    small={"completions": 4, "new_tokens": 8, "repetitions": 3},
)
