"""Predict tokens per step and speed-up from what a paper, a log or an issue reports, with a range for what is missing.

Nothing is measured here (`specnb.recommend_gamma` measures). A missing input becomes a range and a line in `missing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specnb.measure.roofline import Target
from specnb.measure.roofline import verify_cost as by_roofline
from specnb.theory import expected_tokens

VerifyCost = Callable[[float], float]
Pair = tuple[float, float]

DEPENDENCE = (0.75, 1.1)  # accepted draft tokens per step over Equation 1's, for the alpha of a whole sequence


@dataclass(frozen=True)
class Range:
    """A predicted value and the least and greatest that the missing inputs allow.

    >>> print(Range(2.0, 1.5, 2.25))
    2.00 [1.50, 2.25]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


OVERHEAD = Range(0.1, 0.0, 0.25)  # of a target forward pass, per step: sampling, verification, cache, scheduler
UNKNOWN_COST = Range(0.05, 0.0, 0.2)  # c if nothing is known of the drafter


@dataclass(frozen=True)
class Prediction:
    """What `predict` returns; a range is what the missing inputs allow, not a confidence interval.

    tokens   tokens per step, the recovered or bonus token included
    speedup  over plain decoding of the same batch
    limits   how many times larger the speed-up would be with full acceptance, or free drafting, verification, overhead
    missing  the inputs that were not given, and what was assumed in their place
    """

    tokens: Range
    speedup: Range
    limits: dict[str, float]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.speedup} times plain decoding, {self.tokens} tokens per step, limited by {self.limited_by}"

    @property
    def limited_by(self) -> str:
        """The largest of `limits`."""
        return max(self.limits, key=lambda name: self.limits[name])


def predict(
    *, gamma: float | None = None, alpha: float | None = None, tokens_per_step: float | None = None,
    acceptance_rate: float | None = None, per_position: Sequence[float] | None = None,
    cost_ratio: float | None = None, params: Pair | None = None, layers: Pair | None = None,
    draft_passes: float | None = None, verify_cost: float | VerifyCost | None = None, verified: float | None = None,
    gpu: str | Pair | None = None, batch: float = 1, bytes_per_param: float = 2, active: float = 1,
    cache_ratio: float = 0.0, overhead: float | None = None,
) -> Prediction:  # fmt: skip
    """The `Prediction` for one setting: tokens / (gamma c + v(n) + overhead), Theorem 3.8 with a cost of verification.

    Acceptance, exactly one of (or `tokens_per_step` and `acceptance_rate` without gamma, which follows from both):
      alpha            mean acceptance probability along sequences, put into Equation 1
      tokens_per_step  measured mean tokens per step, bonus token included ("mean acceptance length", "accept length")
      acceptance_rate  accepted draft tokens over draft tokens
      per_position     fraction of steps in which draft token 1, 2, ... was accepted (not given the one before)
    gamma            draft tokens in a row, of a tree its depth; the mean where a drafter varies it. `per_position` may
                     stand for it
    Time of a draft forward pass in units of the target's, the first that is given of:
      cost_ratio       c, as measured; 0 for n-grams
      params, layers   (target, draft) counts of parameters (of a mixture of experts, those that one token uses) and of
                       layers. Bandwidth makes c the ratio of the parameters, launch latency that of the layers; the
                       value is their geometric mean
    draft_passes     draft forward passes per step, where it is not gamma: 1 if all tokens are proposed at once (Medusa)
    Time of a target forward pass over n tokens per row, v(n), the first that is given of:
      verify_cost      a number for the n of this setting, or a function of n
      gpu              a name in `roofline.GPUS`, as people write it ("8xH100"), or (dense 16-bit teraflop/s, GB/s) of
                       another device: time of reading the weights plus that of arithmetic (`roofline.verify_cost`)
    verified         draft tokens in one verification, where it is not gamma (a tree; SGLang's count has one more)
    batch            rows that are decoded together
    bytes_per_param  bytes of a stored target parameter: 2 for 16 bit, 1 for 8 bit, about 0.6 for Q4_K_M
    active           fraction of the target's parameters that one token uses: 0.1 for a mixture of experts "30B-A3B"
    cache_ratio      bytes of one row's key-value cache over bytes of the target's weights
    overhead         time per step outside the forward passes, in units of a target forward pass

    Raises `ValueError` for contradictory, missing or impossible inputs.

    >>> print(predict(alpha=0.8, gamma=4, cost_ratio=0.05, verify_cost=1.1, overhead=0.0))
    2.59 [2.13, 2.77] times plain decoding, 3.36 [2.77, 3.60] tokens per step, limited by acceptance
    >>> found = predict(tokens_per_step=2.4, gamma=5, params=(7e9, 68e6), layers=(32, 2), gpu="A100-80GB", batch=64)
    >>> print(found.speedup)
    0.89 [0.63, 0.95]
    """
    missing: list[str] = []
    if gamma is None:
        gamma, acceptance_rate = _gamma(per_position, tokens_per_step, acceptance_rate)
    gamma = _checked("gamma", gamma, 1, 1e6)
    n = 1 + _checked("verified", gamma if verified is None else verified, 1, 1e6)
    passes = _checked("draft_passes", gamma if draft_passes is None else draft_passes, 0, 1e6)
    target = Target(
        width=_checked("bytes_per_param", bytes_per_param, 0.1, 16),
        active=_checked("active", active, 1e-4, 1),
        batch=_checked("batch", batch, 1, 1e9),
        cache=_checked("cache_ratio", cache_ratio, 0, 1e9),
    )
    accepted = {"alpha": alpha, "tokens_per_step": tokens_per_step, "acceptance_rate": acceptance_rate}
    tokens = _tokens(gamma, accepted | {"per_position": per_position}, missing)
    c = _cost_ratio(cost_ratio, {"params": params, "layers": layers}, missing)
    v = _verification(verify_cost, n, gpu, target, missing)
    if overhead is None:
        missing.append("overhead: 0 to 0.25 of a target forward pass per step")
    rest = OVERHEAD if overhead is None else Range(*[_checked("overhead", overhead, 0, 1e6)] * 3)
    cost, least, most = (
        passes * getattr(c, end) + getattr(v, end) + getattr(rest, end) for end in ("value", "low", "high")
    )
    limits = {
        "acceptance": (gamma + 1) / tokens.value,
        "drafting": cost / (cost - passes * c.value),
        "verification": cost / (cost - (v.value - 1)),
        "overhead": cost / (cost - rest.value),
    }
    speedup = Range(tokens.value / cost, tokens.low / most, tokens.high / least)
    return Prediction(tokens, speedup, limits, tuple(missing))


