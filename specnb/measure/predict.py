"""Predict tokens per step and speed-up from what a paper, a log or an issue reports, with a range
for what is missing.

Nothing is measured here (`specnb.recommend_gamma` measures). A missing input becomes a range and a
line in `missing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise, product
from typing import Any

from specnb.number_checks import real
from specnb.theory import expected_tokens, solve_alpha

Pair = tuple[float, float]
Ends = tuple[float, float, float]  # value, low, high

ACCEPTANCE = ("alpha", "tokens_per_step", "acceptance_rate", "per_position")
# Accepted draft tokens per step over Equation 1's, for the alpha of a whole sequence.
DEPENDENCE = (0.75, 1.1)


@dataclass(frozen=True)
class Range:
    """A predicted value and the least and greatest that the missing inputs allow.

    >>> print(Range(2.0, 1.5, 2.25), Range(2.3, 2.3, 2.3))
    2.00 [1.50, 2.25] 2.30
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" [{self.low:.2f}, {self.high:.2f}]" if self.low < self.high else "")


def exactly(value: float) -> Range:
    """The range of a value that is known."""
    return Range(value, value, value)


# Of a target forward pass, per step: sampling, verification, cache, scheduler.
OVERHEAD = Range(0.1, 0.0, 0.25)
REPEATED = 1.1  # by what two measurements of one set-up may differ
UNKNOWN_COST = Range(0.05, 0.0, 0.2)  # c if nothing is known of the drafter
# Of a ratio, which gives c; 0.82 fits data/reference/draft_costs.csv.
EXPONENTS = {"params": 0.82, "layers": 0.75}
# Of tokens, drafting, verification and overhead.
ENDS = [("value",) * 4, *product(("low", "high"), repeat=4)]


