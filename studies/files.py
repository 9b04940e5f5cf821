"""Where studies and notebooks read their data, and where notebooks write: under `out()`.

That is the pipeline's `build`, or `build/own` for a reader's run, never over what is committed.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd  # slow to import, and the Snakefile needs names only

WEIGHTS = "model.safetensors"  # of a folder with a head or vectors
ROOT = Path(__file__).resolve().parents[1]


def out() -> Path:
    """The folder under which `data/results` and `figures` are written: `SPECNB_OUT` if it is set,
    or `build/own`."""
    return Path(os.environ.get("SPECNB_OUT") or ROOT / "build" / "own")


def located(folder: str, name: str) -> str:
    """The path of the file `name` of a folder, in the checkout and under `out()`; names of the
    audit begin with audit/.

    >>> located("figures", "05_sampling.svg"), located("figures", "audit/02_rows.svg")
    ('figures/05_sampling.svg', 'audit/figures/02_rows.svg')
    """
    inside = name.removeprefix("audit/")
    return f"{name.removesuffix(inside)}{folder}/{inside}"


def notebooks() -> dict[str, Path]:
    """The notebooks of the checkout by name: 05_acceptance, audit/02_engines."""
    files = [(home, path) for home in ("", "audit/") for path in (ROOT / home / "notebooks").glob("[0-9]*.ipynb")]
    return {f"{home}{path.stem}": path for home, path in sorted(files)}


def data_file(name: str) -> Path:
    """The file `name` of `data` (`located`); of a notebook's table the one under `out()`, if this
    run has made it.

    >>> data_file("reference/table3_alpha.csv").relative_to(ROOT).as_posix()
    'data/reference/table3_alpha.csv'
    """
    path = located("data", name)
    made = out() / path
    return made if made.name[:2].isdigit() and made.exists() else ROOT / path


def read_table(name: str, **how: Any) -> pd.DataFrame:
    """The table `<name>.csv`, where `data_file` finds it; `how` goes to `pandas.read_csv`."""
    import pandas as pd

    table: pd.DataFrame = pd.read_csv(data_file(f"{name}.csv"), **how)
    return table


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file under a temporary name, moves it into place and returns `path`; readers never
    see half a file.

    Raises `OSError`, with the path, if the disk is full or the folder is read-only; an old file
    then stays as it was.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        partial.replace(path)
    except OSError as error:
        hint = f"{error.strerror} (the environment variable SPECNB_OUT names another folder for what is made)"
        raise OSError(error.errno, hint, str(path)) from error
    finally:
        with suppress(OSError):
            partial.unlink()
    return path
