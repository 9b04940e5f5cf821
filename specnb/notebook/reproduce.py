"""A step of the pipeline: `python -m specnb.notebook.reproduce NAME ENTRY` runs a notebook unless it is up to date.

File contents decide, not time stamps. After a run, `build/notebooks/NAME.json` holds digests of all inputs and outputs;
the notebook is up to date while none of them has changed. It writes to a temporary folder under `build/out`, and its
results replace the old ones only after it has succeeded. If it fails or is killed, the old results stay.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from specnb.notebook import origin
from specnb.notebook.claims import CLAIMS, ROOT
from specnb.notebook.findings import out, versions, write

Entry = dict[str, Any]
State = dict[str, Any]


def inputs(name: str, entry: Entry) -> State:
    """Everything that the results of notebook `name` depend on; `entry` is its entry in the configuration."""
    read = origin.digests([*origin.SHARED, *entry.get("reads", [])], ROOT)
    with CLAIMS.open(newline="", encoding="utf-8") as lines:
        claims = [row["id"] for row in csv.DictReader(lines) if row["notebook"] == name[:2]]
    return {
        "entry": entry,
        "claims": claims,
        **origin.code(ROOT / "notebooks" / f"{name}.ipynb", ROOT),
        "read": read,
        **versions(),
    }


def outputs(name: str, entry: Entry, folder: Path) -> State:
    """Digests of the files that notebook `name` wrote under `folder`, the executed notebook included."""
    return {"written": origin.digests([*_results(name, entry), f"build/notebooks/{name}.ipynb"], folder)}


def _results(name: str, entry: Entry) -> list[str]:
    return [*origin.promised(name, entry, timed=True), f"data/results/{name[:2]}.origin.json"]


def up_to_date(name: str, entry: Entry, folder: Path) -> bool:
    """Whether all results under `folder` exist and were made from the present inputs."""
    try:
        record = json.loads((folder / "build" / "notebooks" / f"{name}.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(record == inputs(name, entry) | outputs(name, entry, folder))


def run(name: str, entry: Entry, folder: Path) -> None:
    """Executes notebook `name` with the parameters of its `entry` and puts its results under `folder`.

    Raises `SystemExit` with the error of the failing cell, or with the names of promised files that were not written.
    """
    before = inputs(name, entry)
    (folder / "build" / "out").mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f"{name[:2]}-", dir=folder / "build" / "out"))
    try:
        _execute(name, entry, made, folder / "build" / "logs" / f"{name}.ipynb")
        lacking = [file for file in _results(name, entry) if not (made / file).exists()]
        if lacking:
            raise SystemExit(f"{name} did not write {', '.join(lacking)}, which config.yml says it does")
        for file in sorted((path for path in made.rglob("*") if path.is_file()), key=_origin_last):
            write(folder / file.relative_to(made), file.read_bytes())
    finally:
        shutil.rmtree(made, ignore_errors=True)
    record = before | outputs(name, entry, folder)
    write(folder / "build" / "notebooks" / f"{name}.json", json.dumps(record, indent=1) + "\n")


def _origin_last(file: Path) -> tuple[bool, str]:
    return file.name.endswith(".origin.json"), str(file)


def _execute(name: str, entry: Entry, made: Path, log: Path) -> None:
    """Runs the notebook with `made` as its output folder; a notebook that fails is kept as `log`."""
    import papermill  # slow to import, and not needed where everything is up to date

    os.environ["SPECNB_OUT"] = str(made)  # the kernel inherits it
    executed = made / "build" / "notebooks" / f"{name}.ipynb"
    executed.parent.mkdir(parents=True)
    try:
        papermill.execute_notebook(
            ROOT / "notebooks" / f"{name}.ipynb",
            executed,
            parameters=entry.get("parameters", {}),
            kernel_name="python3",
            progress_bar=False,
            cwd=ROOT / "notebooks",
        )
    except papermill.PapermillExecutionError as error:
        write(log, executed.read_bytes())
        raise SystemExit(f"{error}\n{name} failed; its results stay as they were, and {log} shows the run") from None


def lock(path: Path) -> IO[str]:
    """A lock on `path`, held until the returned file is closed or the process ends.

    While another process holds it, prints a message and waits.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(
            "another run of the pipeline is active in this folder; waiting for it to end", file=sys.stderr, flush=True
        )
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:  # some network file systems have no locks
        print(f"cannot lock {path} ({error}); make sure that no other run is active here", file=sys.stderr)
    return file


def summary(done: Path) -> str:
    """What the jobs did, by their files in `done`: notebooks that ran, notebooks up to date, claims, paper."""
    messages = {file.stem: file.read_text(encoding="utf-8").strip() for file in sorted(done.glob("*.txt"))}
    notebooks = {name: messages.pop(name) for name in list(messages) if name[:2].isdigit()}
    states = {state: [name for name, its in notebooks.items() if its == state] for state in ("ran", "up to date")}
    lines = [f"{state}: {', '.join(names) or 'none'}" for state, names in states.items()]
    return "\n".join([*lines, *messages.values()])


def main(arguments: list[str] | None = None) -> None:
    """Runs a notebook unless it is up to date, and writes which of the two to `--done`."""
    parser = argparse.ArgumentParser(
        "python -m specnb.notebook.reproduce", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("name", help="of the notebook, without .ipynb")
    parser.add_argument("entry", type=json.loads, help="its entry in config.yml, as JSON")
    parser.add_argument("--done", type=Path, required=True, help="the file to write `ran` or `up to date` to")
    asked = parser.parse_args(arguments)
    folder = out()
    state = "up to date" if up_to_date(asked.name, asked.entry, folder) else "ran"
    if state == "ran":
        print(f"{asked.name}: running", flush=True)
        run(asked.name, asked.entry, folder)
    write(asked.done, state + "\n")


if __name__ == "__main__":
    main()
