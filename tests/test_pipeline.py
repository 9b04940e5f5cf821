"""The pipeline on a project of two small notebooks, of which the second, of the audit, reads the
first one's table."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from script_files import script

from studies.files import located

ROOT = Path(__file__).parent.parent
COPIED = ("studies/__init__.py", "studies/files.py", "data/claims.yml", "data/corpus.csv")
SECOND = "audit/01_second"
READS = {"00_first": "reference/given", SECOND: "results/00_numbers"}
PARAMETERS = "n: int = 1  # what is added, from 1\ntext: str = ''  # what is written"
CODE = """
import pandas
from notebooks.support.claims import notebook
from specnb import used
from studies.files import read_table
nb = notebook("{number}")
given = int(read_table("{reads}").x[0])
nb.table("numbers", pandas.DataFrame({{"x": [given + n + used.ZERO], "text": [text]}}))
nb.close()
print("rows:", given)
"""
BOTH = {"notebook_00", "notebook_audit_01", "claims", "all"}

pytestmark = pytest.mark.minutes


def write_notebook(project: Path, name: str, code: str = CODE, words: str = "# test") -> None:
    cells = [
        new_markdown_cell(words, id="words"),
        new_code_cell(PARAMETERS, id="parameters", metadata={"tags": ["parameters"]}),
        new_code_cell(code.format(number=name.split("_")[0], reads=READS[name]), id="code"),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), project / located("notebooks", f"{name}.ipynb"))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In a path that some tools dislike. The tests are steps in its life; each leaves it as it
    was."""
    root = tmp_path_factory.mktemp("project") / "with späce"
    for folder in ("workflow", "notebooks/support"):
        shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in COPIED:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    for folder in ("specnb", "data/reference", "data/results", "figures", "audit/notebooks"):
        (root / folder).mkdir(parents=True)
    (root / "specnb" / "__init__.py").touch()
    (root / "specnb" / "used.py").write_text("ZERO = 0\n")
    (root / "data" / "reference" / "given.csv").write_text("x\n5\n")
    (root / "workflow/config.yml").write_text("notebooks: {}\n")
    for name in READS:
        write_notebook(root, name)
    ended, output = snakemake(root)
    assert ended == 0, output
    return root


def call(project: Path, *command: str) -> tuple[int, str]:
    """The exit status of a command, and what it says."""
    done = subprocess.run(
        command, cwd=project, env=environment(project), text=True, encoding="utf-8", timeout=300,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout


def environment(project: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "SPECNB_OUT"}
    settings = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(project),
        "XDG_CACHE_HOME": str(project / "cache"),
        "LC_ALL": "C",
    }
    return inherited | settings


def snakemake(project: Path, *arguments: str) -> tuple[int, str]:
    return call(project, "snakemake", "--cores", "1", "--quiet", "rules", "host", *arguments)


def compare(project: Path, *arguments: str) -> tuple[int, str]:
    return call(project, sys.executable, "workflow/compare.py", *arguments)


def planned(project: Path, *arguments: str) -> set[str]:
    """The rules that would run."""
    ended, output = snakemake(project, "-n", *arguments)
    assert ended == 0, output
    return set(re.findall(r"^(all|claims|notebook_\w+) +1$", output, flags=re.MULTILINE))


def table(project: Path, folder: str, name: str) -> str:
    return (project / folder / located("data/results", f"{name}_numbers.csv")).read_text()


def test_a_run_is_compared_and_accepted_and_then_nothing_is_left_to_do(project: Path) -> None:
    assert table(project, "build", "audit/01") == "x,text\n7,\n"
    assert list((project / "data" / "results").iterdir()) == []
    ended, output = compare(project)
    assert ended == 1
    assert "audit/data/results/01_numbers.csv\n    not committed" in output
    assert "in the cell `import pandas`" in output

    assert compare(project, "--accept")[0] == 0
    assert compare(project) == (0, "9 files are as committed\n")
    committed = nbformat.read(project / "audit" / "notebooks" / "01_second.ipynb", as_version=4)
    assert committed.cells[2].outputs[-1].text == "rows: 6\n"
    assert [cell.metadata for cell in committed.cells] == [{}, {"tags": ["parameters"]}, {}]
    assert planned(project) == set()


@pytest.mark.parametrize(
    ("file", "old", "new", "run"),
    [
        ("specnb/used.py", "ZERO = 0", "ZERO = 1", BOTH),
        ("data/reference/given.csv", "5", "6", BOTH),
        ("audit/notebooks/01_second.ipynb", "int = 1", "int = 2", BOTH - {"notebook_00"}),
        ("audit/notebooks/01_second.ipynb", "# test", "# other words", set()),
        ("specnb/used.py", "ZERO", "ZERO", set()),  # another time stamp
    ],
)
def test_a_change_runs_what_depends_on_it(project: Path, file: str, old: str, new: str, run: set[str]) -> None:
    before = (project / file).read_text()
    assert old in before
    (project / file).write_text(before.replace(old, new))
    found = planned(project)
    (project / file).write_text(before)
    assert found == run


def test_a_new_module_and_a_lost_output_are_noticed(project: Path) -> None:
    new = project / "specnb" / "new.py"
    new.touch()
    assert planned(project) == BOTH
    new.unlink()
    made = project / "build" / "audit" / "data" / "results" / "01_numbers.csv"
    made.rename(made.with_suffix(".away"))
    assert planned(project) == BOTH - {"notebook_00"}
    made.with_suffix(".away").rename(made)


