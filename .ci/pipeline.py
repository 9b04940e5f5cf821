"""Runs snakemake with the arguments given, once at a time in this folder: .venv/bin/python
.ci/pipeline.py --cores 2

Snakemake's own lock stays after `kill -9`, and the next run ends with a LockException. This one is
the operating system's, which ends with the process that has it.
"""

import fcntl
import os
import sys
from pathlib import Path

LOCK = Path(__file__).resolve().parent.parent / "build" / "pipeline.lock"


def main() -> None:
    LOCK.parent.mkdir(exist_ok=True)
    lock = LOCK.open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise SystemExit("notebooks are being run in this folder by another make; wait for it to end") from None
    os.set_inheritable(lock.fileno(), True)
    os.execvp("snakemake", ["snakemake", "--nolock", *sys.argv[1:]])


if __name__ == "__main__":
    main()
