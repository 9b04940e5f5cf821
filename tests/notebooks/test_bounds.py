"""Notebooks run at the ends of the bounds of their parameters: `make bounds`."""

import papermill
import pytest

from notebooks.support.parameters import ends, of_notebook
from studies.files import notebooks

NOTEBOOKS = notebooks()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of papermill and the kernel
@pytest.mark.parametrize("which", ["least", "most"])
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_bounds_are_true(name: str, which: str) -> None:
    path = NOTEBOOKS[name]
    papermill.execute_notebook(
        path,
        None,
        ends(of_notebook(path), which),
        kernel_name="python3",
        cwd=path.parent,
        progress_bar=False,
        log_output=False,
    )
