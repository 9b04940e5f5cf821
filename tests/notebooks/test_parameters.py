"""Parameters of notebooks: papermill knows them, every committed value is allowed, and what is
wrong is said."""

import logging
import math
from pathlib import Path
from typing import Any

import papermill
import pytest

from notebooks.support.parameters import ENDS, FORM, KINDS, mistakes, names_given, of_notebook, read
from studies.files import notebooks

NOTEBOOKS = list(notebooks().values())
CELL = "seed: int = 2  # of every random number, from 0\ngamma: int = 4  # draft tokens per step, from 1 to 64"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_papermill_knows_every_parameter_as_the_notebook_does(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its help lists them with type and meaning, and its warning of an unknown parameter means a
    wrong name."""
    with caplog.at_level(logging.WARNING, logger="papermill"):
        known = papermill.inspect_notebook(path)
    own = of_notebook(path)
    assert list(known) == list(own)
    assert [known[name]["inferred_type_name"] for name in own] == [parameter.kind for parameter in own.values()]
    assert [known[name]["help"] for name in own] == [parameter.comment for parameter in own.values()]
    assert not caplog.records


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_values_are_allowed(path: Path) -> None:
    known = of_notebook(path)
    assert known
    assert mistakes(known, {name: parameter.value for name, parameter in known.items()}) == []


@pytest.mark.parametrize(
    ("kind", "end", "allowed", "refused"),
    [
        ("int", "from 1", [1, 2, 10**9], [0, -1, 1.0, True, "1", None]),
        ("int", "from 1 to 6", [1, 6], [0, 7]),
        ("int", "from 1_000 to 2_000", [1000, 2000], [999, 2001]),
        ("int", "from 2 to other / 2", [2, 5], [1, 6]),
        ("int", "one of 1, 2, 4", [1, 2, 4], [3, 12, 14, 0, 1.0]),
        ("float", "from 0", [0, 0.0, 1e300], [-1e-9, math.inf, math.nan, "1", True]),
        ("float", "from 0 to 1", [0, 0.5, 1], [-0.1, 1.1, math.nan]),
        ("float", "above 0", [1e-300, 5], [0, 0.0, -1.0, math.inf]),
        ("float", "above 0 and below 1", [1e-300, 0.999], [0, 0.0, 1, 1.0, math.nan]),
        ("str", "one of cpu, cuda", ["cpu", "cuda"], ["", "cp", "cpu, cuda", "CPU", 1]),
        ("str", "or empty", ["", "any text"], [1, None, ["x"]]),
        ("bool", "for long runs", [True, False], [0, 1, "True", None]),
    ],
)
def test_what_a_comment_allows(kind: str, end: str, allowed: list[Any], refused: list[Any]) -> None:
    default = {"int": "1", "float": "1.0", "str": '""', "bool": "True"}[kind]
    known = read(f"it: {kind} = {default}  # what it means, from where, {end}\nother: int = 10  # more, from 1")
    for value in allowed:
        assert mistakes(known, {"it": value, "other": 10}) == []
    for value in refused:
        (said,) = mistakes(known, {"it": value, "other": 10})
        assert said == f"it = {value!r} is not allowed: {kind}, what it means, from where, {end}"


@pytest.mark.parametrize(
    "line",
    [
        "gamma = 4  # draft tokens, from 1",
        "gamma: int = 4",
        "gamma: int  # draft tokens, from 1",
        "gamma: list = [4]  # draft tokens, from 1",
        "gamma: int = 4  # draft tokens",
        "print(4)  # draft tokens, from 1",
    ],
)
def test_a_line_of_another_form_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="is no parameter, which is a line such as") as error:
        read(f"seed: int = 0  # of all, from 0\n{line}")
    assert all(words in str(error.value) for words in (f"`{line}`", FORM, ENDS, *KINDS))
    read(FORM)


@pytest.mark.parametrize(
    ("run", "names"),
    [
        ([], []),
        (["import torch", "x = 1"], []),
        ([CELL], ["seed", "gamma"]),
        ([CELL, "# Parameters\ngamm = 3\n", "x = 1"], ["gamm"]),
        ([CELL, CELL.replace("gamma", "gama")], ["seed", "gama"]),
        ([CELL.replace("gamma", "gama"), CELL], ["seed", "gamma"]),
        ([CELL, "seed = 1\ngama = 3"], ["seed", "gama"]),
        ([CELL, '# Parameters\ntext = "a = 1"\n'], ["text"]),
    ],
)
def test_names_are_those_of_the_last_cell_of_parameters_that_ran(run: list[str], names: list[str]) -> None:
    assert names_given(run, read(CELL)) == names
