"""Arithmetic and bandwidth of devices, by the names that people and nvidia-smi use, and the ridge
of a roofline.

Dense 16-bit teraflop/s and GB/s are those of the data sheets; of Apple's chips from the M3 on the
arithmetic follows from cores and clock.
"""

from __future__ import annotations

import math
import re
from difflib import get_close_matches

from specnb_audit.predict_numbers import Pair, Range, pair

# fmt: off
GPUS = {
    "A10": (125, 600), "A10G": (70, 600), "A100-80GB": (312, 2039), "A100-40GB": (312, 1555), "A30": (165, 933),
    "A40": (150, 696), "A5000": (111, 768), "A6000": (155, 768), "A800-80GB": (312, 2039), "B200": (2250, 8000),
    "GB10": (125, 273), "GB200": (2500, 8000), "GH200": (989, 4000), "H100": (989, 3350), "H100-PCIe": (756, 2000),
    "H100-NVL": (835, 3900), "H20": (148, 4000), "H200": (989, 4800), "H200-NVL": (835, 4800), "H800": (989, 3350),
    "L4": (121, 300), "L40": (181, 864), "L40S": (362, 864), "MI50": (26.5, 1024), "MI100": (185, 1229),
    "MI210": (181, 1638), "MI250": (362, 3277), "MI250X": (383, 3277), "MI300X": (1307, 5300), "MI325X": (1307, 6000),
    "RTX 2080 Ti": (54, 616), "RTX 3060": (26, 360), "RTX 3080": (60, 760), "RTX 3090": (71, 936),
    "RTX 4080": (97, 717), "RTX 4090": (165, 1008), "RTX 5080": (113, 960), "RTX 5090": (210, 1792),
    "RTX 6000 Ada": (364, 960), "RTX PRO 6000": (504, 1792), "RTX PRO 6000 Max-Q": (439, 1792),
    "RX 7900 XTX": (123, 960), "T4": (65, 320), "TPU v4": (275, 1228), "TPU v5e": (197, 819), "TPU v6e": (918, 1640),
    "V100": (125, 900), "Apple M1": (2.6, 68), "Apple M1 Pro": (5.2, 200), "Apple M1 Max": (10.4, 400),
    "Apple M1 Ultra": (21, 800), "Apple M2": (3.6, 100), "Apple M2 Pro": (6.8, 200), "Apple M2 Max": (13.6, 400),
    "Apple M2 Ultra": (27.2, 800), "Apple M3": (3.6, 100), "Apple M3 Pro": (6.4, 150), "Apple M3 Max": (14.3, 400),
    "Apple M3 Ultra": (28.6, 819), "Apple M4": (3.8, 120), "Apple M4 Pro": (7.5, 273), "Apple M4 Max": (17.2, 546),
    "Apple M5": (15, 153), "Apple M5 Pro": (30, 307), "Apple M5 Max": (69, 614),
}
# fmt: on

# Words around a name that do not change the figures, and a memory that does only where it is part of the name.
AROUND = re.compile(
    r"nvidia|geforce|rtx|tesla|quadro|amd|instinct|radeon|graphics|sxm\d?|pcie|oam|hbm\d\w?|\d+gb|generation|blackwell"
    r"|server|workstation|edition"
)

UNKNOWN_RIDGE = Range(153, 40, 400)  # of a device that is not named, for 16-bit weights, in tokens
# The slowest of audit/data/reference/small_batches.csv: in parts of the data sheet's arithmetic, and in tokens.
SLOWEST = {"datacentre": 0.4, "workstation": 0.4, "Apple": 0.12}
EIGHT_BITS = ("H", "B", "GB", "GH", "L4", "MI3", "RTX 40", "RTX 50", "RTX 6000 Ada", "RTX PRO")
"""Beginnings of the names of devices with fp8, where weights of 8 bits meet twice the arithmetic."""
UNPACKING_RIDGE = 1.7  # of weights below 8 bits
EXPERTS = 0.25  # times that for a mixture of experts, each of which sees few tokens


def known_gpu(name: str) -> str:
    """The key of `GPUS` that a name stands for.

    Raises
    ------
    ValueError
        If there is none, with those that are like it. Several devices ("8xH100") are none: v(n) of
        all together is that of one.

    Examples
    --------
    >>> known_gpu("NVIDIA H100 80GB HBM3"), known_gpu("NVIDIA A100-SXM4-80GB"), known_gpu("h100")
    ('H100', 'A100-80GB', 'H100')
    """
    words = _words(name)
    for known in sorted(GPUS, key=lambda known: -len(_words(known))):
        more = words - _words(known)
        if _words(known) <= words and all(AROUND.fullmatch(word) for word in more):
            return known
    inside = [known for known in GPUS if _words(known) <= words or (name and name.lower() in known.lower())]
    close = ", ".join(inside or get_close_matches(name.upper(), GPUS) or ["none that is known"])
    raise ValueError(
        f"gpu is {name!r}, like {close}; give one of the names in specnb_audit.predict_devices.GPUS, "
        "(dense 16-bit teraflop/s, GB/s) of another device, or verify_cost"
    )


def _words(name: str) -> set[str]:
    return set(re.findall(r"max-q|[^\s\-()]+", name.lower()))


def device_class(name: str) -> str:
    """The key of `SLOWEST` for a name in `GPUS`."""
    workstation = name.startswith(("RTX", "RX", "A5000", "A6000", "GB10"))
    return "Apple" if name.startswith("Apple") else "workstation" if workstation else "datacentre"


def ridge_of(gpu: str | Pair | None, width: float, active: float) -> tuple[Range, str]:
    """The number of tokens for which arithmetic takes as long as reading the weights, and its
    source.

    `high` is the data sheet's, `low` that of the slowest published speed of the class of device.
    The value is the data sheet's; for Apple's chips, mixtures of experts and weights below 8 bits
    it is the geometric mean of both.

    >>> [round(ridge_of("H100", width, 1)[0].value) for width in (2, 1)]
    [295, 295]
    """
    slow = width < 1 or active < 1
    if gpu is None:
        value, low, high = (
            UNKNOWN_RIDGE.value * width / 2,
            UNKNOWN_RIDGE.low * width / 2,
            UNKNOWN_RIDGE.high * width / 2,
        )
        source = f"rooflines with ridges from {low:g} to {high:g} tokens"
    else:
        name = known_gpu(gpu) if isinstance(gpu, str) else None
        kind = "datacentre" if name is None else device_class(name)
        flops, bandwidth = pair("gpu", gpu if name is None else GPUS[name])
        value = high = 1000 * flops / bandwidth * width / 2  # 2 operations per parameter and token
        slow, low = slow or kind == "Apple", SLOWEST[kind] * high
        if width == 1 and (name or "").startswith(EIGHT_BITS):
            value = high = 2 * high
        source = "roofline of " + (name or f"{flops:g} teraflop/s, {bandwidth:g} GB/s")
    if width < 1:
        low = min(low, UNPACKING_RIDGE)
        source += f", weights of {8 * width:g} bits"
    low *= EXPERTS if active < 1 else 1
    return Range(math.sqrt(value * low) if slow else value, low, high), source
