"""Where the trained pair is looked for, and the error where there is none."""

from pathlib import Path

import pytest

from specnb.models import loading as trained_pair
from specnb.models.loading import TRAINED_PAIR, find_pair, load_model, load_pair


def test_the_installed_pair_comes_before_the_checkout(tmp_path: Path) -> None:
    package, checkout = tmp_path / "specnb", tmp_path / "clone"
    (package / "_pair").mkdir(parents=True)
    assert find_pair(package, checkout) == checkout / "data" / "pair"
    (package / "_pair" / "target").mkdir()
    assert find_pair(package, checkout) == package / "_pair"


def test_the_pair_is_found_here() -> None:
    assert (TRAINED_PAIR / "target" / "config.json").is_file()
    assert (TRAINED_PAIR / "draft" / "config.json").is_file()


def test_without_the_pair_the_error_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained_pair, "TRAINED_PAIR", tmp_path)
    for load in (load_model, lambda folder: load_pair(folder, tmp_path / "draft")):
        with pytest.raises(FileNotFoundError, match=r"the trained pair is not installed.* from its wheel"):
            load(tmp_path / "target")
