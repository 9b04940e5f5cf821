"""What an audit costs in forward passes of its target, on the trained pair.

The table `data/results/audit_cost.csv` is that of `measure_audit_cost`, in float32, on completions of the exact
sampler.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch

from specnb.decoding.generate import generate
from specnb.measure.statistics import ratio_of_medians
from specnb.measure.timing import Clock, Job, device_clock, machine, time_round
from specnb.models.loading import Pair, load_pair
from specnb_audit.api import audit
from specnb_audit.numerics import measure_numerics
from specnb_audit.teacher_forcing import Completion, teacher_forced_pass
from studies import corpus
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


@torch.inference_mode()
def measure_audit_cost(
    pair: Pair, completions: Sequence[Completion], repetitions: int = 5, seed: int = 0
) -> pd.DataFrame:
    """One line per job: milliseconds per token, and time in units of the target's forward passes.

    The jobs: the target's forward passes over `completions`; its comparison with itself (`measure_numerics`), whose
    cost does not depend on the number of completions; the whole audit without and with the draft. Medians over
    `repetitions`, each of which runs the jobs in a random order, with a 95% interval of the ratio. On a CPU this is
    processor time, which depends less on other processes than wall-clock time.

    Raises `ValueError` for fewer than 3 repetitions.
    """
    tokens, prompts = [one.tokens for one in completions], [one.prompt for one in completions]
    whole = partial(audit, pair.target, tokens, prompts=prompts, progress=False)
    jobs: dict[str, Callable[[], object]] = {
        "the target's run": partial(teacher_forced_pass, pair.target, completions),
        "of the audit: the target against itself": partial(measure_numerics, pair.target, completions),
        "the audit": whole,
        "the audit, aimed by the draft": partial(whole, draft=pair.draft),
    }
    teacher_forced_pass(pair.target, completions[:1])  # what a first run does once
    clock, order, every = _clock(pair.target.device), np.random.default_rng(seed), [Job(run) for run in jobs.values()]
    seconds = np.stack([time_round(every, clock, order) for _ in range(repetitions)])
    count = sum(map(len, tokens))
    ratios = [ratio_of_medians(column, seconds[:, 0]) for column in seconds.T]
    return pd.DataFrame(
        {
            "time of": list(jobs),
            "tokens": count,
            "ms per token": 1e3 * np.median(seconds, axis=0) / count,
            "in target passes": [ratio.value for ratio in ratios],
            "low": [ratio.low for ratio in ratios],
            "high": [ratio.high for ratio in ratios],
            "repetitions": repetitions,
        }
    )


def _clock(device: torch.device) -> Clock:
    return time.process_time if device.type == "cpu" else device_clock(device)


STUDY = Study(
    measure,
    settings={"completions": 48, "new_tokens": 160, "repetitions": 5},
    small={"completions": 4, "new_tokens": 8, "repetitions": 3},
)
