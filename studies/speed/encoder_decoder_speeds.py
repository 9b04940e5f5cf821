"""Tables 2 and 4 of Leviathan et al. on the T5 that was trained here: tasks, drafts of four sizes, two temperatures.

Whole calls of a sampler, the encoders' passes included, one prompt at a time in float32, until the answer ends. Plain
decoding and all drafts take turns on each prompt, functions of held-out files (`studies.speed.calls`, whose columns
are these, too). A draft's gamma is the fastest of `GAMMAS` on other prompts. The other columns:

- `orders`: by how many orders of magnitude a draft is smaller than the target
- `alpha`: mean overlap of both distributions along the answers that the target writes
- `c`, `v`: times of a pass of the draft, and of one of the target over gamma + 1 tokens, over the target's over one
- `ended`: the fraction of the target's answers that end before `most` tokens; the others repeat themselves
- `expected`: Theorem 3.8 as in Table 4, with v = 1; `predicted`: with v as measured, both without the encoders
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from transformers import T5ForConditionalGeneration

from specnb.cache import slots_for
from specnb.cost import CostMeter, Costs
from specnb.distributions import Sampling, overlap, standardise
from specnb.loading import Pair
from specnb.statistics import machine, over_rows, ratio_of_sums
from specnb.theory import walltime_improvement
from studies import study
from studies.batching.encoder_decoder import EncoderDecoderDrafter, EncoderDecoderSampler, with_inputs
from studies.corpus import DATA
from studies.speed.calls import compared, fastest, way_of
from studies.study import columns
from studies.training import encoder_decoder as t5
from studies.training.encoder_decoder import TARGET, Example
from studies.training.training import size_of

NONE, GAMMAS = "none", (1, 2, 3, 5, 7)


def load(name: str) -> Any:
    """One of the models that were trained, in float32."""
    found = T5ForConditionalGeneration.from_pretrained(DATA / "t5" / name, dtype=torch.float32, use_safetensors=True)
    return found.eval()


class DecoderMeter(CostMeter):
    """Times passes of a decoder after inputs of `context` tokens."""

    def __init__(self, pair: Pair, context: int, lengths: Sequence[int], **more: Any) -> None:
        self.runner_class = with_inputs(context)
        super().__init__(pair, context, lengths, compile="auto", **more)


@torch.inference_mode()
def betas(models: dict[str, Any], given: Sequence[Example], sampling: Sampling) -> dict[str, NDArray[np.float64]]:
    """Of each draft, the sum of beta along the answer of each example, and its tokens:
    `(2, examples)`."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in models if name != TARGET}
    for example in given:
        p, *qs = (standardise(t5.logits_of(model, t5.padded([example])), sampling) for model in models.values())
        for sums, q in zip(found.values(), qs, strict=True):
            sums.append((float(overlap(p, q).sum()), len(p)))
    return {name: np.array(sums).T for name, sums in found.items()}


def theory(beta: NDArray[np.float64], costs: Costs, gamma: int) -> dict[str, float]:
    """The columns of a draft that are not timed whole; `beta` as `betas` has it."""

    def speed_up(rows: Any = slice(None), verify: Any = None) -> float:
        total, tokens = beta[:, rows].sum(axis=-1)
        alpha = min(1.0, total / tokens)  # rounding, where draft and target agree
        return float(walltime_improvement(alpha, gamma, costs.cost_ratio.value, verify))

    found = columns("alpha", ratio_of_sums(*beta)) | columns("c", costs.cost_ratio)
    found |= {"v": float(costs.verify_cost(gamma + 1)), "expected": speed_up()}
    return found | columns("predicted", over_rows(lambda rows: speed_up(rows, costs.verify_cost), beta.shape[1]))


def measure(item: str, prompts: int, chosen_on: int, repetitions: int, most: int) -> pd.DataFrame:
    """A line for plain decoding and for each draft; the last `chosen_on` prompts are for the choice
    of gamma."""
    task, temperature = item.split("-")
    sampling, tokenizer = Sampling(float(temperature)), t5.shared_tokenizer()
    models = {of: load(of) for of in t5.SHAPES}
    held_out, target = t5.examples(tokenizer, "held-out", task), models[TARGET]
    order = np.random.default_rng(0).permutation(len(held_out))[: prompts + chosen_on].tolist()
    given = [held_out[at][0] for at in order]
    longest, eos = max(map(len, given)), target.config.eos_token_id
    slots = slots_for(longest + 1, most, max(GAMMAS))  # with the decoder's first token
    sampler = partial(
        EncoderDecoderSampler, target, sampling=sampling, compile="auto", inputs=longest, slots=slots,
        progress=False,
    )  # fmt: skip
    chosen, ways = {NONE: 0}, {NONE: way_of(sampler(None, gamma=0), most, eos)}
    for of in list(t5.SHAPES)[1:]:  # the drafts
        drafter = EncoderDecoderDrafter(models[of], sampling, compile="auto")
        tried = {str(gamma): way_of(sampler(drafter, gamma=gamma), most, eos) for gamma in GAMMAS}
        best = fastest(tried, given[prompts:])
        chosen[of], ways[of] = int(best), tried[best]
    table = compared(ways, given[:prompts])[0].rename(columns={"way": "drafter"})
    table["gamma"] = list(chosen.values())
    plain = EncoderDecoderSampler(target, None, gamma=0, sampling=sampling, progress=False)
    answers = plain.generate(given[:prompts], max_new_tokens=most, eos=eos).tokens
    own = list(zip(given[:prompts], answers, strict=True))
    overlaps = betas(models, own, sampling)
    found = [{"parameters": size_of(target), "orders": 0.0}]
    for of, gamma in list(chosen.items())[1:]:
        meter = DecoderMeter(Pair(target, models[of], tokenizer), longest, (1, gamma + 1), slots=slots)
        for _ in range(repetitions):
            meter.round()
        size = size_of(models[of])
        sizes = {"parameters": size, "orders": math.log10(size_of(target) / size)}
        found.append(sizes | theory(overlaps[of], meter.costs(), gamma))
    ended = float(np.mean([answer[-1] == eos for _, answer in own]))
    under = {"task": task, "temperature": float(temperature), "prompts": prompts, "ended": ended}
    return pd.concat([table, pd.DataFrame(found)], axis=1).assign(
        **under, machine=machine(), threads=torch.get_num_threads()
    )


STUDY = study.Study(
    measure,
    settings={"prompts": 48, "chosen_on": 12, "repetitions": 30, "most": t5.LONGEST_ANSWER},
    small={"prompts": 8, "chosen_on": 1, "repetitions": 3, "most": 6},
    items=[f"{task}-{temperature}" for task in t5.TASKS for temperature in (0, 1)],
    small_items=("summary-0",),
)
