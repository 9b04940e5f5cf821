"""Predict tokens per step and speed-up from what a paper, a log or an issue reports, with a range for what is missing.

Nothing is measured here (`specnb.recommend_gamma` measures). A missing input becomes a range and a line in `missing`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from specnb.theory import expected_tokens

VerifyCost = Callable[[float], float]
Pair = tuple[float, float]
# fmt: off
GPUS = {
    "A10": (125, 600), "A10G": (70, 600), "A100-80GB": (312, 2039), "A100-40GB": (312, 1555), "A30": (165, 933),
    "A40": (150, 696), "A6000": (155, 768), "B200": (2250, 8000), "GB200": (2500, 8000), "GH200": (989, 4000),
    "H100": (989, 3350), "H100-PCIe": (756, 2000), "H20": (148, 4000), "H200": (989, 4800), "L4": (121, 300),
    "L40": (181, 864), "L40S": (362, 864), "MI250X": (383, 3277), "MI300X": (1307, 5300), "MI325X": (1307, 6000),
    "RTX 3060": (26, 360), "RTX 3080": (60, 760), "RTX 3090": (71, 936), "RTX 4080": (97, 717),
    "RTX 4090": (165, 1008), "RTX 5090": (210, 1792), "RTX 6000 Ada": (364, 960), "T4": (65, 320),
    "TPU v4": (275, 1228), "TPU v5e": (197, 819), "V100": (125, 900),
}
# fmt: on
"""Dense 16-bit teraflop/s and memory bandwidth in GB/s, as the data sheets state them; of two sizes with one
name the first is the default."""

OPTIONAL = {"80gb", "40gb", "pcie", "rtx", "tpu"}
"""Words of the names in `GPUS` that may be left out."""
OTHER_CARDS = {"laptop", "mobile", "max", "ti", "super"}
"""Words that make a name another card's."""

