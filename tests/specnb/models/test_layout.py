"""The choice of a product follows from the times given here, survives any cache file, and never fails.

Nothing here depends on how long a product takes.
"""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from specnb import machine
from specnb.models import packing as layout
from specnb.models.packing import (
    AS_SAVED,
    CLASSES,
    PACKED,
    POINTS,
    PRODUCTS,
    TRANSPOSED,
    USUAL,
    by_rows,
    choices,
    decide,
    measure,
)

EVERY = (PACKED,) * len(CLASSES)
NEEDS_ONEDNN = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="oneDNN is not in this torch")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that has measured nothing yet, in whose cache folder there is nothing."""
    monkeypatch.setattr(layout, "_known", {})
    monkeypatch.setattr(layout, "_supported", {})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "specnb" / "linear_products.json"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """The shapes of each measurement; in all of them packed weights take half the time."""
    made = []

    def half(shapes: Sequence[Sequence[Tensor]]) -> NDArray[np.float64]:
        made.append([tuple(weights[0].shape) for weights in shapes])
        return np.tile([2.0, 3.0, 3.0, 1.0], (5, len(shapes), len(POINTS), 1))

    monkeypatch.setattr(layout, "measure", half)
    return made


def weight(outputs: int = 256, inputs: int = 512) -> Tensor:
    return torch.zeros(outputs, inputs)


def again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process."""
    monkeypatch.setattr(layout, "_known", {})


@pytest.mark.parametrize("product", PRODUCTS[1:])
def test_a_tie_leaves_weights_as_saved(product: str) -> None:
    seconds, other = np.ones((5, 1, len(POINTS), len(PRODUCTS))), PRODUCTS.index(product)
    assert decide(seconds) == [AS_SAVED]
    seconds[..., other] = 0.96
    assert decide(seconds) == [AS_SAVED]
    seconds[..., other] = 0.94
    assert decide(seconds) == [(product,) * len(CLASSES)]


def test_the_fastest_of_several_is_used() -> None:
    assert decide(np.tile([3.0, 1.0, 2.0, 2.0], (5, 1, len(POINTS), 1))) == [(TRANSPOSED,) * len(CLASSES)]


def test_a_disturbance_decides_nothing() -> None:
    seconds = np.ones((8, 1, len(POINTS), len(PRODUCTS)))
    seconds[:5, ..., 0] = 100.0  # the other products looked faster in 5 rounds of 8
    assert decide(seconds) == [AS_SAVED]


@pytest.mark.parametrize("point", range(len(POINTS)))
def test_a_class_uses_a_product_that_is_faster_at_both_its_ends(point: int) -> None:
    seconds = np.tile([2.0, 3.0, 3.0, 1.0], (5, 2, len(POINTS), 1))
    seconds[:, 0, point, -1] = 3.0
    slow, fast = decide(seconds)
    assert fast == EVERY
    assert [USUAL if POINTS[point] in rows else PACKED for rows in CLASSES] == list(slow)


def test_rows_find_their_class() -> None:
    for at, rows in enumerate(CLASSES):
        uses = by_rows(tuple(PACKED if other == at else USUAL for other in range(len(CLASSES))))
        first, last = rows[0], rows[-1] if at < len(CLASSES) - 1 else len(uses) - 1
        assert [n for n, used in enumerate(uses) if used == PACKED] == list(range(first, last + 1))
        assert uses[0] == USUAL


