"""Predict tokens per step and speed-up from what a paper, a log or an issue reports, with a range for what is missing.

Nothing is measured here (`specnb.recommend_gamma` measures). A missing input becomes a range and a line in `missing`.
The time of a target forward pass can come from a GPU's data sheet: it reads the weights and the cache once, and does
arithmetic for every token.
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
Ends = tuple[float, float, float]  # value, low, high

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
      gpu              a name in `GPUS`, as people write it ("8xH100"), or (dense 16-bit teraflop/s, GB/s) of another
                       device: time of reading the weights plus that of arithmetic (`roofline`)
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
    if verify_cost is None:
        ends, source = roofline(n, gpu, target)
        missing.append(f"verify_cost: {source}")
    else:
        given = float(verify_cost(n) if callable(verify_cost) else verify_cost)
        ends = (_checked("verify_cost", given, 0.01, 1e6),) * 3
    v = Range(*ends)
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


def _checked(name: str, value: float, least: float, most: float) -> float:
    if not (math.isfinite(value) and least <= value <= most):
        raise ValueError(f"{name} is {value}; need a number from {least:g} to {most:g}")
    return value


# v(n) from a data sheet.

# fmt: off
GPUS = {
    "A10": (125, 600), "A10G": (70, 600), "A100-80GB": (312, 2039), "A100-40GB": (312, 1555), "A30": (165, 933),
    "A40": (150, 696), "A5000": (111, 768), "A6000": (155, 768), "A800-80GB": (312, 2039), "B200": (2250, 8000),
    "GB200": (2500, 8000), "GH200": (989, 4000), "H100": (989, 3350), "H100-PCIe": (756, 2000), "H20": (148, 4000),
    "H200": (989, 4800), "H800": (989, 3350), "L4": (121, 300), "L40": (181, 864), "L40S": (362, 864),
    "MI100": (185, 1229), "MI210": (181, 1638), "MI250": (362, 3277), "MI250X": (383, 3277), "MI300X": (1307, 5300),
    "MI325X": (1307, 6000), "RTX 2080 Ti": (54, 616), "RTX 3060": (26, 360), "RTX 3080": (60, 760),
    "RTX 3090": (71, 936), "RTX 4080": (97, 717), "RTX 4090": (165, 1008), "RTX 5080": (113, 960),
    "RTX 5090": (210, 1792), "RTX 6000 Ada": (364, 960), "RX 7900 XTX": (123, 960), "T4": (65, 320),
    "TPU v4": (275, 1228), "TPU v5e": (197, 819), "TPU v6e": (918, 1640), "V100": (125, 900),
    "Apple M1": (2.6, 68), "Apple M1 Pro": (5.2, 200), "Apple M1 Max": (10.4, 400), "Apple M1 Ultra": (21, 800),
    "Apple M2": (3.6, 100), "Apple M2 Pro": (6.8, 200), "Apple M2 Max": (13.6, 400), "Apple M2 Ultra": (27.2, 800),
}
# fmt: on
"""Dense 16-bit teraflop/s and memory bandwidth in GB/s, as the data sheets state them; of two sizes with one
name the first is the default."""

OPTIONAL = {"80gb", "40gb", "pcie", "rtx", "tpu", "apple"}
"""Words of the names in `GPUS` that may be left out."""
OTHER_CARDS = {"laptop", "mobile", "max", "ti", "super", "pro", "ultra"}
"""Words that make a name another card's, unless the entry has them too."""

UNKNOWN_RIDGE = (153, 400, 40)  # value, best, worst for 16-bit weights, in tokens
UNPACKING_RIDGE = 1.8  # of weights below 8 bits: the worst of data/reference/small_batches.csv


@dataclass(frozen=True)
class Target:
    """What `roofline` has to know of the target and of the batch.

    width   bytes of a stored parameter
    active  fraction of the parameters that one token uses; below 1 for a mixture of experts
    batch   rows that are decoded together
    cache   bytes of one row's key-value cache over bytes of all weights
    """

    width: float = 2
    active: float = 1
    batch: float = 1
    cache: float = 0


