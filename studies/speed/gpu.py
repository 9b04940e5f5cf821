"""Plain and speculative decoding on a GPU, for the day that one is lent: `python -m studies gpu`. Not measured yet.

One line of `data/results/gpu.csv` for each pair, number of rows, way of decoding (eager, compiled, or a CUDA graph) and
gamma, in bfloat16: milliseconds of a step, tokens per step, and `speed_up` over plain decoding in the same way, with a
95% interval over prompts; for one row also transformers' own assisted generation. Random pairs have published sizes of
the target and a draft model of a hundredth, with alpha = `ALPHA`. With `--small` it runs on a CPU with tiny shapes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from specnb.decoding.generate import forget_compiled
from specnb.measure.speed import measure_speeds
from specnb.measure.statistics import ratio_of_medians
from specnb.models.loading import Pair, load_pair
from specnb.models.shapes import Shape
from studies.speed.bench_against_transformers import specnb_generate, time_generators, transformers_generate
from studies.speed.pairs import prompts_of
from studies.speed.shapes import DRAFT, HUNDREDTH, PUBLISHED
from studies.speed.synthetic import synthetic_pair
from studies.study import Study, columns, conditions

ALPHA = 0.75
GAMMAS = (0, 2, 4, 7)
WAYS: tuple[bool | str, ...] = (False, True, "graph")
DRAFTS = {"gpt-like-97m": DRAFT} | HUNDREDTH
TINY = Shape(2, 64, 96, 4), Shape(1, 32, 64, 2)


def pair_of(name: str, device: str, dtype: torch.dtype) -> Pair:
    """The shipped pair, a random pair with a target of published size, or a tiny one."""
    if name == "trained":
        return load_pair(device=device, dtype=dtype, packed=False)
    target, draft = TINY if name == "tiny" else (PUBLISHED[name].shape, DRAFTS[name])
    vocab = 256 if name == "tiny" else PUBLISHED[name].vocab
    return synthetic_pair(ALPHA, target, draft, vocab=vocab, device=device, dtype=dtype, packed=False)


def measure(item: str, repetitions: int, new_tokens: int, batches: tuple[int, ...], ways: Any = WAYS) -> Iterator[Any]:
    """The lines of one pair. Raises `ValueError` without a GPU, but for the tiny pair."""
    if item != "tiny" and not torch.cuda.is_available():
        raise ValueError("torch finds no CUDA device; `python -m studies gpu --small` tries the code on a CPU")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pair = pair_of(item, device, torch.bfloat16 if device == "cuda" else torch.float32)
    prompts = prompts_of(pair, "held-out" if item == "trained" else "random", repetitions)
    for way in ways:
        for batch in batches:
            speeds = measure_speeds(pair, prompts, GAMMAS, max_new_tokens=new_tokens, rows=batch, compile=way)
            for at, gamma in enumerate(GAMMAS):
                step = speeds.seconds[:, at].sum(axis=-1) * speeds.tokens_per_step[:, at] * batch
                label = {"pair": item, "rows": batch, "sampler": "specnb", "gamma": gamma} | conditions(pair, way)
                counts = {"step_ms": 1e3 * float(np.median(step)), "tokens_per_step": speeds.tokens(gamma)}
                yield label | counts | columns("speed_up", speeds.improvement(gamma))
        forget_compiled()
    generators = {
        "plain": specnb_generate(pair, 0, new_tokens),
        "transformers": transformers_generate(pair.target, None, None, new_tokens),
        "transformers assisted": transformers_generate(pair.target, pair.draft, None, new_tokens),
    }
    seconds = time_generators(generators, prompts, pair.target.device)
    for sampler in list(generators)[1:]:
        speed = ratio_of_medians(seconds["plain"], seconds[sampler])
        yield {"pair": item, "rows": 1, "sampler": sampler} | conditions(pair) | columns("speed_up", speed)


STUDY = Study(
    measure,
    settings={"repetitions": 7, "new_tokens": 128, "batches": (1, 16, 128)},
    small={"repetitions": 3, "new_tokens": 8, "batches": (1, 2), "ways": (False,)},
    items=("trained", *DRAFTS),
    small_items=("tiny",),
)
