"""Runs snakemake with the arguments given, once at a time in this folder: .venv/bin/python
workflow/pipeline.py --cores 2

Snakemake's own lock stays after `kill -9`, and the next run ends with a LockException. This one is
the operating system's: it ends with the processes that have it, this one and the jobs (Snakefile).
"""

import fcntl
import os
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "build" / "pipeline.lock"


def main() -> None:
    try:
        LOCK.parent.mkdir(exist_ok=True)
        lock = LOCK.open("a")
    except OSError as error:
        raise SystemExit(f"{error}: results go to build/, so the checkout has to be in a folder for writing") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit("notebooks are being run in this folder by another make; wait for it to end") from None
    fcntl.flock(lock, fcntl.LOCK_SH)  # nobody else has it; from now on, the jobs have it, too
    os.set_inheritable(lock.fileno(), True)
    os.execvp("snakemake", ["snakemake", "--nolock", *sys.argv[1:]])


if __name__ == "__main__":
    main()