def roofline(n: float, gpu: str | tuple[float, float] | None, target: Target) -> tuple[Ends, str]:
    """(value, low, high) of v(n), and what they were taken from.

    value  reading plus arithmetic at the data sheet's figures
    low    the longer of the two
    high   reading plus arithmetic at half the peak
    Weights below 8 bits are unpacked before the arithmetic, at a cost that depends on the kernel: the highest is that
    of the worst published measurement, the value the geometric mean. In a mixture of experts, tokens that choose their
    experts independently read more weights than one token does; those of one row may also choose the same ones. The
    value is the geometric mean of the two.

    Raises `ValueError` for a GPU that is not known.

    >>> (value, low, high), source = roofline(5, "A100", Target(batch=16))
    >>> print(f"{value:.2f} [{low:.2f}, {high:.2f}], {source}")
    1.38 [1.00, 1.69], roofline of A100-80GB
    """
    ridges, source = _ridges(gpu, target.width)
    value, best, worst = ridges
    rows, n = target.batch, target.batch * n
    # Weights that are read, in units of all: by one token per row, and by n that choose alike within a row or not.
    plain, most = _read(rows, target.active), _read(n, target.active)
    cache = rows * target.cache

    def in_turn(ridge: float, read: float) -> float:
        return (read + cache + target.active * n / ridge) / (plain + cache + target.active * rows / ridge)

    def at_once(read: float) -> float:
        arithmetic = target.active / best
        return max(read + cache, n * arithmetic) / max(plain + cache, rows * arithmetic)

    middle = math.sqrt(in_turn(value, plain) * in_turn(value, most))
    ends = [at_once(plain), at_once(most)] + [in_turn(at, read) for at in (value, worst) for read in (plain, most)]
    return (middle, min(ends), max(ends)), source  # past the ridge, plain decoding is limited by arithmetic too


def _ridges(gpu: str | tuple[float, float] | None, width: float) -> tuple[Ends, str]:
    """In how many tokens arithmetic takes as long as reading the weights: value, best and worst, and their source.

    There are 2 operations per parameter and token.
    """
    if gpu is None:
        source, ends = "rooflines with ridges from {2:g} to {1:g} tokens", UNKNOWN_RIDGE
        value, best, worst = (at * width / 2 for at in ends)
    else:
        figures = GPUS[known_gpu(gpu)] if isinstance(gpu, str) else tuple(gpu)
        if len(figures) != 2 or not all(math.isfinite(figure) and figure > 0 for figure in figures):
            raise ValueError(f"gpu is {gpu}; need a name or two positive numbers, (dense 16-bit teraflop/s, GB/s)")
        flops, bandwidth = figures
        value = best = 1000 * flops / bandwidth * width / 2
        worst = best / 2
        name = known_gpu(gpu) if isinstance(gpu, str) else f"{flops:g} teraflop/s and {bandwidth:g} GB/s"
        source = f"roofline of {name}"
    if width < 1:
        worst = min(worst, UNPACKING_RIDGE)
        value = math.sqrt(value * worst)
        source += f", weights of {8 * width:g} bits"
    return (value, best, worst), source.format(value, best, worst)


def _read(tokens: float, active: float) -> float:
    """The expected fraction of all weights that so many tokens use, each of them a fraction `active` of its own."""
    return 1.0 - math.pow(1 - active, tokens)


def known_gpu(name: str) -> str:
    """The entry of `GPUS` that `name` means: the one with the most words in common, of equal ones the first.

    Raises `ValueError` where the words of no entry, `OPTIONAL` ones aside, are all in `name`.

    >>> known_gpu("nvidia a100 sxm4 40gb"), known_gpu("A100"), known_gpu("GeForce RTX 4090"), known_gpu("M2 Ultra")
    ('A100-40GB', 'A100-80GB', 'RTX 4090', 'Apple M2 Ultra')
    """
    words = set(_words(name))
    entries = {gpu: set(_words(gpu)) for gpu in GPUS}
    found = [gpu for gpu, own in entries.items() if own - OPTIONAL <= words and not (words - own) & OTHER_CARDS]
    if not found:
        raise ValueError(
            f"gpu is {name!r}; known are {', '.join(GPUS)}. "
            "For another, give (dense 16-bit teraflop/s, GB/s) of its data sheet, or verify_cost"
        )
    return max(found, key=lambda gpu: len(words & entries[gpu]))


def _words(name: str) -> list[str]:
    """The words of a device's name in lower case; "RTX4090" is two.

    >>> _words("NVIDIA RTX4090"), _words("A100-SXM4"), _words("RTX 2080Ti")
    (['nvidia', 'rtx', '4090'], ['a100', 'sxm4'], ['rtx', '2080', 'ti'])
    """
    split = r"(?<=rtx)(?=\d)|(?<=tpu)(?=v)|(?<=\dx)(?=[a-z])|(?<=\d)(?=ti\b)"
    return re.findall(r"[a-z0-9]+", re.sub(split, " ", name.lower()))
