"""Is it faster, and by how much: whole calls of `generate`, plain and speculative, timed in turn.

The speed-up is the time per token of plain decoding over that of speculation, for the same prompts
in the same run, the passes over the prompts included.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.cost import measure_costs, mid_generation
from specnb.decoding.auto_gamma import Auto
from specnb.distributions import Sampling
from specnb.drafters import Drafter
from specnb.loading import Pair
from specnb.number_checks import require_whole
from specnb.record import now
from specnb.sampler import Draft, Generation, Tokens, as_drafter, generate, named_settings, padding_tokens, token_lists
from specnb.statistics import Estimate, Job, bootstrap, measured_on, time_round

Array = NDArray[np.float64]
FEWEST = 3  # prompts, over which the interval resamples
REPETITIONS = 10  # of each forward pass whose time the prediction needs


@dataclass(frozen=True)
class Speedup:
    """What `measure_speedup` found; `str` says it in words.

    speedup          over plain decoding, with a 95% interval over prompts
    seconds, tokens  (prompts, 2) of whole calls, plain and speculative: medians over the rounds
    tokens_per_step  mean over the steps of all prompts
    predicted        tokens per step over drafting + verification; None for a head, whose time no
                     forward pass of a model gives
    parts            drafting and verification of a step, in plain forward passes, as measured apart
    conditions       machine, threads, version of torch, dtype
    """

    speedup: Estimate
    seconds: Array
    tokens: NDArray[np.int64]
    tokens_per_step: float
    predicted: float | None
    parts: dict[str, float]
    conditions: str

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Of plain and of speculative decoding."""
        plain, speculative = self.tokens.sum(axis=0) / self.seconds.sum(axis=0)
        return float(plain), float(speculative)

    def __str__(self) -> str:
        plain, speculative = self.tokens_per_second
        lines = [
            f"plain        {plain:8.1f} tokens/s",
            f"speculative  {speculative:8.1f} tokens/s, {self.tokens_per_step:.2f} tokens per step",
            f"speed-up     {str(self.speedup).split(' (')[0]}, with the 95% interval over {self.speedup.n} prompts",
        ]
        if self.predicted is not None:
            parts = ", ".join(f"{name} {cost:.2f}" for name, cost in self.parts.items())
            lines.append(f"predicted    {self.predicted:8.2f}, from the tokens per step and {parts} plain passes")
        return "\n".join([*lines, self.conditions])


@named_settings
def measure_speedup(
    target: PreTrainedModel | Pair,
    prompts: Collection[Collection[int]],
    draft: Draft = "auto",
    *,
    gamma: int | Literal["auto"] | Auto = "auto",
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    eos: Tokens = None,
    compile: bool | str = False,
    rounds: int = 3,
    seed: int = 0,
    progress: bool = True,
) -> Speedup:
    """How many times as fast as plain decoding `generate` is with these settings, on this machine.

    For each prompt by itself, after a call of both that is not timed, plain and speculative
    decoding are called `rounds` times in turn, in random order. Of a `Pair`, "auto" is its draft
    model; the other arguments are those of `generate`. The prediction beside it is of Theorem 3.8,
    with the costs of forward passes measured apart: what it lacks are sampling, the rule, and the
    prompt's pass.

    Raises `ValueError` for fewer than three prompts or `rounds` below 1, and what `generate`
    raises.

    >>> from specnb import load_pair
    >>> pair = load_pair()
    >>> found = measure_speedup(pair, [[1], [2], [3]], gamma=2, max_new_tokens=8, rounds=1)
    >>> found.seconds.shape, found.predicted is not None
    ((3, 2), True)
    """
    if isinstance(target, Pair):
        own: Any = target.draft
        target, draft = target.target, own if isinstance(draft, str) and draft == "auto" else draft
    lists = token_lists(prompts, padding_tokens(target))
    require_whole(rounds=(rounds, 1))
    if len(lists) < FEWEST:
        raise ValueError(f"there are {len(lists)} prompts; an interval over prompts needs {FEWEST} at least")
    made: dict[tuple[int, int], Generation] = {}

    def call(row: int, way: int) -> None:
        made[row, way] = generate(
            target, [lists[row]], (None, draft)[way], gamma=(0, gamma)[way], max_new_tokens=max_new_tokens,
            sampling=sampling, eos=eos, seed=seed, compile=compile, progress=False,
        )  # fmt: skip

    order, clock, seconds = np.random.default_rng(seed), partial(now, target.device), []
    for row in tqdm(range(len(lists)), desc="prompts", delay=3, leave=False, disable=not progress):
        jobs = [Job(partial(call, row, way)) for way in range(2)]
        seconds.append(np.median([time_round(jobs, clock, order) for _ in range(rounds + 1)][1:], axis=0))
    of_plain, of_speculative = ([made[row, way] for row in range(len(lists))] for way in range(2))
    times = np.array(seconds)
    tokens = np.array([[len(one.tokens[0]) for one in both] for both in zip(of_plain, of_speculative, strict=True)])
    each = times / tokens
    speedup = bootstrap(lambda rows: np.divide(*np.moveaxis(each[rows].mean(axis=-2), -1, 0)), len(each), 2000, seed)
    records = [one.record for one in of_speculative]
    per_step = float(np.concatenate([record.accepted[0] for record in records]).mean()) + 1
    drafted = np.concatenate([(record.draft_tokens[0] >= 0).sum(axis=-1) for record in records])
    parts = _parts(target, as_drafter(draft, sampling, target), drafted, lists, max_new_tokens, compile)
    predicted = per_step / sum(parts.values()) if parts else None
    conditions = measured_on(target.dtype, target.device)
    return Speedup(speedup, times, tokens, per_step, predicted, parts, conditions)


def _parts(
    target: PreTrainedModel, drafter: Drafter | None, drafted: NDArray[np.int64], prompts: list[list[int]],
    new_tokens: int, compile: bool | str,
) -> dict[str, float]:  # fmt: skip
    """Mean cost of drafting and of verification in steps that `drafted` so many tokens; nothing for
    a head or a tree."""
    if drafter is None or drafter.hidden_layers or drafter.parents is not None:
        return {}
    lengths, model = sorted({1, *(drafted + 1).tolist()}), drafter.draft_model
    context, slots = mid_generation(max(map(len, prompts)), new_tokens, lengths[-1], compile)
    pair = Pair(target, target if model is None else model, None)  # type: ignore[arg-type]  # no text is read
    costs = measure_costs(
        pair, context=context, slots=slots, lengths=lengths, repetitions=REPETITIONS, compile=compile, progress=False
    )
    c = 0.0 if model is None else costs.cost_ratio.value
    return {"drafting": float(drafted.mean() * c), "verification": float(costs.verify_cost(drafted + 1).mean())}
