"""Provenance: every changed input or output is reported by name; text, timings and comments are not."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specnb.notebook import origin

ROOT = Path(__file__).parents[3]
RESULTS = "data/results"
CELLS = ("from specnb import decode\nseed = 1", "%matplotlib inline\nspeed(seed)")


def _notebook(file: Path, *sources: str, words: str = "# A notebook") -> None:
    code = [{"cell_type": "code", "source": source, "metadata": {}, "outputs": []} for source in sources]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": [words]}, *code]}))


def _package(root: Path, **modules: str) -> None:
    for name, source in {"__init__": "", **modules}.items():
        (root / "specnb").mkdir(exist_ok=True)
        (root / "specnb" / f"{name}.py").write_text(source)


def _run(root: Path, seed: int = 1) -> None:
    """What notebook 05 of this project does: it reads `bench.csv` and writes a table, a figure and a claim."""
    start = origin.at_start(root, "05")
    for file in (
        f"{RESULTS}/05.claims.csv",
        f"{RESULTS}/05.numbers.json",
        f"{RESULTS}/05_speed.csv",
        "figures/05_speed.pdf",
        "figures/05_speed.svg",
    ):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_text(f"{file} of {(root / RESULTS / 'bench.csv').read_text()}")
    (root / RESULTS / "05_here_timed.csv").write_text("0.1 s")
    made = origin.at_end(start, root, root, {"seed": seed, "threads": 2})
    (root / RESULTS / "05.origin.json").write_text(json.dumps(made))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one notebook that has been run."""
    for file in (*origin.SHARED, f"{RESULTS}/bench.csv"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(file)
    (tmp_path / "config.yml").write_text(
        "notebooks: {05_walltime: {parameters: {seed: 1, threads: 1}, reads: [data/results/bench.csv],"
        " tables: [speed, here_timed], figures: [speed]}}"
    )
    _package(
        tmp_path,
        probs="X = 1\n",
        decode="from specnb.probs import X\n",
        cli="import specnb.decode\n",
    )
    _notebook(tmp_path / "notebooks" / "05_walltime.ipynb", *CELLS)
    _run(tmp_path)
    return tmp_path


def test_what_was_just_made_is_fresh(project: Path) -> None:
    assert origin.stale(project, project) == []


def test_the_same_run_has_the_same_origin(project: Path) -> None:
    file = project / RESULTS / "05.origin.json"
    first = file.read_bytes()
    _run(project)
    assert file.read_bytes() == first
    assert not re.search(r"\d{4}-\d\d-\d\d|_timed|/tmp", first.decode())


def _edit(file: str, old: str = "", new: str = " ") -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        (root / file).write_text((root / file).read_text().replace(old, new, 1))

    return edit


PLANTED = {
    "a table edited by hand": (_edit(f"{RESULTS}/05_speed.csv"), "05_speed.csv is not what notebook 05 wrote"),
    "a verdict edited by hand": (_edit(f"{RESULTS}/05.claims.csv"), "05.claims.csv is not what notebook 05 wrote"),
    "a number edited by hand": (_edit(f"{RESULTS}/05.numbers.json"), "05.numbers.json is not what notebook 05 wrote"),
    "a figure edited by hand": (_edit("figures/05_speed.pdf"), "05_speed.pdf is not what notebook 05 wrote"),
    "a bench after the run": (_edit(f"{RESULTS}/bench.csv"), "bench.csv is not what notebook 05 read"),
    "a new draft": (_edit(origin.SHARED[1]), f"{origin.SHARED[1]} is not what notebook 05 read"),
    "another corpus": (_edit("data/corpus.csv"), "corpus.csv is not what notebook 05 read"),
    "a bench that is gone": (lambda root: (root / RESULTS / "bench.csv").unlink(), "bench.csv is not what notebook 05"),
    "a cell": (
        lambda root: _notebook(root / "notebooks" / "05_walltime.ipynb", *CELLS, "speed(seed + 1)"),
        "code of notebooks/05_walltime.ipynb has changed",
    ),
    "a module below the one imported": (
        lambda root: _package(root, probs="X = 2\n"),
        "the results of notebook 05 were made by other code than is in specnb.probs",
    ),
    "a run with another seed": (lambda root: _run(root, seed=7), "05 ran with seed = 7, and config.yml says 1"),
    "a promise of another table": (
        _edit("config.yml", "[speed,", "[speed, x, "),
        "05_x.csv is not what notebook 05 wrote",
    ),
    "an input that is no longer listed": (
        _edit("config.yml", "/bench.csv]", "/x.csv]"),
        "notebook 05 read data/results/bench.csv too, and config.yml does not list it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("planted", PLANTED)
def test_what_is_stale_is_named(project: Path, planted: str) -> None:
    plant, says = PLANTED[planted]
    plant(project)
    if planted == "a promise of another table":
        (project / RESULTS / "05_x.csv").write_text("not from this run")
    sentences = origin.stale(project, project)
    assert len(sentences) == 1, sentences
    assert says in sentences[0]


def test_what_is_changed_while_a_notebook_runs_counts_as_changed(project: Path) -> None:
    start = origin.at_start(project, "05")
    _edit(f"{RESULTS}/bench.csv")(project)
    made = origin.at_end(start, project, project, {"seed": 1})
    (project / RESULTS / "05.origin.json").write_text(json.dumps(made))
    assert [sentence for sentence in origin.stale(project, project) if "bench.csv" in sentence]


def test_text_timings_and_threads_do_not_count(project: Path) -> None:
    _notebook(project / "notebooks" / "05_walltime.ipynb", *CELLS, words="# Better words")
    (project / RESULTS / "05_here_timed.csv").unlink()
    _package(project, probs='"""Words."""\n\nX = 1  # more\n', cli="X = 3\n")
    assert origin.stale(project, project) == []


def test_results_elsewhere_are_compared_with_what_they_read_here(project: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "out"
    shutil.copytree(project / "data" / "results", elsewhere / "data" / "results")
    shutil.copytree(project / "figures", elsewhere / "figures")
    (elsewhere / RESULTS / "bench.csv").unlink()
    assert origin.stale(project, elsewhere) == []
    _edit(f"{RESULTS}/bench.csv")(project)
    assert len(origin.stale(project, elsewhere)) == 1


def test_a_notebook_that_config_does_not_name_has_no_origin(project: Path) -> None:
    assert origin.at_start(project, "06") == {}


def test_parameters_are_those_of_the_tagged_cell(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "source": "n = 1", "metadata": {}}]
    cells += [{"cell_type": "code", "source": ["seed = 1  # one\n", "text = ''"], "metadata": {"tags": ["parameters"]}}]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    assert origin.parameters(tmp_path / "a.ipynb") == ["seed", "text"]


def test_committed_results_come_from_the_committed_code() -> None:
    assert origin.stale(ROOT, ROOT) == [], "`make reproduce` makes them again"


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_committed_notebooks_come_from_the_committed_code(path: Path) -> None:
    carried = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("specnb", {}).get("code")
    assert carried == origin.fingerprint(path, ROOT), f"`python -m studies.notebooks {path.stem}` runs it again"
