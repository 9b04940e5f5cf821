"""Is it faster, and by how much: whole calls of a `Sampler`, plain and speculative, timed in turn; and
the gamma that measured alpha, c and v(n) recommend (Theorem 3.8).

The speed-up is the time per token of plain decoding over that of speculation, for the same prompts
in the same run, the passes over the prompts included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.acceptance import measure_acceptance
from specnb.cost import Costs, measure_costs, mid_generation
from specnb.distributions import Sampling
from specnb.fast import Compile
from specnb.loading import Pair
from specnb.number_checks import require_whole
from specnb.record import now
from specnb.sampler import Draft, Generation, Prompts, Sampler, Tokens, named_settings
from specnb.statistics import Estimate, Job, bootstrap, bootstrap_indices, interval, measured_on, time_round
from specnb.theory import walltime_improvement

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
    prompts: Prompts,
    draft: Draft = "auto",
    *,
    gamma: int | Literal["auto"] = "auto",
    max_new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    eos: Tokens = None,
    compile: Compile = "auto",
    rounds: int = 3,
    seed: int = 0,
    progress: bool = True,
) -> Speedup:
    """Measure how many times as fast as plain decoding speculation is, on this machine.

    For each prompt by itself, after a call of both that is not timed, plain and speculative
    decoding are called `rounds` times in turn, in random order; both have a `Sampler` of their own.

    Parameters
    ----------
    rounds
        Timed calls of each prompt, from 1.

    The other arguments are those of `Sampler` and of its `generate`.

    Raises
    ------
    ValueError
        For fewer than three prompts, over which the interval resamples, and what a `Sampler` raises.

    Notes
    -----
    The prediction beside it is of Theorem 3.8, with the costs of forward passes measured apart: what
    it lacks are sampling, the rule, and the prompt's pass.

    Examples
    --------
    >>> from specnb import load_pair
    >>> found = measure_speedup(load_pair(), [[1], [2], [3]], gamma=2, max_new_tokens=8, rounds=1, compile=False)
    >>> found.seconds.shape, found.predicted is not None
    ((3, 2), True)
    """
    of_ways = [
        Sampler(target, draft, gamma=own, sampling=sampling, compile=compile, check=False, progress=progress)
        for own in (0, gamma)
    ]
    lists = of_ways[0].token_lists(prompts)
    require_whole(rounds=(rounds, 1), seed=(seed, 0))
    seed = int(seed)
    if len(lists) < FEWEST:
        raise ValueError(f"there are {len(lists)} prompts; an interval over prompts needs {FEWEST} at least")
    made: dict[tuple[int, int], Generation] = {}

    def call(row: int, way: int) -> None:
        made[row, way] = of_ways[way].generate([lists[row]], max_new_tokens=max_new_tokens, eos=eos, seed=seed)

    model = of_ways[0].target
    order, clock, seconds = np.random.default_rng(seed), partial(now, model.device), []
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
    parts = _parts(of_ways[1], drafted, lists, max_new_tokens)
    predicted = per_step / sum(parts.values()) if parts else None
    return Speedup(speedup, times, tokens, per_step, predicted, parts, measured_on(model.dtype, model.device))


def _parts(sampler: Sampler, drafted: NDArray[np.int64], prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Mean cost of drafting and of verification in steps that `drafted` so many tokens; nothing for
    a head or a tree."""
    drafter, target = sampler.drafter, sampler.target
    if drafter is None or drafter.hidden_layers or drafter.parents is not None:
        return {}
    lengths, model = sorted({1, *(drafted + 1).tolist()}), drafter.draft_model
    context, slots = mid_generation(max(map(len, prompts)), new_tokens, lengths[-1])
    pair = Pair(target, target if model is None else model, None)  # type: ignore[arg-type]  # no text is read
    costs = measure_costs(
        pair, context=context, slots=slots, lengths=lengths, repetitions=REPETITIONS, compile=sampler.compile,
        progress=False,
    )  # fmt: skip
    c = 0.0 if model is None else costs.cost_ratio.value
    return {"drafting": float(drafted.mean() * c), "verification": float(costs.verify_cost(drafted + 1).mean())}


@dataclass(frozen=True)
class Recommendation:
    """The recommended gamma (0: do not speculate), with the prediction for each gamma and what it
    was computed from.

    predicted  gamma -> predicted wall-clock improvement over plain decoding, for each gamma from 1
    """

    gamma: int
    predicted: dict[int, Estimate]
    alpha: Estimate
    costs: Costs

    def __str__(self) -> str:
        best = max(self.predicted, key=lambda gamma: self.predicted[gamma].value)
        prediction = self.predicted[best]
        speed = f"{prediction.value:.2f} times as fast as plain decoding [{prediction.low:.2f}, {prediction.high:.2f}]"
        measured = f"alpha = {self.alpha.value:.3f}, c = {self.costs.cost_ratio.value:.3f}"
        if self.gamma:
            return f"gamma = {best}: predicted {speed} ({measured})"
        return f"do not speculate: the best, gamma = {best}, is predicted to be only {speed} ({measured})"


