"""Do notebooks give the committed results on another processor, or with more threads?

    MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 ATEN_CPU_CAPABILITY=default python tests/portability.py 02 06

runs the notebooks whose names begin so (all, if none is given) as the pipeline does, under the caller's environment,
and prints every text output, table, verdict and figure that differs from the committed one. The exit status is 1 if
anything does. What depends on the clock is not compared: `_timed` files and cells tagged `nbval-ignore-output`.

`--made` runs nothing: it compares the notebooks as `make reproduce` ran them, as far as those runs are up to date.
`--not-made` only prints the others.

`--threads N` sets the notebooks' parameter of that name; `--keep FOLDER` leaves there what the run wrote, under
FOLDER/NN, in place of a temporary folder. Other processors are simulated by the variables that oneDNN, ATen and MKL
read: ONEDNN_MAX_CPU_ISA, ATEN_CPU_CAPABILITY, MKL_ENABLE_INSTRUCTIONS, MKL_CBWR. The last one changes the order of
additions in float64 matrix products, which the others may leave as it is. ATEN_CPU_CAPABILITY is also what
torch's compiler obeys, but its C++ code is built for the processor that is there: code for AVX2 built with AVX-512 gave
NaN, so give CXX a script that passes -march=haswell in place of -march=native.
"""

from __future__ import annotations

import argparse
import configparser
import difflib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import nbformat
import papermill
from nbformat import NotebookNode

from specnb.notebook import origin, reproduce
from specnb.notebook.claims import ROOT
from studies.notebooks import FOLDER, tidy

SANITIZE = Path(__file__).with_name("sanitize.cfg")
MADE = ROOT / "build" / "notebooks"  # where `make reproduce` leaves notebooks as it ran them
SHOWN = 12  # lines of each difference


def sequences(notebook: NotebookNode) -> list[tuple[str, str]]:
    """The source and the compared text of every code cell, sanitised as `make nbval` does."""
    config = configparser.ConfigParser()
    config.read(SANITIZE)
    rules = [(config[name]["regex"], config[name]["replace"]) for name in config.sections()]
    found = []
    for cell in tidy(notebook).cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type != "code" or "injected-parameters" in tags:
            continue
        text = "" if "nbval-ignore-output" in tags else "".join(map(_text, cell.outputs))
        for pattern, replacement in rules:
            text = re.sub(pattern, replacement, text)
        found.append((cell.source, text))
    return found


def _text(output: NotebookNode) -> str:
    data = output.get("data", {})
    return str(output.get("text", "")) + "".join(
        str(data[kind]) for kind in sorted(data) if kind.startswith("text/") or kind.endswith("json")
    )


def run(notebook: Path, folder: Path, threads: int) -> NotebookNode:
    """Executes `notebook` with its own parameters, but `threads` if it has that one; its results go to `folder`."""
    os.environ["SPECNB_OUT"] = str(folder)
    has_threads = "threads" in papermill.inspect_notebook(str(notebook))
    made: NotebookNode = papermill.execute_notebook(
        str(notebook),
        str(folder / notebook.name),
        parameters={"threads": threads} if has_threads else {},
        cwd=str(FOLDER),
        kernel_name="python3",
        progress_bar=False,
    )
    return made


def is_made(notebook: Path) -> bool:
    """Whether `make reproduce` has run `notebook` with the present code, parameters and inputs."""
    return reproduce.up_to_date(notebook.stem, origin.config(ROOT)[notebook.stem], ROOT)


def differences(name: str, made: NotebookNode, folder: Path) -> Iterator[tuple[str, str, str]]:
    """Whatever differs from what is committed: its name, the committed text and the text made by this run."""
    committed = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    pairs = zip(sequences(committed), sequences(made), strict=True)
    for number, ((source, old), (_, new)) in enumerate(pairs):
        if old != new:
            yield f"code cell {number} ({source.strip().splitlines()[0]})", old, new
    for file in origin.promised(name, origin.config(ROOT)[name]):
        before, after = (ROOT / file).read_bytes(), (folder / file).read_bytes()
        if before != after:
            old, new = ("", "") if file.endswith(".pdf") else (before.decode(), after.decode())
            yield file, old, new


def main() -> int:
    """Runs the notebooks that the command line names; returns 1 if anything differs."""
    parser = argparse.ArgumentParser(description="compare notebooks run in this environment with the committed ones")
    parser.add_argument("prefixes", nargs="*", help="beginnings of notebooks' names; all if none is given")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--made", action="store_true", help="compare what `make reproduce` ran; nothing is run")
    parser.add_argument("--not-made", action="store_true", help="print the notebooks that `--made` leaves out")
    parser.add_argument("--keep", type=Path, help="leave what the run wrote in this folder")
    arguments = parser.parse_args()
    named = [path for path in sorted(FOLDER.glob("*.ipynb")) if path.name.startswith(tuple(arguments.prefixes) or "")]
    if arguments.not_made:
        print(*(path.relative_to(ROOT) for path in named if not is_made(path)))
        return 0
    different = 0
    with tempfile.TemporaryDirectory() as temporary:
        for notebook in named:
            if arguments.made:
                if not is_made(notebook):
                    continue
                folder, made = ROOT, nbformat.read(MADE / notebook.name, as_version=4)
            else:
                folder = (arguments.keep or Path(temporary)).resolve() / notebook.name[:2]
                folder.mkdir(parents=True, exist_ok=True)
                made = run(notebook, folder, arguments.threads)
            found = list(differences(notebook.stem, made, folder))
            different += len(found)
            print(f"{notebook.stem}: {len(found)} differ" if found else f"{notebook.stem}: the same", flush=True)
            for what, old, new in found:
                lines = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:]
                print("\n".join([f"  {what}", *(f"    {line[:200]}" for line in lines[:SHOWN])]), flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
