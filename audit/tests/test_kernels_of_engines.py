"""Acceptance functions of engines: the installed transformers, and wheels in the folder
SPECNB_WHEELS if it is given.

Those need Triton, and TRITON_INTERPRET=1.
"""

from __future__ import annotations

import os
import zipfile
from functools import partial
from importlib import metadata
from pathlib import Path

import pandas as pd
import pytest
import transformers
from planted_errors import ERRORS, plant

from specnb_audit.cli import main
from specnb_audit.kernels.engines import ENGINES, Kernel, check
from specnb_audit.kernels.source import Edit, Wheel, open_wheel

VERSION = metadata.version("transformers")
WHEELS = sorted(Path(os.environ.get("SPECNB_WHEELS", "/nowhere")).glob("*.whl"))


def errors_of(kernel: Kernel) -> dict[str, Edit]:
    """The errors that a function can have: one if it is greedy, and one more than the token rule
    for the block rule."""
    names = ERRORS[: 1 if kernel.greedy else 4 if kernel.name.startswith("block") else 3]
    return {name: partial(plant, name) for name in names}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Wheel:
    """A wheel with the file of the transformers that is installed."""
    path = tmp_path_factory.mktemp("wheels") / f"transformers-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        file = "transformers/generation/utils.py"
        archive.write(Path(transformers.__file__).parents[1] / file, file)
    return open_wheel(path, ENGINES)


def test_the_function_of_transformers_is_exact(installed: Wheel, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kernels", "--quick", str(installed.path)]) == 0
    printed = capsys.readouterr().out
    assert f"transformers {VERSION}, token rule, 3 tokens: exact\n" in printed
    assert installed.sha256 in printed
    assert "surprises 0, draws 500; " in printed
    assert "noise used twice: next at 1 2; stand-ins: none\n" in printed


@pytest.mark.parametrize("name", ERRORS[:3])
def test_an_error_in_the_function_of_transformers_is_found(name: str, installed: Wheel) -> None:
    (kernel,) = ENGINES["transformers"]
    line = check(installed, kernel, 3, errors_of(kernel)[name])
    assert line["total_variation"] > 0.01


@pytest.mark.parametrize("file", WHEELS, ids=lambda file: file.name)
def test_releases_are_exact_and_with_an_error_they_are_not(file: Path) -> None:
    """With `SPECNB_PLANTED` the lines of the table that have an error are added to this file."""
    wheel, lines = open_wheel(file, ENGINES), []
    for kernel in ENGINES[wheel.name]:
        for name, edit in errors_of(kernel).items():
            lines.append(check(wheel, kernel, 3, edit) | {"planted_error": name})
            assert lines[-1]["verdict"] != "exact", (kernel.name, name)
    if table := os.environ.get("SPECNB_PLANTED"):
        every = pd.concat([pd.read_csv(table), pd.DataFrame(lines)])
        every.to_csv(table, index=False, lineterminator="\n", float_format="%.1e")
