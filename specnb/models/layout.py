"""Which layout of a linear layer's weight is faster on this machine, by number of rows: measured once, then stored.

oneDNN can keep a weight in a packed layout. Whether its product is faster than the usual one depends on the processor,
the shape and the number of rows, by factors in both directions, so no fixed rule holds everywhere. Here both products
are timed for every shape and some numbers of rows. The results are stored in memory and in `layouts.json` in the user's
cache folder; delete the file to measure again.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear

from specnb.machine import processor_key

CLASSES = ((1,), (2,), (3,), (4,), (5, 8), (9, 16), (17, 32))
"""Classes of row counts that share a choice, each given by the counts that are timed; the last class is unbounded."""
ENDS = [rows[-1] for rows in CLASSES]
POINTS = [rows for timed in CLASSES for rows in timed]

PACKABLE = (torch.float32, torch.bfloat16)
LAYOUT_ROWS = 8  # the row count for which oneDNN chooses the layout; it is good for 1 to hundreds of rows
SMALLEST = 2**16  # elements of a weight; for smaller ones calling oneDNN takes longer than a packed layout saves
LARGEST = 2**21  # elements; of a larger weight only this much is timed, because the time is proportional
LAYERS = 3  # layers of a shape that are timed in turn, because in a model no weight is in the first-level cache
ROUNDS = (5, 15)  # at least and at most
SECONDS = 0.5  # no round begins after this time
FINE = 1e-7  # resolution in seconds of a clock that can time one product
MARGIN = 0.95  # packed weights are used if they take less than this fraction of the usual time (ties change nothing)
MOST_ROUNDS = 0.75  # and if they were faster in this fraction of the rounds (one disturbance changes nothing)

Choice = tuple[bool, ...]  # for each of CLASSES, whether packed weights are used
AS_SAVED: Choice = (False,) * len(CLASSES)

_known: dict[str, Choice] = {}
_supported: dict[torch.dtype, bool] = {}


def choices(weights: Sequence[Tensor]) -> list[Choice]:
    """For each weight `(out, in)` of a model and each of `CLASSES`, whether the packed layout is faster.

    Shapes that were not yet measured on this machine with this dtype and number of threads are measured now, together:
    in half a second, or five rounds if these take longer. A class uses packed weights if they were faster by more than
    5% at both its ends, in at least three of four rounds. Weights are used as saved on other devices, in other dtypes,
    and below 2^16 elements.

    >>> choices([torch.ones(4, 4)]) == [AS_SAVED]
    True
    """
    keys = {dtype: processor_key(dtype) for dtype in {weight.dtype for weight in weights}}
    named = [
        f"{keys[weight.dtype]}; {weight.shape[1]} to {weight.shape[0]}" if _worthwhile(weight) else ""
        for weight in weights
    ]
    if set(named) - {""} - set(_known):
        _known.update(_read() | _known)
    shapes: dict[str, list[Tensor]] = {}
    for name, weight in zip(named, weights, strict=True):
        if name and name not in _known:
            shapes.setdefault(name, []).append(weight.detach())
    if shapes:
        measured = dict(zip(shapes, decide(measure(list(shapes.values()))), strict=True))
        _known.update(measured)
        _write(measured)
    return [_known[name] if name else AS_SAVED for name in named]


def by_rows(choice: Choice) -> Choice:
    """`choice` for 0, 1, ... rows; the last entry holds for all larger counts.

    >>> by_rows((False, True, False, False, False, False, False))[:4]
    (False, False, True, False)
    """
    return tuple(rows > 0 and choice[np.searchsorted(ENDS[:-1], rows)] for rows in range(POINTS[-2] + 1))


def reordered(weight: Tensor) -> Tensor:
    """A copy of `weight` in oneDNN's layout."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LAYOUT_ROWS)
    return packed


def packed_linear(states: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`torch.nn.functional.linear` of `states` `(..., in)` with a weight that is `reordered`."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(
        states.reshape(-1, states.shape[-1]), packed, bias, "none", [], ""
    )
    return product.view(*states.shape[:-1], packed.shape[0])


