"""The Snakefile on two small notebooks: a second run does nothing, a stopped one goes on, a failure says so."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent

SETTLE = """
from pathlib import Path
from specnb.results import Findings
findings = Findings("{number}")
findings.table("numbers", __import__("pandas").DataFrame({{"n": [n], "rate": [rate], "text": [text]}}))
{work}
findings.close()
Path("../runs.txt").open("a").write("{number} ")
"""


def _notebook(folder: Path, name: str, work: str = "") -> None:
    cells = [
        new_markdown_cell("# test"),
        new_code_cell("n = 1\nrate = 0.5\ntext = ''", metadata={"tags": ["parameters"]}),
        new_code_cell(SETTLE.format(number=name[:2], work=work)),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), folder / "notebooks" / f"{name}.ipynb")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of two notebooks that share this one's Snakefile."""
    for folder in ("notebooks", "specnb", "data/reference", "data/pair"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "Snakefile").write_text((ROOT / "Snakefile").read_text())
    (tmp_path / "specnb" / "results.py").write_text((ROOT / "specnb" / "results.py").read_text())
    for name in ("claims.csv", "corpus.csv"):
        (tmp_path / "data" / name).write_text((ROOT / "data" / name).read_text())
    notebooks = {
        name: {"parameters": {"n": 7, "rate": 1e-6, "text": "a: b\n"}, "tables": ["numbers"]}
        for name in ("00_first", "01_second")
    }
    (tmp_path / "config.yml").write_text(yaml.safe_dump({"notebooks": notebooks}))
    _notebook(tmp_path, "00_first")
    _notebook(tmp_path, "01_second")
    return tmp_path


def _start(project: Path) -> "subprocess.Popen[str]":
    environment = os.environ | {
        "SPECNB_OUT": str(project),
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(project / "cache"),
    }
    command = [str(BIN / "snakemake"), "--cores", "1", "--rerun-incomplete", "--nolock"]
    return subprocess.Popen(
        command,
        cwd=project,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _run(project: Path) -> tuple[int, str]:
    process = _start(project)
    output, _ = process.communicate(timeout=180)
    return process.returncode, output


def _runs(project: Path) -> list[str]:
    file = project / "runs.txt"
    return file.read_text().split() if file.exists() else []


def test_the_whole_pipeline_runs_once_and_in_order(project: Path) -> None:
    code, output = _run(project)
    assert code == 0, output
    assert _runs(project) == ["00", "01"]
    assert (project / "data" / "results" / "00_numbers.csv").read_text() == 'n,rate,text\n7,1e-06,"a: b\n"\n'
    assert len((project / "data" / "results" / "claims.csv").read_text().splitlines()) > 70
    code, output = _run(project)
    assert code == 0, output
    assert "Nothing to be done" in output
    assert _runs(project) == ["00", "01"]


def test_a_stopped_run_goes_on_where_it_stopped(project: Path) -> None:
    _notebook(project, "01_second", work="Path('../started').touch(); __import__('time').sleep(120)")
    process = _start(project)
    deadline = time.monotonic() + 120
    while not (project / "started").exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert (project / "build" / "notebooks" / "00_first.ipynb").exists()
    assert not (project / "build" / "notebooks" / "01_second.ipynb").exists()

    _notebook(project, "01_second")
    code, output = _run(project)
    assert code == 0, output
    assert _runs(project) == ["00", "01"]


def test_a_failing_notebook_fails_the_run_and_is_kept_for_reading(project: Path) -> None:
    _notebook(project, "01_second", work="raise ValueError('the check failed')")
    code, output = _run(project)
    assert code != 0
    assert "the check failed" in output
    assert not (project / "build" / "notebooks" / "01_second.ipynb").exists()
    assert not (project / "data" / "results" / "01_numbers.csv").exists()
    assert "the check failed" in (project / "build" / "logs" / "01_second.ipynb").read_text()