@NEEDS_ONEDNN
def test_each_shape_is_measured_once_and_kept(
    fresh: Path, measured: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choices([weight(), weight(512, 512), weight(), weight(8, 8)]) == [EVERY, EVERY, EVERY, AS_SAVED]
    assert choices([weight()]) == [EVERY]
    assert measured == [[(256, 512), (512, 512)]]
    again(monkeypatch)
    assert choices([weight(), weight(1024, 512)]) == [EVERY, EVERY]
    assert measured[1:] == [[(1024, 512)]]
    assert len(json.loads(fresh.read_text())) == 3
    assert [file.name for file in fresh.parent.iterdir()] == [fresh.name]


@NEEDS_ONEDNN
def test_another_number_of_threads_and_other_instructions_are_measured_anew(
    fresh: Path, measured: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    choices([weight()])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    choices([weight()])
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41")
    choices([weight()])
    assert len(measured) == len(set(json.loads(fresh.read_text()))) == 3


@NEEDS_ONEDNN
@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1]", b"null", b"[" * 100_000, b'{"x": 3}'])
def test_a_damaged_file_is_measured_and_written_again(
    fresh: Path, measured: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    fresh.parent.mkdir()
    fresh.write_bytes(content)
    assert choices([weight()]) == [EVERY]
    again(monkeypatch)
    assert choices([weight()]) == [EVERY]
    assert len(measured) == 1


@NEEDS_ONEDNN
@pytest.mark.parametrize("wrong", [3, None, [], [1] * len(CLASSES), ["packed"], "packed"])
def test_an_entry_that_is_no_choice_is_measured_again(
    fresh: Path, measured: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch, wrong: object
) -> None:
    choices([weight()])
    fresh.write_text(json.dumps(dict.fromkeys(json.loads(fresh.read_text()), wrong)))
    again(monkeypatch)
    assert choices([weight()]) == [EVERY]
    assert len(measured) == 2


@NEEDS_ONEDNN
def test_where_nothing_can_be_written_it_is_measured_in_every_process(
    fresh: Path, measured: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh.parent.write_text("a file where the folder should be")
    assert choices([weight()]) == choices([weight()]) == [EVERY]
    again(monkeypatch)
    choices([weight()])
    assert len(measured) == 2


@NEEDS_ONEDNN
def test_without_a_home_nothing_is_kept(
    fresh: Path, measured: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless(*_: Any) -> None:
        raise RuntimeError("no home")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    assert layout.cache_file() is None
    assert choices([weight()]) == [EVERY]


def test_a_relative_cache_folder_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert layout.cache_file() is None


@NEEDS_ONEDNN
def test_what_another_process_wrote_meanwhile_stays(
    fresh: Path, measured: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def also(shapes: Sequence[Sequence[Tensor]]) -> NDArray[np.float64]:
        fresh.parent.mkdir(exist_ok=True)
        fresh.write_text(json.dumps({"another": list(AS_SAVED)}))
        return np.tile([2.0, 3.0, 3.0, 1.0], (5, len(shapes), len(POINTS), 1))

    monkeypatch.setattr(layout, "measure", also)
    choices([weight()])
    assert len(json.loads(fresh.read_text())) == 2


@NEEDS_ONEDNN
def test_a_measurement_times_everything_and_leaves_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "SECONDS", 0)
    monkeypatch.setattr(layout, "ROUNDS", (1, 1))
    state = torch.get_rng_state()
    seconds = measure([[weight(), weight()], [weight(64, 2048)]])
    assert seconds.shape == (1, 2, len(POINTS), len(PRODUCTS))
    assert (seconds > 0).all()
    assert torch.equal(torch.get_rng_state(), state)


def test_other_dtypes_and_devices_are_never_packed(fresh: Path, measured: list[list[tuple[int, ...]]]) -> None:
    weights = [weight().double(), weight().half(), weight().to("meta")]
    assert choices(weights) == [AS_SAVED] * 3
    assert not measured


@NEEDS_ONEDNN
def test_a_processor_without_packed_products_warns_once(
    fresh: Path, measured: list[list[tuple[int, ...]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("bf16 path needs the cpu support avx_ne_convert\nand more")

    monkeypatch.setattr(layout.Copies, "of", refuse)
    with pytest.warns(RuntimeWarning, match=r"cannot pack bfloat16 weights .* as saved.*avx_ne_convert$") as warned:
        made = [*choices([weight().bfloat16()] * 3), *choices([weight()])]
    assert made == [AS_SAVED] * 4
    assert len(warned) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choices([weight().bfloat16()]) == [AS_SAVED]
    assert not measured


PROGRAM = """
import torch, warnings
from specnb.models.packing import AS_SAVED, Copies, choices
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    made = choices([torch.ones(300, 300, dtype=torch.bfloat16)]) + choices([torch.ones(400, 300, dtype=torch.bfloat16)])
try:
    Copies.of(torch.ones(16, 16, dtype=torch.bfloat16))
except RuntimeError:
    assert set(made) == {AS_SAVED}
    assert len(warned) == 1 and "cannot pack bfloat16" in str(warned[0].message), warned
else:
    assert not warned, warned
"""


@NEEDS_ONEDNN
def test_bfloat16_loads_where_onednn_has_only_avx2(tmp_path: Path) -> None:
    limited = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "XDG_CACHE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, env=limited, timeout=120)


def test_the_machine_is_named_with_threads_version_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    said = machine.measured_on(torch.bfloat16)
    assert said == f"{machine.machine()}; 2 threads; torch {torch.__version__}; bfloat16"


def test_processors_of_one_name_have_different_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for flags in ("avx2", "avx2 avx512f"):
        cores = [{"model name": "A Processor", "flags": flags}] * 2
        monkeypatch.setattr(machine, "_cores", lambda cores=cores: cores)
        assert machine.machine() == "A Processor, 2 cores"
        keys.add(machine.processor_key(torch.float32))
    assert len(keys) == 2


def test_a_machine_without_cpuinfo_has_a_name_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cores", list)
    assert machine.machine()
    assert machine.processor_key(torch.float32)
