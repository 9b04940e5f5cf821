"""The pipeline when something goes wrong: committed results outlive every failure, and two runs at once wait.

In a file of its own, so that it runs beside the other tests of the pipeline.
"""

import os
import signal
from pathlib import Path

import pytest
from small_project import results, runs, small_project, start, wait_for, write_notebook

pytestmark = pytest.mark.minutes


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return small_project(tmp_path)


def test_results_stay_when_a_run_fails_or_is_killed(project: Path) -> None:
    for file in ("00.claims.csv", "00_numbers.csv", "00.origin.json", "claims.csv"):
        (project / "data" / "results" / file).write_text("committed")
    made = results(project)

    write_notebook(project, "00_first", work="raise ValueError('the check failed')")
    process = start(project)
    output, _ = process.communicate(timeout=180)
    assert process.returncode != 0
    assert "the check failed" in output
    assert "the check failed" in (project / "build" / "logs" / "00_first.ipynb").read_text()
    assert results(project) == made

    write_notebook(project, "00_first", work="Path('../started').touch(); __import__('time').sleep(120)")
    process = start(project)
    wait_for(project / "started", process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert results(project) == made


def test_a_second_run_at_once_waits_and_finds_everything_done(project: Path) -> None:
    write_notebook(
        project,
        "00_first",
        work="Path('../started').touch()\nwhile not Path('../go').exists(): __import__('time').sleep(0.1)",
    )
    first = start(project)
    wait_for(project / "started", first)
    second = start(project)
    assert second.stdout
    message = next(line for line in second.stdout if "another run" in line)
    assert "waiting" in message
    (project / "go").touch()
    assert "ran: 00_first, 01_second" in first.communicate(timeout=180)[0]
    assert "up to date: 00_first, 01_second" in second.communicate(timeout=180)[0]
    assert runs(project) == ["00", "01"]
