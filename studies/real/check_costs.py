"""What the check of a sampler costs, in seconds and in memory, beside the same sampler without it.

A line for each model in bfloat16, SmolLM2 and random weights of 1.2 billion parameters, which need 8 GB,
and each call of a sampler: the first, the second with prompts as long, and a later one with longer
prompts, for which a new batch is made. Every sampler runs in a process of its own, since memory is the largest that
a process had, less the largest until the model was loaded. Nothing is compiled. Figures are medians over `times`
processes that take turns with and without the check: `checked` and `unchecked` are seconds, or gigabytes where
`call` is "gb"; `ratio` is that of the medians of the seconds, with a 95% interval.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from specnb.sampler import Sampler
from specnb.statistics import ratio_of_medians
from specnb.step import GB
from studies import study
from studies.files import ROOT
from studies.real.smollm2 import model_and_tokenizer
from studies.speed.synthetic import Shape, empty_model

BILLION = Shape(22, 2048, 7168, 16)  # 1.2 billion parameters
CALLS = {"first": 200, "second": 200, "longer": 260}  # tokens of the prompts


def model_of(name: str) -> PreTrainedModel:
    if name == "smollm2":
        return model_and_tokenizer("bfloat16")[0]
    shape = BILLION if name == "billion" else Shape(2, 32, 64, 2)
    return empty_model(shape, vocab=32_000, context=2048, device="cpu", dtype=torch.bfloat16)


def once(name: str, check: bool, new_tokens: int, rows: int) -> dict[str, float]:
    """Seconds of each call, and gigabytes, in this process."""
    model, chosen = model_of(name), np.random.default_rng(0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sampler = Sampler(model, "auto", compile=False, check=check, progress=False, slots=max(CALLS.values()) + new_tokens)
    found: dict[str, float] = {}
    for call, length in CALLS.items():
        prompts = chosen.integers(10, 1000, (rows, length)).tolist()
        begun = perf_counter()
        sampler.generate(prompts, max_new_tokens=new_tokens)
        found[call] = perf_counter() - begun
    return found | {"gb": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / GB}


def measure(item: str, times: int, new_tokens: int, threads: int) -> Iterator[dict[str, Any]]:
    name, rows = item.split("-")
    made: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for _ in range(times):
        for check, results in made.items():
            asked = json.dumps([name, check, new_tokens, int(rows)])
            done = subprocess.run(
                [sys.executable, "-m", __name__, asked], cwd=ROOT, check=True, capture_output=True, text=True,
                env=os.environ | {"OMP_NUM_THREADS": str(threads)},
            )  # fmt: skip
            results.append(json.loads(done.stdout.splitlines()[-1]))
    for call in (*CALLS, "gb"):
        checked, alone = (np.array([one[call] for one in made[check]]) for check in (True, False))
        about = {"model": name, "rows": int(rows), "call": call, "prompt_tokens": CALLS.get(call, 0)}
        about |= {"new_tokens": new_tokens, "checked": np.median(checked), "unchecked": np.median(alone)}
        yield about | (study.columns("ratio", ratio_of_medians(checked, alone)) if call in CALLS else {})


STUDY = study.Study(
    measure,
    settings={"times": 3, "new_tokens": 32, "threads": 2},
    small={"times": 3, "new_tokens": 2, "threads": 2},
    items=("smollm2-1", "billion-1"),
)

if __name__ == "__main__":
    print(json.dumps(once(*json.loads(sys.argv[1]))))