def predicted_speedup(beta: Array, costs: Costs, gamma: int, resamples: int = 1000, seed: int = 0) -> Estimate:
    """Wall-clock improvement over plain decoding by Theorem 3.8, with alpha, c and v(gamma + 1) as
    measured.

    `beta` `(rows, tokens)` are overlaps along sequences of the target; alpha is their mean
    (Corollary 3.6). The interval resamples rows of `beta` and repetitions of `costs`; n is the
    number of overlaps. Raises `ValueError` for fewer than 8 rows, and where `costs` has no forward
    pass over gamma + 1 tokens.

    >>> costs = Costs(np.full((3, 1), 0.1), np.ones((3, 5)), lengths=(1, 2, 3, 4, 5))
    >>> print(predicted_speedup(np.full((8, 10), 0.75), costs, gamma=4))
    2.179 [2.179, 2.179] (n = 80)
    """
    if len(beta) < 8:
        raise ValueError(f"{len(beta)} rows are too few to resample; need at least 8")
    if gamma + 1 not in costs.lengths:
        raise ValueError(
            f"gamma = {gamma} verifies {gamma + 1} tokens; forward passes over {list(costs.lengths)} were measured, "
            f"not over [{gamma + 1}]"
        )
    column = costs.lengths.index(gamma + 1)
    alphas = beta.mean(axis=1)[bootstrap_indices(len(beta), resamples, seed)].mean(axis=1)
    chosen = bootstrap_indices(len(costs.draft), resamples, seed + 1)
    draft, verify, once = (
        np.median(times[chosen], axis=1) for times in (costs.draft[:, 0], costs.target[:, column], costs.target[:, 0])
    )
    spread = walltime_improvement(alphas, gamma, draft / once, lambda _: verify / once)
    value = walltime_improvement(beta.mean(), gamma, costs.cost_ratio.value, costs.verify_cost)
    return Estimate(float(value), *interval(spread), beta.size)


@named_settings
def recommend_gamma(
    pair: Pair,
    prompts: Sequence[Sequence[int]],
    *,
    largest: int = 8,
    new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    repetitions: int = 20,
    compile: Compile = False,
    seed: int = 0,
    progress: bool = True,
) -> Recommendation:
    """The gamma from 1 to `largest` with the best predicted speed-up for one row on this machine,
    or 0.

    Measured: alpha, from the overlap of both distributions along `new_tokens` tokens that the
    target writes after each prompt; c and v(n), from forward passes half-way through such a
    generation, compiled ones with `compile`. Each gamma is then predicted by Theorem 3.8 with v(n).
    The answer is 0 unless the whole interval of the best prediction is above 1. It holds for this
    machine, number of threads, dtype and weight layout.

    No speculative generation is timed, so the answer can be wrong where

    - the prompts are unlike those that are decoded later, or far longer or shorter: alpha, c and
      v(n) are then others;
    - acceptance varies within a sequence: the theorem takes one alpha, and overestimates long
      drafts where rejections come in clusters;
    - the step itself (sampling, verification, bookkeeping) takes a large part of the time, as with
      very small models;
    - several gammas are predicted to be nearly equal: noise then decides, and little is lost;
    - decoding runs in batches: this is about one row.

    `python -m studies.speed.recommendation` compares the answer with timed generations.

    Raises `ValueError` for fewer than 8 prompts and for `largest` that is not from 1 to 64, and
    what `measure_acceptance` and `measure_costs` raise.

    >>> from specnb import load_pair
    >>> pair = load_pair()
    >>> advice = recommend_gamma(pair, [[token] for token in range(8)], largest=3, new_tokens=8, repetitions=3)
    >>> advice.gamma in (0, 1, 2, 3)
    True
    """
    if len(prompts) < 8 or not 1 <= largest <= 64:
        raise ValueError(f"{len(prompts)} prompts and largest = {largest}; need at least 8, and from 1 to 64")
    new_tokens = int(new_tokens)
    found = measure_acceptance(
        pair.target, {"draft": pair.draft}, prompts, new_tokens=new_tokens, sampling=sampling, seed=seed,
        progress=progress,
    )  # fmt: skip
    context, slots = mid_generation(max(map(len, prompts)), new_tokens, largest)
    costs = measure_costs(
        pair, context=context, slots=slots, largest=largest + 1, repetitions=repetitions, compile=compile, seed=seed,
        progress=progress,
    )  # fmt: skip
    predicted = {
        gamma: predicted_speedup(found.beta["draft"], costs, gamma, seed=seed) for gamma in range(1, largest + 1)
    }
    best = max(predicted, key=lambda gamma: predicted[gamma].value)
    return Recommendation(best if predicted[best].low > 1 else 0, predicted, found.alpha("draft", seed), costs)
