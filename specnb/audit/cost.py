"""What an audit costs: its time in teacher-forced runs of the target over the same texts, taken in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from specnb.audit.api import audit
from specnb.audit.numerics import measure_numerics
from specnb.audit.teacher_forcing import Completion, teacher_forced_pass
from specnb.decoding.timing import now
from specnb.measure.statistics import ratio_of_medians
from specnb.models.loading import Pair


@torch.inference_mode()
def measure_audit_cost(
    pair: Pair, completions: Sequence[Completion], repetitions: int = 5, seed: int = 0
) -> pd.DataFrame:
    """One line each for the target's run over `texts`, its comparison with itself, which costs the same however
    many texts there are, and the whole audit without and with the draft: milliseconds per token, medians over
    `repetitions`, each in an order of its own, and time in target runs with a 95% interval. On a CPU the time is
    the processor's, on which neighbours weigh less than on the wall clock.

    Raises `ValueError` for fewer than 3 repetitions.
    """
    tokens, prompts = [text.tokens for text in completions], [text.prompt for text in completions]
    whole = partial(audit, pair.target, tokens, prompts=prompts, progress=False)
    jobs: dict[str, Callable[[], object]] = {
        "the target's run": partial(teacher_forced_pass, pair.target, completions),
        "of the audit: the target against itself": partial(measure_numerics, pair.target, completions),
        "the audit": whole,
        "the audit, aimed by the draft": partial(whole, draft=pair.draft),
    }
    order, device = np.random.default_rng(seed), pair.target.device
    seconds = np.empty((repetitions, len(jobs)))
    teacher_forced_pass(pair.target, completions[:1])  # what a first run does once
    for repetition in tqdm(range(repetitions), desc="audits against the clock", delay=3, leave=False):
        for job in order.permutation(len(jobs)):
            begun = _clock(device)
            list(jobs.values())[job]()
            seconds[repetition, job] = _clock(device) - begun
    count = sum(map(len, tokens))
    ratios = [ratio_of_medians(column, seconds[:, 0]) for column in seconds.T]
    return pd.DataFrame(
        {
            "time of": list(jobs),
            "tokens": count,
            "ms per token": 1e3 * np.median(seconds, axis=0) / count,
            "in target runs": [ratio.value for ratio in ratios],
            "low": [ratio.low for ratio in ratios],
            "high": [ratio.high for ratio in ratios],
            "repetitions": repetitions,
        }
    )


def _clock(device: torch.device) -> float:
    return time.process_time() if device.type == "cpu" else now(device)
