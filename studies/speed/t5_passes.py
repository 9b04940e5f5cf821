"""Forward passes of the trained T5 and of one of its drafts: what the trace in notebook 12 (Figure 5) is drawn from.

A line for each pass, of a model's encoder over an input, or of its decoder over `n` tokens after it. All are timed
in turn, in float32, by the processor's time, in which other programs do not count; `cost` is the time over that of
the target's decoder over one token, with a 95% interval over rounds. `steps` of a decoder's pass over n tokens: how
many of them a completion of `new_tokens` tokens takes at temperature 0, with n - 1 draft tokens.
"""

from __future__ import annotations

from functools import partial
from time import process_time

import numpy as np
import pandas as pd
import torch

from specnb.distributions import Sampling
from specnb.fast import PrivateModel
from specnb.loading import Pair
from specnb.statistics import Job, machine, ratio_of_medians
from studies.batching.encoder_decoder import EncoderDecoderDrafter, EncoderDecoderSampler
from studies.speed.encoder_decoder_speeds import DecoderMeter, load
from studies.study import Study, columns
from studies.training.encoder_decoder import TARGET, examples, shared_tokenizer


@torch.inference_mode()
def measure(item: str, gammas: tuple[int, ...], new_tokens: int, repetitions: int) -> pd.DataFrame:
    """The passes of the target and of the draft called `item`."""
    prompt, target, draft = prompt_of(), load(TARGET), load(item)
    meter = DecoderMeter(Pair(target, draft, shared_tokenizer()), len(prompt), [gamma + 1 for gamma in gammas])
    encoders = [PrivateModel(model, "auto").modules.get_encoder() for model in (target, draft)]
    runs = [partial(encoder, input_ids=torch.tensor([prompt])) for encoder in encoders]
    meter.jobs += [Job(run, before=[run]) for run in runs]
    meter.clock = partial(process_time)
    for _ in range(repetitions):
        meter.round()
    steps = [steps_of(gamma, new_tokens, item) for gamma in gammas]
    passes: list[tuple[str, str, int, int | None]] = [
        *(("target", "decoder", gamma + 1, taken) for gamma, taken in zip(gammas, steps, strict=True)),
        ("draft", "decoder", 1, None),
        ("target", "encoder", len(prompt), None),
        ("draft", "encoder", len(prompt), None),
    ]
    seconds = np.stack(meter.rounds).T
    return pd.DataFrame(
        {"model": model, "part": part, "n": n, "ms": 1e3 * np.median(times)}
        | columns("cost", ratio_of_medians(times, seconds[0]))
        | {"steps": taken, "new_tokens": new_tokens, "machine": machine(), "threads": torch.get_num_threads()}
        for (model, part, n, taken), times in zip(passes, seconds, strict=True)
    )  # fmt: skip


def steps_of(gamma: int, new_tokens: int, draft: str = "base") -> int:
    """How many steps of gamma draft tokens the completion takes at temperature 0, in float64."""
    greedy, models = Sampling(temperature=0), [load(name).double() for name in (TARGET, draft)]
    drafter = EncoderDecoderDrafter(models[1], greedy) if gamma else None
    sampler = EncoderDecoderSampler(models[0], drafter, gamma=gamma, sampling=greedy, progress=False)
    return int(sampler.generate([prompt_of()], max_new_tokens=new_tokens).record.target_passes[0])


def prompt_of() -> list[int]:
    """A function with a hole, of more than 100 tokens."""
    found = examples(shared_tokenizer(), "held-out", "whole", 6)
    return next(prompt for prompt, _ in found if len(prompt) > 100)


STUDY = Study(
    measure,
    settings={"gammas": (0, 3, 7), "new_tokens": 24, "repetitions": 100},
    small={"gammas": (0, 2), "new_tokens": 4, "repetitions": 3},
    items=("base",),
)
