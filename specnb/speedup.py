"""Measured speed-ups, and the gamma that measured alpha, c and v(n) recommend (Theorem 3.8).

A speed-up is the time per token of plain decoding over that of speculation, prompt passes included.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import PreTrainedModel

from specnb.acceptance import measure_acceptance
from specnb.arguments import require_whole, shown
from specnb.cost import Costs, measure_costs, mid_generation
from specnb.distributions import Sampling
from specnb.fast import Compile
from specnb.loading import Pair
from specnb.prompts import Prompts, Tokens
from specnb.record import Generation, now
from specnb.sampler import Draft, Sampler
from specnb.statistics import Array, Estimate, Job, bootstrap, bootstrap_indices, interval, measured_on, time_round
from specnb.theory import walltime_improvement

FEWEST = 3  # prompts, or repetitions, over which an interval resamples
REPETITIONS = 10  # of each forward pass whose time the prediction needs
RESAMPLES = 1000


@dataclass(frozen=True)
class Speedup:
    """The outcome of `measure_speedup`; `str` says it in words.

    Attributes
    ----------
    seconds, tokens : (prompts, 2)
        Of whole calls, plain and speculative: medians over the rounds.
    predicted
        Emitted tokens per step over drafting + verification; None for heads and trees.
    parts
        Drafting and verification of a step in plain forward passes, measured apart.
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
            lines.append(f"predicted    {self.predicted:8.2f}, from emitted tokens per step and {parts} plain passes")
        return "\n".join([*lines, self.conditions])


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

    For each of at least three prompts, after an untimed call, both are called `rounds` times in turn.
    The other arguments are those of `Sampler` and its `generate`.

    Notes
    -----
    The prediction is tokens per step over the measured cost of a step, Theorem 3.8 with counted tokens and v(n);
    it lacks sampling, the rule, and the prompt's pass.

    Examples
    --------
    >>> from specnb import load_pair
    >>> measure_speedup(load_pair(), [[1], [2], [3]], max_new_tokens=8, rounds=1, compile=False).seconds.shape
    (3, 2)
    """
    sampler_of = partial(Sampler, target, draft, sampling=sampling, compile=compile, progress=progress)
    samplers = [sampler_of(gamma=0), sampler_of(gamma=gamma)]
    lists = samplers[0].token_lists(prompts)
    require_whole(rounds=(rounds, 1), seed=(seed, 0))
    seed = int(seed)
    if len(lists) < FEWEST:
        raise ValueError(f"there are {len(lists)} prompts; an interval over prompts needs {FEWEST} at least")
    generations: dict[tuple[int, int], Generation] = {}

    def call(row: int, way: int) -> None:
        generations[row, way] = samplers[way].generate(
            [lists[row]], max_new_tokens=max_new_tokens, eos=eos, seed=seed, numbers=[row]
        )

    model = samplers[0].target
    order, clock, seconds = np.random.default_rng(seed), partial(now, model.device), []
    for row in tqdm(range(len(lists)), desc="prompts", delay=3, leave=False, disable=not progress):
        jobs = [Job(partial(call, row, way)) for way in range(2)]
        seconds.append(np.median([time_round(jobs, clock, order) for _ in range(rounds + 1)][1:], axis=0))
    times = np.array(seconds)
    tokens = np.array([[len(generations[row, way].tokens[0]) for way in range(2)] for row in range(len(lists))])
    each = times / tokens
    speedup = bootstrap(lambda rows: np.divide(*np.moveaxis(each[rows].mean(axis=-2), -1, 0)), len(each), 2000, seed)
    records = [generations[row, 1].record for row in range(len(lists))]
    per_step = float(np.concatenate([record.accepted[0] for record in records]).mean()) + 1
    drafted = np.concatenate([(record.draft_tokens[0] >= 0).sum(axis=-1) for record in records])
    if model.device.type != "cpu":
        drafted[:] = samplers[1].gamma  # beside a CPU a step is as wide as the longest proposal
    parts = _parts(samplers[1], drafted, lists, max_new_tokens)
    emitted = float(np.concatenate([record.emitted[0] for record in records]).mean())  # fewer where a text ends
    predicted = emitted / sum(parts.values()) if parts else None
    return Speedup(speedup, times, tokens, per_step, predicted, parts, measured_on(model.dtype, model.device))


def _parts(sampler: Sampler, drafted: NDArray[np.int64], prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
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
    """The recommended gamma (0: do not speculate), and the predicted improvement over plain decoding for each gamma."""

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


def predicted_speedup(beta: Array, costs: Costs, gamma: int, seed: int = 0) -> Estimate:
    """Wall-clock improvement over plain decoding by Theorem 3.8; alpha is the mean of `beta` `(rows, tokens)`."""
    column = costs.lengths.index(gamma + 1)
    alphas = beta.mean(axis=1)[bootstrap_indices(len(beta), RESAMPLES, seed)].mean(axis=1)
    chosen = bootstrap_indices(len(costs.draft), RESAMPLES, seed + 1)
    measured = (costs.draft, costs.target[:, column], costs.target[:, 0])
    draft, verify, once = (np.median(times[chosen], axis=1) for times in measured)
    spread = walltime_improvement(alphas, gamma, draft / once, lambda _: verify / once)
    value = walltime_improvement(beta.mean(), gamma, costs.cost_ratio.value, costs.verify_cost)
    return Estimate(float(value), *interval(spread), beta.size)


def recommend_gamma(
    target: PreTrainedModel | Pair,
    prompts: Prompts,
    draft: PreTrainedModel | Literal["auto"] = "auto",
    *,
    largest: int = 8,
    new_tokens: int = 64,
    sampling: Sampling = Sampling(),
    repetitions: int = 20,
    compile: Compile = False,
    seed: int = 0,
    progress: bool = True,
) -> Recommendation:
    """The gamma with the best predicted speed-up on this machine; 0 unless its whole interval is above 1.

    `draft` is a model, by default that of a `Pair`. alpha is measured along `new_tokens` tokens that
    the target writes after each of at least 8 prompts; c and v(n) by forward passes half-way
    through such a generation.

    Notes
    -----
    No speculative generation is timed, as by `measure_speedup`. The answer can be wrong for other
    prompts, lengths or batches, if rejections cluster, and if sampling and bookkeeping take much of the
    time.

    Examples
    --------
    >>> from specnb import load_pair
    >>> prompts = [[token] for token in range(8)]
    >>> recommend_gamma(load_pair(), prompts, largest=3, new_tokens=8, repetitions=3).gamma in (0, 1, 2, 3)
    True
    """
    pair = target if isinstance(target, Pair) else Pair(target, draft, None)  # type: ignore[arg-type]  # no texts then
    pair = pair if isinstance(draft, str) and draft == "auto" else replace(pair, draft=draft)
    if not isinstance(pair.draft, PreTrainedModel):
        raise TypeError(f"draft is {shown(pair.draft)}; it must be a model, whose passes are timed: give one or a Pair")
    require_whole(largest=(largest, 1), repetitions=(repetitions, FEWEST))
    measured = measure_acceptance(pair, prompts, new_tokens=new_tokens, sampling=sampling, seed=seed, progress=progress)
    beta, alpha = measured.beta["draft"], measured.alpha(seed=seed)
    context, slots = mid_generation(max(map(len, measured.sequences)) - new_tokens, new_tokens, largest)
    costs = measure_costs(
        pair, context=context, slots=slots, lengths=range(1, largest + 2), repetitions=repetitions, compile=compile,
        seed=seed, progress=progress,
    )  # fmt: skip
    predicted = {gamma: predicted_speedup(beta, costs, gamma, seed=seed) for gamma in range(1, largest + 1)}
    best = max(predicted, key=lambda gamma: predicted[gamma].value)
    return Recommendation(best if predicted[best].low > 1 else 0, predicted, alpha, costs)