DEPENDENCE = (0.75, 1.1)  # accepted draft tokens per step over Equation 1's, for the alpha of a whole sequence
UNKNOWN_RIDGE = (153, 400, 40)  # value, best, worst: tokens at which arithmetic takes as long as reading the weights


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
    verify_cost: float | VerifyCost | None = None, verified: float | None = None, gpu: str | None = None,
    batch: float = 1, bytes_per_param: float = 2, cache_ratio: float = 0.0, overhead: float | None = None,
) -> Prediction:  # fmt: skip
    """The `Prediction` for one setting: tokens / (gamma c + v(n) + overhead), Theorem 3.8 with a cost of verification.

    Acceptance, exactly one of:
      alpha            mean acceptance probability along sequences, put into Equation 1
      tokens_per_step  measured mean tokens per step, bonus token included ("mean acceptance length", "accept length")
      acceptance_rate  accepted draft tokens over draft tokens
      per_position     fraction of steps in which draft token 1, 2, ... was accepted (not given the one before)
    gamma            draft tokens in a row; the mean where a drafter varies it. `per_position` may stand for it
    Time of a draft forward pass in units of the target's, the first that is given of:
      cost_ratio       c, as measured; 0 for n-grams
      params, layers   (target, draft) parameter and layer counts. Bandwidth makes c the ratio of the parameters, launch
                       latency that of the layers; the value is their geometric mean
    Time of a target forward pass over n tokens per row, v(n), the first that is given of:
      verify_cost      a number for the n of this setting, or a function of n
      gpu              a name in `GPUS`, as people write it ("NVIDIA H100"): time of reading the weights plus that of
                       arithmetic; the range covers the larger of the two, and their sum with arithmetic at half its
                       peak. For dense models
    verified         draft tokens in one verification, where it is not gamma (a tree)
    batch            rows that are decoded together
    bytes_per_param  bytes of a stored target parameter: 2 for 16 bit, 1 for 8 bit
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
    if gamma is None and per_position is None:
        raise ValueError("gamma is missing; give the draft tokens per step, or per_position")
    gamma = _checked("gamma", len(per_position or ()) if gamma is None else gamma, 1, 1e6)
    n = 1 + _checked("verified", gamma if verified is None else verified, 1, 1e6)
    batch, width = _checked("batch", batch, 1, 1e9), _checked("bytes_per_param", bytes_per_param, 0.1, 16)
    accepted = {"alpha": alpha, "tokens_per_step": tokens_per_step, "acceptance_rate": acceptance_rate}
    tokens = _tokens(gamma, accepted | {"per_position": per_position}, missing)
    c = _cost_ratio(cost_ratio, {"params": params, "layers": layers}, missing)
    v = _verification(verify_cost, n, gpu, batch, width, _checked("cache_ratio", cache_ratio, 0, 1e9), missing)
    if overhead is None:
        missing.append("overhead: 0 to 0.25 of a target forward pass per step")
    rest = OVERHEAD if overhead is None else Range(*[_checked("overhead", overhead, 0, 1e6)] * 3)
    cost, least, most = (
        gamma * getattr(c, end) + getattr(v, end) + getattr(rest, end) for end in ("value", "low", "high")
    )
    limits = {
        "acceptance": (gamma + 1) / tokens.value,
        "drafting": cost / (cost - gamma * c.value),
        "verification": cost / (cost - (v.value - 1)),
        "overhead": cost / (cost - rest.value),
    }
    speedup = Range(tokens.value / cost, tokens.low / most, tokens.high / least)
    return Prediction(tokens, speedup, limits, tuple(missing))


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
    given: float | VerifyCost | None, n: float, gpu: str | None, batch: float, width: float, cache: float,
    missing: list[str],
) -> Range:  # fmt: skip
    if given is not None:
        return Range(*[_checked("verify_cost", float(given(n) if callable(given) else given), 0.01, 1e6)] * 3)
    if gpu is not None:
        gpu = known_gpu(gpu)
    # In how many tokens arithmetic takes as long as reading the weights: 2 operations per parameter and token.
    ridge = 1000 * GPUS[gpu][0] / GPUS[gpu][1] * width / 2 if gpu else 0.0
    value, best, worst = (ridge, ridge, ridge / 2) if gpu else UNKNOWN_RIDGE
    missing.append(
        f"verify_cost: {'roofline of ' + gpu if gpu else f'rooflines with ridges from {worst} to {best} tokens'}"
    )
    reads = 1 + batch * cache  # in units of reading the weights once

    def in_turn(ridge: float) -> float:
        return (reads + batch * n / ridge) / (reads + batch / ridge)

    at_once = max(reads, batch * n / best) / max(reads, batch / best)
    ends = in_turn(value), in_turn(worst), at_once  # past the ridge, plain decoding is limited by arithmetic too
    return Range(in_turn(value), min(ends), max(ends))


def known_gpu(name: str) -> str:
    """The entry of `GPUS` that `name` means: the one with the most words in common, of equal ones the first.

    Raises `ValueError` where the words of no entry, `OPTIONAL` ones aside, are all in `name`.

    >>> known_gpu("nvidia a100 sxm4 40gb"), known_gpu("A100"), known_gpu("GeForce RTX 4090")
    ('A100-40GB', 'A100-80GB', 'RTX 4090')
    """
    words = set(_words(name))
    found = [gpu for gpu in GPUS if words >= set(_words(gpu)) - OPTIONAL and not words & OTHER_CARDS]
    if not found:
        raise ValueError(f"gpu is {name!r}; known are {', '.join(GPUS)}. For another, give verify_cost")
    return max(found, key=lambda gpu: len(words & set(_words(gpu))))


def _words(name: str) -> list[str]:
    """The words of a device's name in lower case; "RTX4090" is two.

    >>> _words("NVIDIA RTX4090"), _words("A100-SXM4")
    (['nvidia', 'rtx', '4090'], ['a100', 'sxm4'])
    """
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=rtx)(?=\d)|(?<=tpu)(?=v)|(?<=\dx)(?=[a-z])", " ", name.lower()))


def _checked(name: str, value: float, least: float, most: float) -> float:
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} is {value}; need a number from {least:g} to {most:g}")
    return value
