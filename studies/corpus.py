"""The corpus: Python source files of packages that are installed for other reasons, PyTorch and
figures.

The manifest `data/corpus.csv` states package, version, file, split and SHA-256. A file with other
contents is refused, so all machines train and measure on the same text. `python -m studies.corpus`
writes the manifest.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("sympy", "networkx", "mpmath", "seaborn")
DATA = Path(__file__).resolve().parents[1] / "data"
MANIFEST = DATA / "corpus.csv"
SIZES = range(1_000, 150_001)  # bytes; shorter files are boilerplate, longer ones tables of numbers
HELD_OUT_ONE_IN = 20


class Source(NamedTuple):
    """One row of the manifest: a file of an installed package."""

    package: str
    version: str
    path: str
    split: str
    sha256: str


def manifest(path: Path = MANIFEST) -> list[Source]:
    """The rows of the corpus manifest, in its order (by package, then path)."""
    with path.open(newline="", encoding="utf-8") as file:
        return [Source(**row) for row in csv.DictReader(file)]


def read(split: str, limit: int | None = None, path: Path = MANIFEST) -> list[str]:
    """The texts of the files of `split` (`"train"` or `"held-out"`), the first `limit` of them.

    Raises `RuntimeError` when an installed file is missing or is not the one that the manifest
    names; the message says what to install.
    """
    sources = [source for source in manifest(path) if source.split == split][:limit]
    return [_verified(source).decode("utf-8") for source in sources]


def _verified(source: Source) -> bytes:
    install = f"install it with: pip install '{source.package}=={source.version}'"
    try:
        file = Path(str(metadata.distribution(source.package).locate_file(source.path)))
        content = file.read_bytes()
    except (metadata.PackageNotFoundError, FileNotFoundError) as error:
        raise RuntimeError(f"{source.path} of {source.package} is not there; {install}") from error
    if hashlib.sha256(content).hexdigest() != source.sha256:
        raise RuntimeError(
            f"{source.path} is not the file that {MANIFEST.name} names (installed: {source.package} "
            f"{metadata.version(source.package)}, expected: {source.version}, unchanged); {install}"
        )
    return content


def _listed(package: str) -> Iterator[Source]:
    distribution = metadata.distribution(package)
    for entry in sorted(distribution.files or [], key=str):
        if entry.suffix != ".py" or "tests" in entry.parts or entry.name.startswith("test_"):
            continue
        content = Path(str(entry.locate())).read_bytes()
        if len(content) in SIZES:
            digest = hashlib.sha256(content).hexdigest()
            split = "held-out" if int(digest, 16) % HELD_OUT_ONE_IN == 0 else "train"
            yield Source(package, distribution.version, str(entry), split, digest)


def write_manifest(path: Path = MANIFEST) -> int:
    """Writes the manifest of the installed packages; returns the number of files.

    Every module of `PACKAGES` outside their tests; one in twenty, chosen by its hash, is held out.
    """
    rows = [source for package in PACKAGES for source in _listed(package)]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([Source._fields, *rows])
    return len(rows)


if __name__ == "__main__":
    print(f"{write_manifest()} files in {MANIFEST}")
