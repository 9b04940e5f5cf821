"""The corpus is the text that the manifest names, or an error that says what to install."""

from pathlib import Path

import pytest

from studies import corpus


def test_installed_packages_still_give_the_manifest(tmp_path: Path) -> None:
    again = tmp_path / "corpus.csv"
    corpus.write_manifest(again)
    assert again.read_bytes() == corpus.MANIFEST.read_bytes()


def test_splits_share_no_file_and_limits_hold() -> None:
    train = {source.sha256 for source in corpus.manifest() if source.split == "train"}
    held_out = {source.sha256 for source in corpus.manifest() if source.split == "held-out"}
    assert train.isdisjoint(held_out)
    assert len(corpus.read("held-out")) == len(held_out)
    assert corpus.read("held-out", limit=2) == corpus.read("held-out")[:2]


def _manifest_of(source: corpus.Source, path: Path) -> Path:
    path.write_text(",".join(source._fields) + "\n" + ",".join(source) + "\n")
    return path


@pytest.mark.parametrize(
    "change",
    [{"sha256": "0" * 64}, {"path": "sympy/no_such_file.py"}, {"package": "no-such-package"}],
    ids=["other bytes", "no file", "no package"],
)
def test_a_mismatch_says_what_to_install(change: dict[str, str], tmp_path: Path) -> None:
    source = corpus.manifest()[0]._replace(split="train", **change)
    with pytest.raises(RuntimeError, match=f"pip install '{source.package}=={source.version}'"):
        corpus.read("train", path=_manifest_of(source, tmp_path / "m.csv"))