def test_other_parameters_go_elsewhere(project: Path) -> None:
    mine = {SECOND: {"parameters": {"n": 3, "text": 'a: {b} "c"\n'}}}
    (project / "mine.yml").write_text(yaml.safe_dump({"notebooks": mine}))
    ended, output = snakemake(project, "--configfile", "mine.yml")
    assert ended == 0, output
    assert table(project, "build/own", "audit/01") == 'x,text\n9,"a: {b} ""c""\n"\n'
    assert compare(project) == (0, "9 files are as committed\n")

    mine[SECOND]["parameters"]["n"] = 4
    (project / "mine.yml").write_text(yaml.safe_dump({"notebooks": mine}))
    assert planned(project, "--configfile", "mine.yml") == BOTH - {"notebook_00"}


def test_a_sweep_gathers_its_runs_and_a_failing_one_stops_no_other(project: Path) -> None:
    asked: dict[str, Any] = {"notebook": SECOND, "parameters": {"text": "a"}, "grid": {"n": [3, -1, 4]}}
    (project / "mine.yml").write_text(yaml.safe_dump(asked))
    ended, output = snakemake(project, "--keep-going", "--config", "sweep=mine.yml")
    assert ended != 0
    assert "# audit/01_second over n: 2 of 3 runs are done" in output
    assert re.search(r"\| -1 \| failed: ValueError: n = -1 is not allowed: int, what is added, from 1\. ", output)
    made = project / "build" / "own" / "sweeps" / "mine"
    table = [line.split(",")[1:] for line in (made / "table.csv").read_text().splitlines()]
    assert [(line[0], line[-1]) for line in table if line[1:4] == ["numbers", "0", "x"]] == [("3", "9"), ("4", "10")]
    titles = re.findall(r"^## (\w+)", (made / "summary.md").read_text(), re.MULTILINE)
    assert titles == ["Verdicts"], "this notebook has claims and no numbers of them"
    assert compare(project) == (0, "9 files are as committed\n")

    asked["grid"]["n"][1] = 5
    (project / "mine.yml").write_text(yaml.safe_dump(asked))
    ended, output = snakemake(project, "-n", "--config", "sweep=mine.yml")
    assert re.search(r"^swept +1$", output, re.MULTILINE), output


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"notebooks": {"02_third": {"parameters": {"n": 3}}}}, "there is no notebooks/02_third.ipynb"),
        ({"notebook": SECOND, "grid": {"m": [3]}}, "01_second.ipynb: there is no parameter m, only n"),
        ({"notebook": SECOND, "grid": {"n": 3}}, "wrong.yml: a sweep has `notebook`, `grid` (lists of values"),
    ],
)
def test_unknown_names_stop_it_at_once(project: Path, given: dict[str, object], says: str) -> None:
    (project / "wrong.yml").write_text(yaml.safe_dump(given))
    option = ("--configfile", "wrong.yml") if "notebooks" in given else ("--config", "sweep=wrong.yml")
    ended, output = snakemake(project, *option)
    assert ended != 0
    assert says in output


def test_a_failing_notebook_leaves_its_outputs_and_what_is_committed(project: Path) -> None:
    results = project / "audit" / "data" / "results"
    committed = {file: file.read_bytes() for file in results.iterdir()}
    write_notebook(project, SECOND, CODE + "raise ValueError('the check failed')")
    ended, output = snakemake(project)
    assert ended != 0
    assert "the check failed" in output
    log = nbformat.read(project / "build" / "logs" / "audit" / "01_second.ipynb", as_version=4)
    assert any(output.get("text") == "rows: 6\n" for output in log.cells[-1].outputs)
    assert {file: file.read_bytes() for file in results.iterdir()} == committed


def test_a_notebook_that_outlives_a_killed_run_keeps_the_lock_and_nothing_else_does(project: Path) -> None:
    started = project / "started"
    code = f"from pathlib import Path\nPath({str(started)!r}).touch()\nimport time\ntime.sleep(600)\n"
    write_notebook(project, SECOND, code)
    command = [sys.executable, "workflow/pipeline.py", "--cores", "1", "--quiet", "rules", "host"]
    with subprocess.Popen(command, cwd=project, env=environment(project), start_new_session=True) as running:
        try:
            while not started.exists() and running.poll() is None:
                time.sleep(0.1)
            assert started.exists()
            running.kill()
            running.wait()
            ended, output = call(project, *command)
        finally:
            os.killpg(running.pid, signal.SIGKILL)
            write_notebook(project, SECOND)
    assert ended == 1
    assert output.endswith("wait for it to end\n")
    assert call(project, *command, "-n")[0] == 0


def test_a_sweep_of_a_notebook_without_results_says_so(tmp_path: Path) -> None:
    sweep = script("workflow/sweep.py")
    (tmp_path / "mine.yml").write_text("notebook: 01_from_scratch\ngrid: {seed: [1]}\n")
    (run,) = sweep.read(tmp_path / "mine.yml").runs
    made = tmp_path / "sweeps/mine" / run
    made.mkdir(parents=True)
    (made / "notebook.ipynb").write_text("{}")
    assert "01_from_scratch writes no tables and judges no claims" in sweep.gather(tmp_path / "mine.yml", tmp_path)
