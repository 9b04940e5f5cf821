"""What an audit costs: its time relative to the target's forward passes over the same sequences, measured in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pandas as pd
import torch

from specnb.measure.statistics import ratio_of_medians
from specnb.measure.timing import Clock, Job, device_clock, time_rounds
from specnb.models.loading import Pair
from specnb_audit.api import audit
from specnb_audit.numerics import measure_numerics
from specnb_audit.teacher_forcing import Completion, teacher_forced_pass


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
    rounds = [[Job(run) for run in jobs.values()]] * repetitions
    seconds = time_rounds(rounds, _clock(pair.target.device), np.random.default_rng(seed), warm_up=0)
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
