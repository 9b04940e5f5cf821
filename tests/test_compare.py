"""The comparison of what a run made with what is committed: the same, measured, or different; and
taking it over."""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from script_files import script

FILES = {
    "data/results/00_numbers.csv": "x\n1\n2\n",
    "data/results/00.claims.csv": "id\n",
    "data/results/claims.csv": "id\n",
    "figures/00_one.svg": "<svg/>",
    "paper/tables/claims.tex": "claims",
}
NOTEBOOK = "notebooks/00_first.ipynb"


@pytest.fixture(scope="module", name="script")
def compare_script() -> ModuleType:
    return script("workflow/compare.py")


def notebook(printed: str = "7", timed: str = "1 ms", words: str = "# test", code: str = "f()") -> NotebookNode:
    picture = new_output("display_data", data={"image/svg+xml": f"<svg>{timed}</svg>", "text/plain": "<Figure>"})
    cells = [
        new_markdown_cell(words, id="words"),
        new_code_cell(code, id="a", outputs=[new_output("stream", text=printed), picture]),
        new_code_cell("time()", id="b", metadata={"tags": ["nbval-ignore-output"]}),
    ]
    cells[2].outputs = [new_output("stream", text=timed)]
    made: NotebookNode = new_notebook(
        cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    )
    return made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project whose run in `build` made what is committed; files of the project itself lie beside
    it."""
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook(), tmp_path / NOTEBOOK)
    for folder in ("data", "figures", "paper", "notebooks"):
        shutil.copytree(tmp_path / folder, tmp_path / "build" / folder)
    for name in ("data/results/bench.csv", "data/results/00.run.json", "paper/paper.typ", "notebooks/README.md"):
        (tmp_path / name).write_text("not made by the pipeline")
    return tmp_path


def test_a_pdf_may_differ_in_its_last_digits_where_the_svg_is_the_same(root: Path, script: ModuleType) -> None:
    for folder, content in ((root, "1.0000001"), (root / "build", "1.0000002")):
        (folder / "figures/00_other.pdf").write_text(content)
        (folder / "figures/00_other.svg").write_text("1.0")
    assert script.main([], root) == 0
    (root / "build/figures/00_other.svg").write_text("1.1")
    assert script.main([], root) == 1
    (root / "build/figures/00_other.svg").unlink()
    (root / "figures/00_other.svg").unlink()
    assert script.main([], root) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "data/results/00_numbers.csv",
            "x\n1\n3\n",
            "    only numbers differ, by at most 0.3 of their size\n    @@ -3 +3 @@\n    -2\n    +3\n",
        ),
        (
            "data/results/00_numbers.csv",
            "x\n1\n2.0000000002\n",
            "    only numbers differ, by at most 1e-10 of their size\n",
        ),
        ("data/results/00_numbers.csv", "y\n1\n3\n", "  data/results/00_numbers.csv\n    @@ -1 +1 @@\n"),
        ("data/results/00_new.csv", "x\n", "    not committed\n"),
        ("data/results/00_numbers.csv", None, "    committed, and not made any more\n"),
        ("paper/tables/claims.tex", "other", "    -claims\n    +other\n"),
        (
            NOTEBOOK,
            notebook(printed="8"),
            "    in the cell `f()`\n    only numbers differ, by at most 0.1 of their size\n    @@ -1 +1 @@\n    -7\n",
        ),
        (NOTEBOOK, notebook(code="g()"), "    the code was edited after this run; run it again\n"),
    ],
)
def test_a_difference_is_shown_and_can_be_accepted(
    root: Path, script: ModuleType, capsys: pytest.CaptureFixture[str], name: str, content: Any, says: str
) -> None:
    made = root / "build" / name
    if content is None:
        made.unlink()
    elif isinstance(content, str):
        made.write_text(content)
    else:
        nbformat.write(content, made)
    assert script.main([], root) == 1
    said = capsys.readouterr().out
    assert "1 differ, and must not" in said
    assert f"  {name}\n" in said
    assert says in said

    if "edited" in says:
        with pytest.raises(SystemExit, match="edited after this run"):
            script.main(["--accept"], root)
        return
    assert script.main(["--accept"], root) == 0
    assert script.main([], root) == 0
    assert (root / "data" / "results" / "bench.csv").exists()


def test_what_was_measured_may_differ(root: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Cells tagged so and pictures; they are taken over on request only."""
    nbformat.write(notebook(timed="2 ms"), root / "build" / NOTEBOOK)
    (root / "build" / "figures" / "00_speed_timed.svg").write_text("<svg/>")  # is never committed
    before = (root / NOTEBOOK).read_bytes()
    assert script.main(["--accept"], root) == 0
    assert f"1 differ in what was measured or drawn, as they may: {NOTEBOOK}\n" in capsys.readouterr().out
    assert (root / NOTEBOOK).read_bytes() == before
    assert script.main(["--accept", "--measured"], root) == 0
    assert not (root / "figures" / "00_speed_timed.svg").exists()
    assert nbformat.read(root / NOTEBOOK, as_version=4).cells[2].outputs[0].text == "2 ms"


def test_text_of_the_committed_notebook_stays(root: Path, script: ModuleType) -> None:
    nbformat.write(notebook(words="# better words"), root / NOTEBOOK)
    nbformat.write(notebook(printed="8"), root / "build" / NOTEBOOK)
    assert script.main(["--accept"], root) == 0
    cells = nbformat.read(root / NOTEBOOK, as_version=4).cells
    assert (cells[0].source, cells[1].outputs[0].text) == ("# better words", "8")


def test_only_notebooks_that_were_run_are_compared(
    root: Path, script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a simulated processor: no other notebook, no claims, no paper."""
    part = root / "build" / "elsewhere"
    for name in (NOTEBOOK, "data/results/00_numbers.csv", "data/results/00.claims.csv", "figures/00_one.svg"):
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, part / name)
    for other in ("data/results/01_other.csv", "audit/data/results/00_numbers.csv"):
        (root / other).parent.mkdir(parents=True, exist_ok=True)
        (root / other).touch()
    assert script.main([str(part)], root) == 0
    assert capsys.readouterr().out == "4 files are as committed\n"


def test_a_notebook_is_tidied(tmp_path: Path, script: ModuleType) -> None:
    """Results stay; progress bars, warnings, addresses, times and versions go."""
    warning = new_output("stream", name="stderr", text="slow")
    bar = new_output("display_data", data={script.WIDGET: {}, "text/plain": "Loading: 100%|###| 1/1"})
    result = new_output("execute_result", data={"text/plain": "<Styler at 0x7f42>"})
    cell = new_code_cell("1", outputs=[warning, bar, result], metadata={"papermill": {"duration": 1}, "tags": []})
    metadata = {"language_info": {"name": "python", "version": "3.11"}, "papermill": {}, "widgets": {}}
    nbformat.write(new_notebook(cells=[cell], metadata=metadata), tmp_path / "from.ipynb")
    script.main(["--tidy", str(tmp_path / "from.ipynb"), str(tmp_path / "to.ipynb")])
    done = nbformat.read(tmp_path / "to.ipynb", as_version=4)
    assert [output.data["text/plain"] for output in done.cells[0].outputs] == ["<Styler at 0x0>"]
    assert (done.cells[0].metadata, done.metadata) == ({}, {"kernelspec": {}, "language_info": {"name": "python"}})
