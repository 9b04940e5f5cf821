"""The folder of the pair of models that this project trained: in an installed wheel, or in a checkout."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def find_pair(package: Path, checkout: Path) -> Path:
    """The folder that holds `target` and `draft`: `package`/_pair if it exists, else `checkout`/data/pair.

    >>> find_pair(Path("nowhere"), Path("clone")).as_posix()
    'clone/data/pair'
    """
    installed = package / "_pair"
    return installed if (installed / "target").is_dir() else checkout / "data" / "pair"


_PACKAGE = Path(str(files("specnb")))
TRAINED_PAIR = find_pair(_PACKAGE, _PACKAGE.parent)


def is_trained(folder: Path) -> bool:
    """Whether `folder` is one of the trained pair, so that its checksums are known."""
    return folder.resolve().parent == TRAINED_PAIR.resolve()


def require_pair(folder: Path) -> None:
    """Raises `FileNotFoundError`, with the ways to get it, if `folder` is one of the trained pair and is missing."""
    if is_trained(folder) and not folder.is_dir():
        raise FileNotFoundError(
            f"the trained pair is not installed: there is no folder {folder}. Install specnb from its wheel, which "
            "contains the pair, or work in a checkout of the repository with data/pair; or give load_pair two folders, "
            "or two names on the Hugging Face hub"
        )
