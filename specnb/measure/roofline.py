"""v(n) from a data sheet: the time of a target forward pass over n tokens per row, in units of one over one token.

A forward pass reads the weights and the cache once, and does arithmetic for every token. Nothing is measured here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

Ends = tuple[float, float, float]
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
    """What `verify_cost` has to know of the target and of the batch.

    width   bytes of a stored parameter
    active  fraction of the parameters that one token uses; below 1 for a mixture of experts
    batch   rows that are decoded together
    cache   bytes of one row's key-value cache over bytes of all weights
    """

    width: float = 2
    active: float = 1
    batch: float = 1
    cache: float = 0


def verify_cost(n: float, gpu: str | tuple[float, float] | None, target: Target) -> tuple[Ends, str]:
    """(value, low, high) of v(n), and what they were taken from.

    value  reading plus arithmetic at the data sheet's figures
    low    the longer of the two
    high   reading plus arithmetic at half the peak
    Weights below 8 bits are unpacked before the arithmetic, at a cost that depends on the kernel: the highest is that
    of the worst published measurement, the value the geometric mean. In a mixture of experts, tokens that choose their
    experts independently read more weights than one token does; those of one row may also choose the same ones. The
    value is the geometric mean of the two.

    Raises `ValueError` for a GPU that is not known.

    >>> (value, low, high), source = verify_cost(5, "A100", Target(batch=16))
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
        flops, bandwidth = _figures(gpu)
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


def _figures(gpu: str | tuple[float, float]) -> tuple[float, float]:
    if isinstance(gpu, str):
        return GPUS[known_gpu(gpu)]
    figures = tuple(gpu)
    if len(figures) != 2 or not all(math.isfinite(figure) and figure > 0 for figure in figures):
        raise ValueError(f"gpu is {gpu}; need a name or two positive numbers, (dense 16-bit teraflop/s, GB/s)")
    return figures


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
