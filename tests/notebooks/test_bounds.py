"""Notebooks run at the ends of the bounds of their parameters: `make bounds`."""

from typing import Any

import papermill
import pytest

from notebooks.support.parameters import ALLOWED, of_notebook
from studies.files import notebooks

NOTEBOOKS = notebooks()


def ends(name: str, which: str) -> dict[str, Any]:
    """All numbers at their `least` or their `most`; those without such an end, and texts, stay as
    they are."""
    known = of_notebook(NOTEBOOKS[name])
    given = {key: parameter.value for key, parameter in known.items()}
    for key, parameter in known.items():
        end = ALLOWED.fullmatch(parameter.comment)
        if parameter.kind in ("int", "float") and end and end[which]:
            bound = eval(end[which], {}, {**given})  # a bound may name the parameters above it
            given[key] = int(bound) if parameter.kind == "int" else bound
    return given


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of papermill and the kernel
@pytest.mark.parametrize("which", ["least", "most"])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_bounds_are_true(name: str, which: str) -> None:
    path = NOTEBOOKS[name]
    papermill.execute_notebook(
        path, None, ends(name, which), kernel_name="python3", cwd=path.parent, progress_bar=False, log_output=False
    )