def supported(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed products in `dtype` on this processor; if it should and has not, warns once.

    >>> supported(torch.float64)
    False
    """
    if dtype not in PACKABLE or not torch.backends.mkldnn.is_available():
        return False
    if dtype not in _supported:
        try:
            with torch.inference_mode():
                packed_linear(torch.ones(1, 16, dtype=dtype), reordered(torch.ones(16, 16, dtype=dtype)), None)
            _supported[dtype] = True
        except RuntimeError as error:
            first = all(_supported.values())
            _supported[dtype] = False  # before the warning, which may be turned into an error
            if first:
                warnings.warn(_unsupported(dtype, error), RuntimeWarning, stacklevel=2)
    return _supported[dtype]


def _unsupported(dtype: torch.dtype, error: RuntimeError) -> str:
    name = str(dtype).removeprefix("torch.")
    why = str(error).splitlines()[0]
    return (
        f"oneDNN cannot pack {name} weights on this processor, so they are used as saved: the results are right, "
        f"products may take longer. Load with packed=False to avoid this warning. oneDNN says: {why}"
    )


def _worthwhile(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.numel() >= SMALLEST and supported(weight.dtype)


def decide(seconds: NDArray[np.float64]) -> list[Choice]:
    """The choice for each shape, from `seconds` `(rounds, shapes, POINTS, 2)` as `measure` returns them."""
    ratio = seconds[..., 1] / seconds[..., 0]
    faster = (np.median(ratio, axis=0) < MARGIN) & (np.quantile(ratio, MOST_ROUNDS, axis=0) < 1)
    starts = np.cumsum([0, *map(len, CLASSES[:-1])])
    return [tuple(row) for row in np.logical_and.reduceat(faster, starts, axis=1).tolist()]


@torch.inference_mode()
def measure(shapes: Sequence[Sequence[Tensor]]) -> NDArray[np.float64]:
    """Seconds `(rounds, shapes, POINTS, 2)` of a product with the usual and with packed weights, all in one dtype.

    `shapes` has the weights of each shape. A round times every shape with every number of rows, in a new random order,
    with one layout right after the other. Shape and layer change from product to product, as they do in a model.
    """
    layers = [[(part, reordered(part)) for part in map(_part, weights[:LAYERS])] for weights in shapes]
    states = [[torch.ones(rows, one[0][0].shape[1], dtype=one[0][0].dtype) for rows in POINTS] for one in layers]
    clock, order = _clock(), np.random.default_rng(0)
    rounds: list[NDArray[np.float64]] = []
    turn, until = 0, time.perf_counter() + SECONDS
    while len(rounds) <= ROUNDS[0] or (len(rounds) <= ROUNDS[1] and time.perf_counter() < until):
        seconds = np.empty((len(shapes), len(POINTS), 2))
        for point in order.permutation(len(POINTS)):
            for layout in order.permutation(2):
                turn += 1
                for shape, sample in enumerate(layers):
                    usual, packed = sample[turn % len(sample)]
                    began = clock()
                    _product(states[shape][point], usual, packed if layout else None)
                    seconds[shape, point, layout] = clock() - began
        rounds.append(seconds)
    return np.stack(rounds[1:])  # the first round sets up libraries


def _clock() -> Callable[[], float]:
    """CPU time if this thread computes alone, so that other programs are not counted; else wall-clock time."""
    alone = torch.get_num_threads() == 1 and time.get_clock_info("thread_time").resolution < FINE
    return time.thread_time if alone else time.perf_counter


def _part(weight: Tensor) -> Tensor:
    return weight[: max(1, LARGEST // weight.shape[1])]


def _product(states: Tensor, usual: Tensor, packed: Tensor | None) -> Tensor:
    return linear(states, usual) if packed is None else packed_linear(states, packed, None)


def cache_file() -> Path | None:
    """The file of the stored choices, under `XDG_CACHE_HOME` or ~/.cache; None where there is no home folder."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return folder / "specnb" / "layouts.json" if folder.is_absolute() else None


def _read() -> dict[str, Choice]:
    """The stored choices; none if the file cannot be read or is damaged, so that they are measured again."""
    file = cache_file()
    try:
        kept = json.loads(file.read_text(encoding="utf-8")) if file else {}
    except (OSError, ValueError, RecursionError):
        return {}
    entries = kept.items() if isinstance(kept, dict) else ()
    return {name: tuple(choice) for name, choice in entries if _is_choice(choice)}


def _is_choice(value: object) -> bool:
    return isinstance(value, list) and len(value) == len(CLASSES) and all(isinstance(one, bool) for one in value)


def _write(measured: dict[str, Choice]) -> None:
    """Adds `measured` to the file by an atomic replacement; at worst another process's simultaneous entry is lost.

    Does nothing where the file cannot be written; every process then measures again.
    """
    file = cache_file()
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, delete=False) as partial:
            try:
                partial.write(json.dumps(measured | _read(), indent=1) + "\n")
                partial.close()
                os.replace(partial.name, file)
            except BaseException:
                os.unlink(partial.name)
                raise
    except OSError:
        return
