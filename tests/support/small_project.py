"""A project of two small notebooks, and the pipeline that runs it as `make reproduce` does."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
# What a notebook needs of this package to leave results behind, and the pipeline to run it.
CODE = tuple(
    f"report/{name}" for name in ("__init__", "source_digest", "origin", "claims", "results", "reproduce")
) + tuple(f"report/verdicts/{path.stem}" for path in sorted((ROOT / "specnb" / "report" / "verdicts").glob("*.py")))

SETTLE = """
from pathlib import Path
import pandas
from specnb import used
from specnb.notebook.findings import Findings
findings = Findings("{number}")
Path("../runs.txt").open("a").write("{number} ")
{work}
findings.table("numbers", pandas.DataFrame({{"n": [n + used.ZERO], "rate": [rate], "text": [text]}}))
findings.close()
"""


def write_notebook(folder: Path, name: str, work: str = "") -> None:
    """A notebook that writes one table, after `work`."""
    cells = [
        new_markdown_cell("# test"),
        new_code_cell("n = 1\nrate = 0.5\ntext = ''", metadata={"tags": ["parameters"]}),
        new_code_cell(SETTLE.format(number=name[:2], work=work)),
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(cells=cells, metadata=kernel), folder / "notebooks" / f"{name}.ipynb")


def configure(project: Path, **parameters: object) -> None:
    """The project's settings, with these parameters for both notebooks."""
    entries = {
        name: {"parameters": {"n": 7, "rate": 1e-6, "text": "a: {b}\n"} | parameters, "tables": ["numbers"]}
        for name in ("00_first", "01_second")
    }
    entries["01_second"]["reads"] = ["data/results/00_numbers.csv"]
    (project / "config.yml").write_text(yaml.safe_dump({"notebooks": entries}))


def small_project(above: Path) -> Path:
    """A project of two notebooks, the second reads the first one's table; in a path that some tools dislike."""
    root = above / "with späce"
    for folder in ("notebooks", "specnb/report/verdicts", "data/reference", "data/pair", "data/results"):
        (root / folder).mkdir(parents=True)
    shutil.copytree(ROOT / "profiles", root / "profiles")
    for file in ("Snakefile", "data/claims.csv", "data/corpus.csv", *(f"specnb/{name}.py" for name in CODE)):
        shutil.copy(ROOT / file, root / file)
    (root / "specnb" / "__init__.py").touch()
    (root / "specnb" / "used.py").write_text("ZERO = 0\n")
    (root / "specnb" / "unused.py").touch()
    configure(root)
    write_notebook(root, "00_first")
    write_notebook(root, "01_second")
    return root


def start(project: Path, *arguments: str, **environment: str) -> "subprocess.Popen[str]":
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


def run(project: Path, *arguments: str, **environment: str) -> str:
    """What the pipeline says; it must end well."""
    process = start(project, *arguments, **environment)
    output, _ = process.communicate(timeout=180)
    assert process.returncode == 0, output
    return output


def runs(project: Path) -> list[str]:
    """The numbers of the notebooks that were executed, in order."""
    file = project / "runs.txt"
    return file.read_text().split() if file.exists() else []


def results(project: Path) -> dict[str, bytes]:
    """The contents of all results by name."""
    return {file.name: file.read_bytes() for file in (project / "data" / "results").iterdir()}


def wait_for(file: Path, process: "subprocess.Popen[str]") -> None:
    """Returns once `file` exists; fails if `process` ends before, or after two minutes."""
    deadline = time.monotonic() + 120
    while not file.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.1)
