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
from studies.speed.bench_against_transformers import specnb_generate, transformers_generate
from studies.speed.pairs import prompts_of
from studies.speed.synthetic import DRAFT, TARGET, synthetic_pair
from studies.study import Study, columns, conditions, timed_in_turn

ALPHA = 0.75
GAMMAS = (0, 2, 4, 7)
WAYS: tuple[bool | str, ...] = (False, True, "graph")
# Target, draft and vocabulary. A draft reads a hundredth of what its target reads per forward pass, the input embedding
# not counted: few wide layers rather than many narrow ones, because each layer takes a device a minimum of time.
SHAPES = {
    "gpt-like-97m": (TARGET, DRAFT, 8192),
    "llama-3.1-8b": (
        Shape(32, 4096, 14336, 32, gated=True, kv_heads=8), Shape(3, 512, 1792, 8, gated=True, kv_heads=2), 128256
    ),
    "llama-2-13b": (Shape(40, 5120, 13824, 40, gated=True), Shape(8, 1024, 2560, 8, gated=True), 32000),
    "tiny": (Shape(2, 64, 96, 4), Shape(1, 32, 64, 2), 256),
}  # fmt: skip


def pair_of(name: str, device: str, dtype: torch.dtype) -> Pair:
    """The shipped pair, or a random pair of these shapes."""
    if name == "trained":
        return load_pair(device=device, dtype=dtype, packed=False)
    target, draft, vocab = SHAPES[name]
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
    seconds = timed_in_turn(lambda run, prompt, _: run(prompt), [*generators.values()], prompts, device)
    for at, sampler in list(enumerate(generators))[1:]:
        speed = ratio_of_medians(seconds[:, 0], seconds[:, at])
        yield {"pair": item, "rows": 1, "sampler": sampler} | conditions(pair) | columns("speed_up", speed)


STUDY = Study(
    measure,
    settings={"repetitions": 7, "new_tokens": 128, "batches": (1, 16, 128)},
    small={"repetitions": 3, "new_tokens": 8, "batches": (1, 2), "ways": (False,)},
    items=("trained", *list(SHAPES)[:-1]),
    small_items=("tiny",),
)
