"""What an audit costs: its time in teacher-forced runs of the target over the same texts, taken in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch

from specnb.audit.api import audit
from specnb.audit.numerics import measure_numerics
from specnb.audit.teacher_forcing import Completion, teacher_forced_pass
from specnb.measure.statistics import ratio_of_medians
from specnb.measure.timing import Clock, Job, device_clock, time_rounds
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
    teacher_forced_pass(pair.target, completions[:1])  # what a first run does once
    rounds = [[Job(run) for run in jobs.values()]] * repetitions
    seconds = time_rounds(rounds, _clock(pair.target.device), np.random.default_rng(seed), warm_up=0)
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


def _clock(device: torch.device) -> Clock:
    return time.process_time if device.type == "cpu" else device_clock(device)
