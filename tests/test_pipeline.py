"""The pipeline on two small notebooks: contents decide what runs, and committed results outlive every failure."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from specnb.report import reproduce

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
# What a notebook needs of this package to leave results behind, and the pipeline to run it.
CODE = tuple(
    f"report/{name}" for name in ("__init__", "source_digest", "origin", "claims", "results", "reproduce")
) + tuple(f"report/verdicts/{path.stem}" for path in sorted((ROOT / "specnb" / "report" / "verdicts").glob("*.py")))

SETTLE = """
from pathlib import Path
import pandas
from specnb import used
from specnb.report.results import Findings
findings = Findings("{number}")
Path("../runs.txt").open("a").write("{number} ")
{work}
findings.table("numbers", pandas.DataFrame({{"n": [n + used.ZERO], "rate": [rate], "text": [text]}}))
findings.close()
"""


def _notebook(folder: Path, name: str, work: str = "") -> None:
    cells = [
        new_markdown_cell("# test"),
        new_code_cell("n = 1\nrate = 0.5\ntext = ''", metadata={"tags": ["parameters"]}),
        new_code_cell(SETTLE.format(number=name[:2], work=work)),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), folder / "notebooks" / f"{name}.ipynb")


def _configure(project: Path, **parameters: object) -> None:
    entries = {
        name: {"parameters": {"n": 7, "rate": 1e-6, "text": "a: {b}\n"} | parameters, "tables": ["numbers"]}
        for name in ("00_first", "01_second")
    }
    entries["01_second"]["reads"] = ["data/results/00_numbers.csv"]
    (project / "config.yml").write_text(yaml.safe_dump({"notebooks": entries}))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of two notebooks, the second reads the first one's table; in a path that some tools dislike."""
    root = tmp_path / "with späce"
    for folder in ("notebooks", "specnb/report/verdicts", "data/reference", "data/pair", "data/results"):
        (root / folder).mkdir(parents=True)
    shutil.copytree(ROOT / "profiles", root / "profiles")
    for file in ("Snakefile", "data/claims.csv", "data/corpus.csv", *(f"specnb/{name}.py" for name in CODE)):
        shutil.copy(ROOT / file, root / file)
    (root / "specnb" / "__init__.py").touch()
    (root / "specnb" / "used.py").write_text("ZERO = 0\n")
    (root / "specnb" / "unused.py").touch()
    _configure(root)
    _notebook(root, "00_first")
    _notebook(root, "01_second")
    return root


def _start(project: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
    """Starts the pipeline as `make reproduce` does."""
    inherited = {name: value for name, value in os.environ.items() if name != "SPECNB_OUT"}
    settings = {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(project),
        "XDG_CACHE_HOME": str(project / "cache"),
    }
    return subprocess.Popen(
        [BIN / "snakemake", "--cores", "1", "--quiet", "rules", "host", *arguments],
        cwd=project,
        env=inherited | settings | environment,
        text=True,
        encoding="utf-8",
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _run(project: Path, *arguments: str, **environment: str) -> str:
    """What the pipeline says; it must end well."""
    process = _start(project, *arguments, **environment)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    return output


def _runs(project: Path) -> list[str]:
    file = project / "runs.txt"
    return file.read_text().split() if file.exists() else []


def _results(project: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (project / "data" / "results").iterdir()}


def _wait_for(file: Path, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 120
    while not file.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_contents_decide_what_runs(project: Path) -> None:
    """One project through its life; each state is cheap to reach from the one before."""
    output = _run(project)
    assert _runs(project) == ["00", "01"]
    table = project / "data" / "results" / "01_numbers.csv"
    assert table.read_text() == 'n,rate,text\n7,1e-06,"a: {b}\n"\n'
    assert len((project / "data" / "results" / "claims.csv").read_text().splitlines()) > 70
    assert "ran: 00_first, 01_second\nup to date: none" in output
    assert "0 holds, 0 refuted, 0 conditional" in output
    made = _results(project)

    # Words, time stamps of the future and Snakemake's own records do not matter; an emptied table does.
    (project / "specnb" / "used.py").write_text('"""Documented."""\n\nZERO = 0  # explained\n')
    (project / "specnb" / "unused.py").write_text("NEW = 1\n")
    for file in (project / "notebooks" / "00_first.ipynb", project / "data" / "corpus.csv"):
        os.utime(file, (time.time() + 1e6,) * 2)
    for file in (path for path in (project / ".snakemake").rglob("*") if path.is_file()):
        file.write_bytes(b"\0{")
    table.write_text("")
    assert "ran: 01_second\nup to date: 00_first" in _run(project)
    assert _results(project) == made

    # Code that is imported does matter.
    (project / "specnb" / "used.py").write_text("ZERO = 1\n")
    assert "ran: 00_first, 01_second" in _run(project)
    assert table.read_text() == 'n,rate,text\n8,1e-06,"a: {b}\n"\n'


def test_results_stay_when_a_run_fails_or_is_killed(project: Path) -> None:
    for file in ("00.claims.csv", "00_numbers.csv", "00.origin.json", "claims.csv"):
        (project / "data" / "results" / file).write_text("committed")
    made = _results(project)

    _notebook(project, "00_first", work="raise ValueError('the check failed')")
    process = _start(project)
    output, _ = process.communicate(timeout=180)
    assert process.returncode != 0
    assert "the check failed" in output
    assert "the check failed" in (project / "build" / "logs" / "00_first.ipynb").read_text()
    assert _results(project) == made

    _notebook(project, "00_first", work="Path('../started').touch(); __import__('time').sleep(120)")
    process = _start(project)
    _wait_for(project / "started", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert _results(project) == made


def test_a_second_run_at_once_waits_and_finds_everything_done(project: Path) -> None:
    _notebook(
        project,
        "00_first",
        work="Path('../started').touch()\nwhile not Path('../go').exists(): __import__('time').sleep(0.1)",
    )
    first = _start(project)
    _wait_for(project / "started", first)
    second = _start(project)
    assert second.stdout
    message = next(line for line in second.stdout if "another run" in line)
    assert "waiting" in message
    (project / "go").touch()
    assert "ran: 00_first, 01_second" in first.communicate(timeout=180)[0]
    assert "up to date: 00_first, 01_second" in second.communicate(timeout=180)[0]
    assert _runs(project) == ["00", "01"]


def test_other_parameters_go_elsewhere(project: Path) -> None:
    _configure(project, n=3)
    (project / "config.yml").rename(project / "mine.yml")
    _configure(project)
    _run(project, "--configfile", "mine.yml", HOME="/dev/null", LC_ALL="C")
    assert _results(project) == {}
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
    code = "import sys, time\nfrom pathlib import Path\nfrom specnb.report.reproduce import lock\n"
    code += "held = lock(Path(sys.argv[1]))\nprint('held', flush=True)\ntime.sleep(120)"
    with subprocess.Popen([sys.executable, "-c", code, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        process.kill()
    reproduce.lock(path).close()
