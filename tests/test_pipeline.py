"""The pipeline on two small notebooks: contents decide what runs, and own parameters write elsewhere."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_project import configure, results, run, runs, small_project

from specnb.notebook import reproduce

pytestmark = pytest.mark.minutes


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return small_project(tmp_path)


def test_contents_decide_what_runs(project: Path) -> None:
    """One project through its life; each state is cheap to reach from the one before."""
    output = run(project)
    assert runs(project) == ["00", "01"]
    table = project / "data" / "results" / "01_numbers.csv"
    assert table.read_text() == 'n,rate,text\n7,1e-06,"a: {b}\n"\n'
    assert len((project / "data" / "results" / "claims.csv").read_text().splitlines()) > 70
    assert "ran: 00_first, 01_second\nup to date: none" in output
    assert "0 holds, 0 refuted, 0 conditional" in output
    made = results(project)

    # Words, time stamps of the future and Snakemake's own records do not matter; an emptied table does.
    (project / "specnb" / "used.py").write_text('"""Documented."""\n\nZERO = 0  # explained\n')
    (project / "specnb" / "unused.py").write_text("NEW = 1\n")
    for file in (project / "notebooks" / "00_first.ipynb", project / "data" / "corpus.csv"):
        os.utime(file, (time.time() + 1e6,) * 2)
    for file in (path for path in (project / ".snakemake").rglob("*") if path.is_file()):
        file.write_bytes(b"\0{")
    table.write_text("")
    assert "ran: 01_second\nup to date: 00_first" in run(project)
    assert results(project) == made

    # Code that is imported does matter.
    (project / "specnb" / "used.py").write_text("ZERO = 1\n")
    assert "ran: 00_first, 01_second" in run(project)
    assert table.read_text() == 'n,rate,text\n8,1e-06,"a: {b}\n"\n'


def test_other_parameters_go_elsewhere(project: Path) -> None:
    configure(project, n=3)
    (project / "config.yml").rename(project / "mine.yml")
    configure(project)
    run(project, "--configfile", "mine.yml", HOME="/dev/null", LC_ALL="C")
    assert results(project) == {}
    own = project / "build" / "own" / "data" / "results" / "00_numbers.csv"
    assert own.read_text() == 'n,rate,text\n3,1e-06,"a: {b}\n"\n'


def test_a_promised_file_that_is_not_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "_execute", lambda name, entry, made, log: (made / "left").touch())
    with pytest.raises(SystemExit, match=r"00_quickstart did not write .*00\.numbers\.json, data/results/00_x\.csv"):
        reproduce.run("00_quickstart", {"tables": ["x"]}, tmp_path)
    assert list((tmp_path / "build" / "out").iterdir()) == []
    assert not (tmp_path / "left").exists()


def test_an_unreadable_record_means_a_new_run(tmp_path: Path) -> None:
    record = tmp_path / "build" / "notebooks" / "00_quickstart.json"
    assert not reproduce.up_to_date("00_quickstart", {}, tmp_path)
    record.parent.mkdir(parents=True)
    for content in ("", "{", "[]", json.dumps({"entry": {}})):
        record.write_text(content)
        assert not reproduce.up_to_date("00_quickstart", {}, tmp_path)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "build" / "lock"
    code = "import sys, time\nfrom pathlib import Path\nfrom specnb.notebook.reproduce import lock\n"
    code += "held = lock(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(120)"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        process.kill()
    reproduce.lock(path).close()
