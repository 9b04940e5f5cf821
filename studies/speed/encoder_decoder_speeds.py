"""Tables 2 and 4 of Leviathan et al. on the T5 that was trained here: tasks, drafts of four sizes, two temperatures.

Whole calls of `generate`, the encoders' passes included, one prompt at a time in float32, until the answer ends. Plain
decoding and all drafts take turns on each prompt, functions of held-out files. The columns:

- `orders`: by how many orders of magnitude a draft is smaller than the target
- `alpha`: mean overlap of both distributions along the answers that the target writes, with a 95% interval over prompts
- `c`, `v`: times of a pass of the draft, and of one of the target over gamma + 1 tokens, over the target's over one
- `gamma`: from 1 to `LARGEST`, the best one by Theorem 3.8 with alpha, c and v, alpha from other prompts
- `expected`: Theorem 3.8 as in Table 4, with v = 1; `predicted`: with v as measured
- `measured`: time per token of plain decoding over that with the draft, with a 95% interval over prompts
- `same`: the fraction of prompts with the tokens of plain decoding, which at temperature 0 all have, but for ties
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from transformers import T5ForConditionalGeneration

from specnb.decoding.generate import Study, generate
from specnb.distributions import Sampling, overlap, standardise
from specnb.measure.cost import Costs, measure_costs
from specnb.measure.statistics import over_rows, ratio_of_sums
from specnb.measure.timing import machine
from specnb.models.checkpoints import require_checksums
from specnb.models.loading import Pair
from specnb.models.packing import pack
from specnb.theory import optimal_gamma, walltime_improvement
from studies import study
from studies.corpus import DATA
from studies.study import columns, timed_in_turn
from studies.training import encoder_decoder as t5
from studies.training.encoder_decoder import TARGET, Example
from studies.training.training import size_of

LARGEST, TEMPERATURES = 8, (0, 1)


def load(name: str) -> Any:
    """One of the models that were trained, in float32 and the layout that is fastest here."""
    require_checksums(DATA / "t5" / name)
    model = T5ForConditionalGeneration.from_pretrained(DATA / "t5" / name, dtype=torch.float32, use_safetensors=True)
    return pack(model.eval())


def answer(target: Any, prompt: list[int], draft: Any, gamma: int, sampling: Sampling, row: int, most: int) -> Any:
    """The answer to one prompt, up to the end-of-text token or `most` tokens; `row` numbers its random numbers."""
    end = target.config.eos_token_id
    return generate(
        target, [prompt], draft, gamma=gamma, max_new_tokens=most, sampling=sampling, eos=end, progress=False,
        study=Study(rows=[row]),
    )  # fmt: skip


@torch.inference_mode()
def betas(models: dict[str, Any], given: Sequence[Example], sampling: Sampling) -> dict[str, NDArray[np.float64]]:
    """Of each draft, the sum of beta along an answer in place of that in `given`, and its tokens, `(prompts, 2)`."""
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in models if name != TARGET}
    for prompt, tokens in given:
        batch = t5.padded([(prompt, tokens)])
        logits = {name: t5.logits_of(model, batch) for name, model in models.items()}
        p = standardise(logits[TARGET], sampling)
        for name, sums in found.items():
            sums.append((float(overlap(p, standardise(logits[name], sampling)).sum()), len(tokens)))
    return {name: np.array(sums) for name, sums in found.items()}


class Timed(NamedTuple):
    """Calls for each prompt: seconds, new tokens and target passes `(prompts,)`, and the tokens."""

    seconds: NDArray[np.float64]
    tokens: NDArray[np.float64]
    passes: NDArray[np.float64]
    answers: list[list[int]]


def timed(
    models: dict[str, Any], gammas: dict[str, int], given: Sequence[list[int]], sampling: Sampling, most: int
) -> dict[str, Timed]:
    """Answers to all prompts with the target alone and with each draft, which take turns."""
    made: dict[tuple[str, int], Any] = {}

    def call(name: str, prompt: list[int], at: int) -> None:
        draft = None if name == TARGET else models[name]
        made[name, at] = answer(models[TARGET], prompt, draft, gammas[name], sampling, at, most)

    found = {}
    for name, seconds in zip(gammas, timed_in_turn(call, list(gammas), given).T, strict=True):
        answers = [made[name, at].tokens[0] for at in range(len(given))]
        passes = [made[name, at].record.target_passes.sum() for at in range(len(given))]
        found[name] = Timed(seconds, np.array([len(one) for one in answers], float), np.array(passes, float), answers)
    return found


def line(beta: NDArray[np.float64], costs: Costs, gamma: int, own: Timed, plain: Timed) -> dict[str, float]:
    """The columns of a draft; `beta` `(prompts, 2)` are its sums and numbers of tokens."""

    def theory(chosen: Any = slice(None), verify: Any = None) -> float:
        total, tokens = beta[chosen].sum(axis=0)
        return float(walltime_improvement(total / tokens, gamma, costs.cost_ratio.value, verify))

    def speed_up(chosen: Any) -> float:
        of_plain, of_own = (one.seconds[chosen].sum() / one.tokens[chosen].sum() for one in (plain, own))
        return float(of_plain / of_own)

    n, same = len(beta), np.mean([a == b for a, b in zip(own.answers, plain.answers, strict=True)])
    return (
        {"gamma": gamma} | columns("alpha", ratio_of_sums(*beta.T)) | columns("c", costs.cost_ratio)
        | {"v": float(costs.verify_cost(gamma + 1)), "expected": theory()}
        | columns("predicted", over_rows(lambda chosen: theory(chosen, costs.verify_cost), n))
        | columns("measured", over_rows(speed_up, n))
        | columns("tokens_per_step", ratio_of_sums(own.tokens, own.passes))
        | {"same": float(same), "plain_ms": 1e3 * float(plain.seconds.sum() / plain.tokens.sum()), "prompts": n}
    )  # fmt: skip


def measure(item: str, prompts: int, chosen_on: int, repetitions: int, most: int) -> pd.DataFrame:
    """A line for each draft; gamma is chosen on the `chosen_on` prompts before those that are timed."""
    task, temperature = item.split("-")
    sampling, models, tokenizer = (
        Sampling(float(temperature)),
        {name: load(name) for name in t5.SHAPES},
        t5.shared_tokenizer(),
    )
    target, held_out = models[TARGET], t5.examples(tokenizer, "held-out", task)
    order = np.random.default_rng(0).permutation(len(held_out))[: chosen_on + prompts]
    given = [held_out[at][0] for at in order.tolist()]
    own = [answer(target, prompt, None, 0, sampling, at, most).tokens[0] for at, prompt in enumerate(given)]
    beta = betas(models, list(zip(given, own, strict=True)), sampling)
    longest, gammas, costs = max(map(len, given)), {TARGET: 0}, dict[str, Costs]()
    for name, sums in beta.items():
        costs[name] = cost = measure_costs(
            Pair(target, models[name], tokenizer), context=longest, slots=longest + most + LARGEST + 1,
            largest=LARGEST + 1, repetitions=repetitions, progress=False,
        )  # fmt: skip
        total, tokens = sums[:chosen_on].sum(axis=0)
        gammas[name] = max(1, int(optimal_gamma(total / tokens, cost.cost_ratio.value, cost.verify_cost, LARGEST)))
    calls = timed(models, gammas, given[chosen_on:], sampling, most)
    sizes = {name: size_of(models[name]) for name in gammas}
    return pd.DataFrame(
        {"task": task, "temperature": float(temperature), "draft": name, "parameters": sizes[name]}
        | {"orders": math.log10(sizes[TARGET] / sizes[name])}
        | line(sums[chosen_on:], costs[name], gammas[name], calls[name], calls[TARGET])
        | {"machine": machine(), "threads": torch.get_num_threads()}
        for name, sums in beta.items()
    )  # fmt: skip


STUDY = study.Study(
    measure,
    settings={"prompts": 64, "chosen_on": 24, "repetitions": 30, "most": t5.LONGEST_ANSWER},
    small={"prompts": 8, "chosen_on": 2, "repetitions": 3, "most": 6},
    items=[f"{task}-{temperature}" for task in t5.TASKS for temperature in TEMPERATURES],
    small_items=("summary-0",),
)
