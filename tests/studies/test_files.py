"""Where data is read and results are written: never over what is committed, and never half of a
file."""

from pathlib import Path

import pytest

from studies import files

pytestmark = pytest.mark.usefixtures("own_results")


@pytest.mark.parametrize("unset", [True, False])
def test_results_go_elsewhere_unless_asked(unset: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPECNB_OUT") if unset else monkeypatch.setenv("SPECNB_OUT", "")
    assert files.out() == files.ROOT / "build" / "own"


@pytest.mark.parametrize("name", ["results/05_sweep", "audit/results/03_power"])
def test_a_table_of_this_run_is_read_before_the_committed_one(name: str, tmp_path: Path) -> None:
    committed = files.read_table(name)
    made = files.write(tmp_path / files.located("data", f"{name}.csv"), "x\n0.333333\n2\n")
    assert files.data_file(f"{name}.csv") == made
    assert len(committed) > 2
    assert files.read_table(name, dtype=str).x.tolist() == ["0.333333", "2"]


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = files.write(tmp_path / "table.csv", "old")

    def stop(self: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        files.write(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]
