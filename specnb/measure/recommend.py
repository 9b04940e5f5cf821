"""Which gamma to use here: alpha, c and v(n) measured on this machine, and Theorem 3.8 with the measured v(n)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specnb.decoding.loop import slots_for
from specnb.measure.acceptance import measure_acceptance
from specnb.measure.cost import Costs, measure_costs
from specnb.measure.statistics import Estimate, bootstrap_indices, interval, ratio_of_sums
from specnb.models.loading import Pair
from specnb.sampling.distributions import Sampling
from specnb.theory import walltime_improvement

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Recommendation:
    """The gamma to use, 0 for none, and what was measured and predicted on the way.

    predicted  gamma -> predicted walltime improvement over plain decoding, for every gamma from 1
    """

    gamma: int
    predicted: dict[int, Estimate]
    alpha: Estimate
    costs: Costs

    def __str__(self) -> str:
        best = max(self.predicted, key=lambda gamma: self.predicted[gamma].value)
        said = self.predicted[best]
        promise = f"{said.value:.2f} times as fast as plain decoding [{said.low:.2f}, {said.high:.2f}]"
        measured = f"alpha = {self.alpha.value:.3f}, c = {self.costs.cost_ratio.value:.3f}"
        if self.gamma:
            return f"gamma = {best}: {promise} ({measured})"
        return f"do not speculate: even gamma = {best} promises only {promise} ({measured})"


def predict(beta: Array, costs: Costs, gamma: int, resamples: int = 1000, seed: int = 0) -> Estimate:
    """Walltime improvement by Theorem 3.8 with alpha, c and v(gamma + 1) as measured.

    `beta` `(rows, tokens)` are overlaps along texts of the target; alpha is their mean (Corollary 3.6). The
    interval resamples rows and repetitions; n is the number of overlaps. Raises `ValueError` for fewer than
    8 rows, and where `costs` has no run over gamma + 1 tokens.
    """
    if len(beta) < 8:
        raise ValueError(f"{len(beta)} rows are too few to resample; need at least 8")
    costs.verify_cost(gamma + 1)
    column = costs.lengths.index(gamma + 1)
    beta = np.minimum(beta, 1)  # a distribution that was added up in float32 can have a little more
    alphas = beta.mean(axis=1)[bootstrap_indices(len(beta), resamples, seed)].mean(axis=1)
    chosen = bootstrap_indices(len(costs.draft), resamples, seed + 1)
    draft, verify, once = (
        np.median(times[chosen], axis=1) for times in (costs.draft, costs.target[:, column], costs.target[:, 0])
    )
    spread = walltime_improvement(alphas, gamma, draft / once, lambda _: verify / once)
    value = walltime_improvement(beta.mean(), gamma, costs.cost_ratio.value, costs.verify_cost)
    return Estimate(float(value), *interval(spread), beta.size)


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
    """The gamma from 1 to `largest` with the best predicted speed-up for one row on this machine; 0 if none helps.

    alpha is measured on what the target makes of the prompts, c and v(n) by timing runs, compiled ones with
    `compile`: they hold for this pair's weight layout and number of threads, so state the result with
    `specnb.machine.measured_on`. None helps where the best prediction is not above 1 by its whole interval. Raises
    `ValueError` for fewer than 8 prompts or largest < 1, and what `measure_acceptance` and `measure_costs` raise.
    """
    if len(prompts) < 8 or largest < 1:
        raise ValueError(f"{len(prompts)} prompts and largest = {largest}; need at least 8 and 1")
    found = measure_acceptance(
        pair.target, {"draft": pair.draft}, prompts, new_tokens=new_tokens, sampling=sampling, seed=seed,
        progress=progress,
    )  # fmt: skip
    beta = found.beta["draft"]
    prompt = max(map(len, prompts))
    costs = measure_costs(
        pair, context=prompt + new_tokens // 2, slots=slots_for(prompt, new_tokens, largest, compile),
        largest=largest + 1, repetitions=repetitions, compile=compile, seed=seed, progress=progress,
    )  # fmt: skip
    predicted = {gamma: predict(beta, costs, gamma, seed=seed) for gamma in range(1, largest + 1)}
    best = max(predicted, key=lambda gamma: predicted[gamma].value)
    alpha = ratio_of_sums(beta.sum(axis=1), np.full(len(beta), beta.shape[1]), seed=seed)
    return Recommendation(best if predicted[best].low > 1 else 0, predicted, alpha, costs)