def _gamma(
    per_position: Sequence[float] | None, tokens: float | None, rate: float | None
) -> tuple[float, float | None]:
    """gamma as the other inputs imply it, and the acceptance rate if it is still needed as an input."""
    if per_position is not None:
        return len(per_position), rate
    if tokens is None or rate is None:
        raise ValueError(
            "gamma is missing; give the draft tokens per step, or per_position, or tokens_per_step and acceptance_rate"
        )
    if not (tokens > 1 and 0 < rate <= 1):
        raise ValueError(f"tokens_per_step is {tokens} and acceptance_rate {rate}; gamma does not follow, so give it")
    return round((tokens - 1) / rate, 9), None


def _tokens(gamma: float, given: dict[str, Any], missing: list[str]) -> Range:
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(f"give exactly one of {', '.join(given)}; got {', '.join(names) or 'none'}")
    name, value = names[0], given[names[0]]
    if name == "per_position":
        rates = list(value)
        if len(rates) != gamma or any(not 0 <= rate <= 1 for rate in rates):
            raise ValueError(f"per_position is {rates}; need gamma = {gamma:g} fractions from 0 to 1")
        if any(later > earlier for earlier, later in pairwise(rates)):
            raise ValueError(f"per_position rises in {rates}; rates given the token before must be multiplied up first")
        mean = 1 + math.fsum(rates)
    elif name == "tokens_per_step":
        mean = _checked(name, value, 1, gamma + 1)
    elif name == "acceptance_rate":
        mean = 1 + gamma * _checked(name, value, 0, 1)
    else:
        if gamma != round(gamma):
            raise ValueError(f"gamma is {gamma}; with alpha it must be a whole number")
        more = float(expected_tokens(_checked(name, value, 0, 1), gamma)) - 1
        missing.append("dependence of acceptances: 0.75 to 1.1 of the accepted tokens that Equation 1 gives")
        return Range(1 + more, 1 + DEPENDENCE[0] * more, min(1 + DEPENDENCE[1] * more, gamma + 1))
    return Range(mean, mean, mean)


def _cost_ratio(cost_ratio: float | None, sizes: dict[str, Pair | None], missing: list[str]) -> Range:
    if cost_ratio is not None:
        return Range(*[_checked("cost_ratio", cost_ratio, 0, 1e6)] * 3)
    for name, pair in sizes.items():
        if pair is not None and (len(pair) != 2 or min(pair) <= 0 or not all(map(math.isfinite, pair))):
            raise ValueError(f"{name} is {pair}; need two positive numbers, (target, draft)")
    ratios = [pair[1] / pair[0] for pair in sizes.values() if pair is not None]
    if not ratios:
        missing.append("cost_ratio: 0 to 0.2")
        return UNKNOWN_COST
    # A smaller model has fewer parameters per layer, so one ratio bounds the other by about its square root.
    low, high = min(ratios), max(*ratios, math.sqrt(ratios[0]) if len(ratios) == 1 else 0)
    missing.append("cost_ratio: from the ratios of parameters and layers")
    return Range(math.sqrt(low * high), low, high)


def _verification(
    given: float | VerifyCost | None, n: float, gpu: str | Pair | None, target: Target, missing: list[str]
) -> Range:
    if given is not None:
        return Range(*[_checked("verify_cost", float(given(n) if callable(given) else given), 0.01, 1e6)] * 3)
    ends, source = by_roofline(n, gpu, target)
    missing.append(f"verify_cost: {source}")
    return Range(*ends)


def _checked(name: str, value: float, least: float, most: float) -> float:
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} is {value}; need a number from {least:g} to {most:g}")
    return value
