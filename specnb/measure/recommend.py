"""Recommend gamma for a pair on this machine: measured alpha, c and v(n) in Theorem 3.8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specnb.decoding.given_tokens import named_settings
from specnb.distributions import Sampling
from specnb.measure.acceptance import measure_acceptance
from specnb.measure.cost import Costs, measure_costs, mid_generation
from specnb.measure.statistics import Estimate, bootstrap_indices, interval
from specnb.models.loading import Pair
from specnb.theory import walltime_improvement

Array = NDArray[np.float64]


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
    compile: bool = False,
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
    found = measure_acceptance(
        pair.target, {"draft": pair.draft}, prompts, new_tokens=new_tokens, sampling=sampling, seed=seed,
        progress=progress,
    )  # fmt: skip
    context, slots = mid_generation(max(map(len, prompts)), new_tokens, largest, compile)
    costs = measure_costs(
        pair, context=context, slots=slots, largest=largest + 1, repetitions=repetitions, compile=compile, seed=seed,
        progress=progress,
    )  # fmt: skip
    predicted = {
        gamma: predicted_speedup(found.beta["draft"], costs, gamma, seed=seed) for gamma in range(1, largest + 1)
    }
    best = max(predicted, key=lambda gamma: predicted[gamma].value)
    return Recommendation(best if predicted[best].low > 1 else 0, predicted, found.alpha("draft", seed), costs)