@dataclass(frozen=True)
class Prediction:
    """What `predict` returns; a range is what the missing inputs allow, not a confidence interval.

    tokens   tokens per step, the recovered or bonus token included
    speedup  over plain decoding of the same batch
    limits   how many times larger the speed-up would be with full acceptance, or free drafting,
             verification, overhead
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
        return max(self.limits, key=lambda name: self.limits[name])


def predict(
    *, gamma: float | None = None, alpha: float | None = None, tokens_per_step: float | None = None,
    acceptance_rate: float | None = None, per_position: Sequence[float] | None = None,
    cost_ratio: float | None = None, params: Pair | None = None, layers: Pair | None = None,
    verify_cost: float | Callable[[float], float] | None = None, verified: float | None = None,
    draft_passes: float | None = None, gpu: str | Pair | None = None, batch: float = 1, bytes_per_param: float = 2,
    active: float = 1, cache_ratio: float = 0, overhead: float | None = None,
    reference: Mapping[str, Any] | None = None,
) -> Prediction:  # fmt: skip
    """The `Prediction` for one setting: tokens / (gamma c + v(n) + overhead), Theorem 3.8 with a
    cost of verification.

    Acceptance, exactly one of (or `tokens_per_step` and `acceptance_rate` without gamma, which
    follows from both):
      alpha            mean acceptance probability along sequences, put into Equation 1
      tokens_per_step  measured mean tokens per step, bonus token included ("mean acceptance
                       length", "accept length")
      acceptance_rate  accepted draft tokens over draft tokens
      per_position     fraction of steps in which draft token 1, 2, ... was accepted (not given the
                       one before)
    gamma            draft tokens in a row, of a tree its depth; the mean where it varies.
                     `per_position` implies it
    Time of a draft forward pass in units of the target's, the first that is given of:
      cost_ratio       c, as measured; 0 for n-grams
      params           (target, draft) counts of parameters (of a mixture of experts, those that one
                       token uses): c is their ratio to the power 0.82, at least the ratio and at
                       most its square root
      layers           (target, draft) counts of layers, in the same way with the power 0.75
    draft_passes     draft forward passes per step, where it is not gamma: 1 if all tokens are
                     proposed at once (Medusa)
    Time of a target forward pass over n tokens per row, v(n), the first that is given of:
      verify_cost      a number for the n of this setting, or a function of n
      gpu              a name in `GPUS`, or (dense 16-bit teraflop/s, GB/s) of another
                       device: time of reading the weights plus that of arithmetic (`roofline`)
    verified         draft tokens in one verification, where it is not gamma (a tree; SGLang's count
                     has one more)
    batch            rows that are decoded together
    bytes_per_param  bytes of a stored target parameter: 2 for 16 bit, 1 for 8 bit, about 0.6 for
                     Q4_K_M
    active           fraction of the target's parameters that one token uses: 0.1 for a mixture of
                     experts "30B-A3B"
    cache_ratio      bytes of one row's key-value cache over bytes of the target's weights
    overhead         time per step outside the forward passes, in units of a target forward pass
    reference        a measurement of the same target, drafter and device: its `speedup` and what
                     differs of the above; it scales the time of a step. Without an acceptance it
                     has the same alpha

    Raises `ValueError` for contradictory, missing or impossible inputs.

    >>> print(predict(alpha=0.8, gamma=4, cost_ratio=0.05, verify_cost=1.1, overhead=0.0))
    2.59 [2.13, 2.77] times plain decoding, 3.36 [2.77, 3.60] tokens per step, limited by acceptance
    >>> setting = {"tokens_per_step": 2.4, "params": (7e9, 68e6), "gpu": "A100-80GB"}
    >>> known = {"speedup": 1.5, "gamma": 3, "tokens_per_step": 2.2}
    >>> print(predict(gamma=5, **setting).speedup, "or", predict(gamma=5, **setting, reference=known).speedup)
    1.93 [1.32, 2.29] or 1.56 [1.27, 1.77]
    """
    given = {name: value for name, value in locals().items() if name != "reference"}
    gamma, parts, missing = _step(given)
    scales = [1.0] * len(ENDS) if reference is None else _scales(reference, given, gamma, parts[0])
    speeds = [scale * _speed(parts, ends) for scale, ends in zip(scales, ENDS, strict=True)]
    tokens, drafting, v, rest = (part.value for part in parts)
    cost = drafting + v + rest
    free = {"drafting": drafting, "verification": v - 1, "overhead": rest}
    limits = {"acceptance": (gamma + 1) / tokens} | {name: cost / (cost - part) for name, part in free.items()}
    return Prediction(parts[0], Range(speeds[0], min(speeds), max(speeds)), limits, tuple(missing))


def _step(given: Mapping[str, Any]) -> tuple[float, list[Range], list[str]]:
    """gamma, the parts that `ENDS` names and what is missing, of the setting that arguments of
    `predict` describe."""
    missing: list[str] = []
    accepted = {name: given[name] for name in ACCEPTANCE}
    gamma = in_range("gamma", _gamma(accepted) if given["gamma"] is None else given["gamma"], 1, 1e6)
    n = 1 + in_range("verified", gamma if given["verified"] is None else given["verified"], 1, 1e6)
    passes = in_range("draft_passes", gamma if given["draft_passes"] is None else given["draft_passes"], 0, 1e6)
    allowed = {"bytes_per_param": (0.1, 16), "active": (1e-4, 1), "batch": (1, 1e9), "cache_ratio": (0, 1e9)}
    target = [in_range(name, given[name], *ends) for name, ends in allowed.items()]
    tokens = tokens_of(gamma, accepted, missing)
    c = cost_ratio_of(given["cost_ratio"], {name: given[name] for name in EXPONENTS}, missing)
    v, rest = given["verify_cost"], given["overhead"]
    if v is None:
        ends, source = roofline(n, given["gpu"], *target)
        missing.append(f"verify_cost: {source}")
    else:
        ends = (in_range("verify_cost", v(n) if callable(v) else v, 0.01, 1e6),) * 3
    if rest is None:
        missing.append("overhead: 0 to 0.25 of a target forward pass per step")
    rest = OVERHEAD if rest is None else exactly(in_range("overhead", rest, 0, 1e6))
    return gamma, [tokens, Range(passes * c.value, passes * c.low, passes * c.high), Range(*ends), rest], missing


def _speed(parts: Sequence[Range], ends: Sequence[str]) -> float:
    tokens, *times = map(getattr, parts, ends)
    return float(tokens / sum(times))


def _scales(reference: Mapping[str, Any], given: Mapping[str, Any], gamma: float, tokens: Range) -> list[float]:
    """Measured over predicted speed-up of the reference, for each of `ENDS`."""
    if not isinstance(reference, Mapping) or "speedup" not in reference or set(reference) - {"speedup", *given}:
        raise ValueError(f"reference is {reference}; need a dictionary of its speedup and of arguments of predict")
    own = {**given, **reference}
    measured = in_range("speedup of the reference", own.pop("speedup"), 0.01, 1000)
    if reference.keys() & set(ACCEPTANCE):
        own |= dict.fromkeys(set(ACCEPTANCE) - reference.keys())
    elif reference.get("gamma", gamma) != gamma and given["alpha"] is None:
        own |= dict.fromkeys(ACCEPTANCE) | {"alpha": solve_alpha(tokens.value, gamma)}  # type: ignore[arg-type]
    try:
        parts = _step(own)[1]
    except ValueError as error:
        raise ValueError(f"reference: {error}") from None
    spread = {"value": 1, "low": 1 / REPEATED, "high": REPEATED}
    return [spread[ends[0]] * measured / _speed(parts, ends) for ends in ENDS]


def _gamma(accepted: dict[str, Any]) -> float:
    """gamma as the acceptance implies it; an acceptance rate that this takes is removed."""
    if accepted["per_position"] is not None:
        return len(accepted["per_position"])
    if accepted["tokens_per_step"] is None or accepted["acceptance_rate"] is None:
        raise ValueError("gamma is missing; give it, or per_position, or tokens_per_step and acceptance_rate")
    more = in_range("tokens_per_step without gamma", accepted["tokens_per_step"], 1.001, 1e6) - 1
    return round(more / in_range("acceptance_rate without gamma", accepted.pop("acceptance_rate"), 1e-6, 1), 9)


def tokens_of(gamma: float, given: dict[str, Any], missing: list[str]) -> Range:
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
        mean = in_range(name, value, 1, gamma + 1)
    elif name == "acceptance_rate":
        mean = 1 + gamma * in_range(name, value, 0, 1)
    else:
        if gamma != round(gamma):
            raise ValueError(f"gamma is {gamma}; with alpha it must be a whole number")
        more = float(expected_tokens(in_range(name, value, 0, 1), gamma)) - 1
        missing.append("dependence of acceptances: 0.75 to 1.1 of the accepted tokens that Equation 1 gives")
        return Range(1 + more, 1 + DEPENDENCE[0] * more, min(1 + DEPENDENCE[1] * more, gamma + 1))
    return exactly(mean)


def cost_ratio_of(cost_ratio: float | None, sizes: dict[str, Pair | None], missing: list[str]) -> Range:
    if cost_ratio is not None:
        return exactly(in_range("cost_ratio", cost_ratio, 0, 1e6))
    for name, pair in sizes.items():
        if pair is not None:
            target, draft = _pair(name, pair, "two positive numbers, (target, draft)")
            missing.append(f"cost_ratio: from the ratio of {name}")
            return Range((draft / target) ** EXPONENTS[name], *sorted([draft / target, math.sqrt(draft / target)]))
    missing.append("cost_ratio: 0 to 0.2")
    return UNKNOWN_COST


def _pair(name: str, pair: Any, needed: str) -> Pair:
    if not (hasattr(pair, "__len__") and len(pair) == 2 and all(0 < real(one) < math.inf for one in pair)):
        raise ValueError(f"{name} is {pair}; need {needed}")
    return float(pair[0]), float(pair[1])


def in_range(name: str, value: Any, least: float, most: float) -> float:
    if not least <= real(value) <= most:
        raise ValueError(f"{name} is {value!r}; need a number from {least:g} to {most:g}")
    return float(value)


# fmt: off
GPUS = {
    "A10": (125, 600), "A10G": (70, 600), "A100-80GB": (312, 2039), "A100-40GB": (312, 1555), "A30": (165, 933),
    "A40": (150, 696), "A5000": (111, 768), "A6000": (155, 768), "A800-80GB": (312, 2039), "B200": (2250, 8000),
    "GB10": (125, 273), "GB200": (2500, 8000), "GH200": (989, 4000), "H100": (989, 3350), "H100-PCIe": (756, 2000),
    "H20": (148, 4000), "H200": (989, 4800), "H800": (989, 3350), "L4": (121, 300), "L40": (181, 864),
    "L40S": (362, 864), "MI50": (26.5, 1024), "MI100": (185, 1229), "MI210": (181, 1638), "MI250": (362, 3277),
    "MI250X": (383, 3277), "MI300X": (1307, 5300), "MI325X": (1307, 6000), "RTX 2080 Ti": (54, 616),
    "RTX 3060": (26, 360), "RTX 3080": (60, 760), "RTX 3090": (71, 936), "RTX 4080": (97, 717), "RTX 4090": (165, 1008),
    "RTX 5080": (113, 960), "RTX 5090": (210, 1792), "RTX 6000 Ada": (364, 960), "RTX PRO 6000": (504, 1792),
    "RTX PRO 6000 Max-Q": (439, 1792), "RX 7900 XTX": (123, 960), "T4": (65, 320), "TPU v4": (275, 1228),
    "TPU v5e": (197, 819), "TPU v6e": (918, 1640), "V100": (125, 900), "Apple M1": (2.6, 68),
    "Apple M1 Pro": (5.2, 200), "Apple M1 Max": (10.4, 400), "Apple M1 Ultra": (21, 800), "Apple M2": (3.6, 100),
    "Apple M2 Pro": (6.8, 200), "Apple M2 Max": (13.6, 400), "Apple M2 Ultra": (27.2, 800), "Apple M3": (3.6, 100),
    "Apple M3 Pro": (6.4, 150), "Apple M3 Max": (14.3, 400), "Apple M3 Ultra": (28.6, 819), "Apple M4": (3.8, 120),
    "Apple M4 Pro": (7.5, 273), "Apple M4 Max": (17.2, 546), "Apple M5": (15, 153), "Apple M5 Pro": (30, 307),
    "Apple M5 Max": (69, 614),
}
# fmt: on
"""Dense 16-bit teraflop/s and memory bandwidth in GB/s, as the data sheets state them, of Apple's
chips from the M3 on by cores and clock."""

UNKNOWN_RIDGE = (153, 400, 40)  # value, best, worst for 16-bit weights, in tokens
# The slowest of data/reference/small_batches.csv, in parts of the data sheet's arithmetic, and in
# tokens.
SLOWEST = {"datacentre": 0.4, "workstation": 0.4, "Apple": 0.12}
UNPACKING_RIDGE = 1.7  # of weights below 8 bits
EXPERTS = 0.25  # times that for a mixture of experts, each of which sees few tokens


def device_class(gpu: str) -> str:
    """The key of `SLOWEST` for the name of a device in `GPUS`: "datacentre" for "H100"."""
    workstation = gpu.startswith(("RTX", "RX", "A5000", "A6000", "GB10"))
    return "Apple" if gpu.startswith("Apple") else "workstation" if workstation else "datacentre"


def roofline(
    n: float, gpu: str | Pair | None, width: float = 2, active: float = 1, batch: float = 1, cache: float = 0
) -> tuple[Ends, str]:
    """(value, low, high) of v(n) and what they were taken from; arguments as in `predict`.

    value  reading plus arithmetic at the data sheet's figures
    low    the longer of the two
    high   reading plus arithmetic at the slowest published speed, by class of device
    For Apple's chips, mixtures of experts and weights below 8 bits, which are unpacked first, the
    value's arithmetic is at the geometric mean of data sheet and slowest. Experts that tokens
    choose independently are more weights to read than for one token, unless the batch reads all;
    those of one row may choose alike. The value is the geometric mean.

    >>> (value, low, high), source = roofline(5, "A100-80GB", batch=16)
    >>> print(f"{value:.2f} [{low:.2f}, {high:.2f}], {source}")
    1.38 [1.00, 1.83], roofline of A100-80GB
    """
    (value, best, worst), source = _ridges(gpu, width, active)
    # Weights that are read, in units of all: by one token per row, and by n that choose alike
    # within a row or not.
    plain, most, cache = _read(batch, active), _read(n * batch, active), batch * cache

    def in_turn(ridge: float, read: float) -> float:
        return (read + cache + active * n * batch / ridge) / (plain + cache + active * batch / ridge)

    def at_once(read: float) -> float:
        return max(read + cache, active * n * batch / best) / max(plain + cache, active * batch / best)

    middle = math.sqrt(in_turn(value, plain) * in_turn(value, most))
    ends = [at_once(plain), at_once(most)] + [in_turn(at, read) for at in (value, worst) for read in (plain, most)]
    # Past the ridge, plain decoding is limited by arithmetic too.
    return (middle, min(ends), max(ends)), source


def _ridges(gpu: str | Pair | None, width: float, active: float) -> tuple[Ends, str]:
    """Tokens for which arithmetic takes as long as reading the weights (value, best, worst), and
    their source."""
    slow = width < 1 or active < 1
    value, best, worst = (at * width / 2 for at in UNKNOWN_RIDGE)
    source = f"rooflines with ridges from {worst:g} to {best:g} tokens"
    if gpu is not None:
        figures, kind = (GPUS[known_gpu(gpu)], device_class(gpu)) if isinstance(gpu, str) else (gpu, "datacentre")
        flops, bandwidth = _pair("gpu", figures, "a name or two positive numbers, (dense 16-bit teraflop/s, GB/s)")
        value = best = 1000 * flops / bandwidth * width / 2  # 2 operations per parameter and token
        slow, worst = slow or kind == "Apple", SLOWEST[kind] * best
        source = "roofline of " + (
            known_gpu(gpu) if isinstance(gpu, str) else f"{flops:g} teraflop/s, {bandwidth:g} GB/s"
        )
    if width < 1:
        worst = min(worst, UNPACKING_RIDGE)
        source += f", weights of {8 * width:g} bits"
    worst *= EXPERTS if active < 1 else 1
    return (math.sqrt(value * worst) if slow else value, best, worst), source


def _read(tokens: float, active: float) -> float:
    """The expected fraction of all weights that so many tokens use, each of them a fraction
    `active` of its own."""
    return 1.0 - math.pow(1 - active, tokens)


def known_gpu(name: str) -> str:
    """`name`, if it is one of `GPUS`. Raises `ValueError` for another, with those that are like it.

    >>> known_gpu("8xH100")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: gpu is '8xH100', like H100, V100, H800; give a name in GPUS...
    """
    if name not in GPUS:
        close = [gpu for gpu in GPUS if name and name in gpu] or get_close_matches(name, GPUS) or ["none that is known"]
        raise ValueError(
            f"gpu is {name!r}, like {', '.join(close)}; give a name in GPUS, (dense 16-bit teraflop/s, GB/s) of the "
            "data sheet of another device, or verify_cost"
        )
    return name
