"""Where data is read and results are written: never over what is committed, and never half of a
file."""

import errno
from pathlib import Path

import pytest

from studies import files


@pytest.fixture(autouse=True)
def _out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))


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


@pytest.mark.parametrize("failing", ["mkdir", "write_bytes", "replace"])
def test_a_full_disk_is_named_with_the_path_and_the_way_to_another(
    failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object, **how: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, failing, full)
    file = tmp_path / "table.csv"
    with pytest.raises(OSError, match=r"No space left on device .*SPECNB_OUT names another folder") as raised:
        files.write(file, "new")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(file))
    assert not list(tmp_path.iterdir())
