"""Compares what a run of the pipeline made with what is committed:
`python workflow/compare.py [FOLDER]`.

Text outputs of notebooks, tables, verdicts, figures and paper must be the same; whatever differs is
printed, and the exit status is 1. Cells tagged `nbval-ignore-output` may differ, and pictures in
notebooks, whose files are compared. `_timed` files are not committed. FOLDER is `build` by default;
notebooks that are not in it are left out.

`--accept` copies what must be the same and is not over the committed files, and with `--measured`
also what may differ. Of a notebook it takes the outputs; text and code stay. `--tidy FROM TO` is a
step of the pipeline: it writes an executed notebook without what only the run was about.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path

import nbformat
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
HOMES = ("", "audit/")  # where there are notebooks and what they made
# Home and number of a notebook; of what all of them make, None and None.
Maker = tuple[str | None, str | None]
# The files that the pipeline makes, with their maker; those of one notebook begin with its number.
MADE = re.compile(
    r"((?:audit/)?)(?:notebooks|data/results|figures)/(\d\d[a-z]?)"
    r"(?:_\w+\.(?:ipynb|csv|svg|pdf)|\.claims\.csv|\.numbers\.json)"
    r"|data/results/claims\.csv|paper/(?:(?:paper|supplement)\.pdf|tables/.*)"
)
WIDGET = "application/vnd.jupyter.widget-view+json"
EDITED = "the code was edited after this run; run it again"
SHOWN = 12  # lines of each difference
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d*)?(?:e[-+]?\d+)?")


def tidy(notebook: NotebookNode) -> NotebookNode:
    """`notebook`, changed in place, without progress bars, warnings, addresses, times of day and
    versions."""
    notebook.metadata = {name: notebook.metadata.get(name, {}) for name in ("kernelspec", "language_info")}
    notebook.metadata["language_info"].pop("version", None)
    for cell in notebook.cells:
        cell.metadata = {
            name: value for name, value in cell.metadata.items() if value and name not in ("papermill", "execution")
        }
        if cell.cell_type == "code":
            cell.outputs = tidy_outputs(cell.outputs)
    return notebook


def tidy_outputs(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Results only; what was printed in one go is one output, however it arrived."""
    kept: list[NotebookNode] = []
    for output in outputs:
        data = output.get("data", {})
        shown = data.get("text/plain", "")
        if output.get("name") == "stderr" or (WIDGET in data and "%|" in shown):
            continue
        # The model behind it is gone with its kernel; the output has the words beside it.
        data.pop(WIDGET, None)
        if shown:
            data["text/plain"] = re.sub(r" at 0x[0-9a-f]+>", " at 0x0>", shown)
        if output.output_type == "stream" and kept and kept[-1].output_type == "stream":
            kept[-1].text += output.text
        else:
            kept.append(output)
    return kept


def read(path: Path) -> NotebookNode:
    return tidy(nbformat.read(path, as_version=4))


def write(notebook: NotebookNode, path: Path) -> None:
    path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    """The code cells, without the parameters that papermill put in."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in cells if "injected-parameters" not in cell.metadata.get("tags", [])]


def same_code(one: NotebookNode, other: NotebookNode) -> bool:
    return [cell.source for cell in code_cells(one)] == [cell.source for cell in code_cells(other)]


def with_outputs(committed: NotebookNode, made: NotebookNode) -> NotebookNode:
    """`committed`, changed in place: with the outputs of a run. Raises `SystemExit` for a run of
    other code."""
    if not same_code(committed, made):
        raise SystemExit(f"no outputs are taken over: of a notebook {EDITED}")
    for cell, run in zip(code_cells(committed), code_cells(made), strict=True):
        cell.outputs, cell.execution_count = run.outputs, run.execution_count
    return committed


def text(cell: NotebookNode) -> str:
    """The outputs of a cell that must be the same."""
    if "nbval-ignore-output" in cell.metadata.get("tags", []):
        return ""
    return "\n".join(map(_text, cell.outputs))


def _text(output: NotebookNode) -> str:
    data = output.get("data", {})
    kinds = [kind for kind in sorted(data) if kind.startswith("text/") or kind.endswith("json")]
    return str(output.get("text", "")) + "".join(str(data[kind]) for kind in kinds)


def lines(old: str, new: str) -> list[str]:
    """The lines that differ, below how far numbers are apart, if nothing else differs."""
    found = list(difflib.unified_diff(old.splitlines(), new.splitlines(), lineterm="", n=0))[2:]
    if not found or NUMBER.sub("", old) != NUMBER.sub("", new):
        return found
    pairs = [sorted(map(float, pair), key=abs) for pair in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True)]
    apart = max((abs(more - less) / abs(more) for less, more in pairs if less != more), default=0)
    return [f"only numbers differ, by at most {apart:.1g} of their size", *found]


def notebook_difference(committed: NotebookNode, made: NotebookNode) -> list[str] | None:
    if not same_code(committed, made):
        return [EDITED]
    old, new, found = code_cells(committed), code_cells(made), []
    for before, after in zip(old, new, strict=True):
        if changed := lines(text(before), text(after)):
            found += [f"in the cell `{before.source.strip().splitlines()[0]}`", *changed[:SHOWN]]
    same = [cell.outputs for cell in old] == [cell.outputs for cell in new]
    return found or (None if same else [])


def difference(committed: Path, made: Path) -> list[str] | None:
    """The lines that differ; none if only what was measured or drawn does, `None` if nothing
    does."""
    if not (committed.exists() and made.exists()):
        return ["not committed" if made.exists() else "committed, and not made any more"]
    if made.suffix == ".ipynb":
        return notebook_difference(read(committed), read(made))
    if committed.read_bytes() == made.read_bytes():
        return None
    if made.suffix == ".pdf":
        # Layouts differ in their last digits between processors; places in SVG are rounded.
        svg = [file.with_suffix(".svg") for file in (committed, made)]
        alike = all(map(Path.exists, svg)) and svg[0].read_bytes() == svg[1].read_bytes()
        return [] if alike else ["other bytes"]
    return lines(committed.read_text("utf-8"), made.read_text("utf-8"))


def names(root: Path, makers: set[Maker]) -> set[str]:
    """The files under `root` that the pipeline makes, of these notebooks."""
    folders = [f"{home}{name}" for home in HOMES for name in ("notebooks", "data/results", "figures", "paper")]
    files = [file.relative_to(root).as_posix() for folder in folders for file in (root / folder).rglob("*.*")]
    made = [(name, match.groups()) for name in files if (match := MADE.fullmatch(name)) and "_timed." not in name]
    return {name for name, maker in made if maker in makers}


def accept(committed: Path, made: Path) -> None:
    """Puts what a run made in the place of what is committed."""
    committed.parent.mkdir(parents=True, exist_ok=True)
    if not made.exists():
        committed.unlink()
    elif made.suffix == ".ipynb":
        write(with_outputs(read(committed), read(made)), committed)
    else:
        committed.write_bytes(made.read_bytes())


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    """Compares, accepts or tidies; returns 1 if something differs that must not."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=root / "build")
    parser.add_argument("--accept", action="store_true", help="copy what must be the same and is not")
    parser.add_argument("--measured", action="store_true", help="and what may differ, too")
    parser.add_argument("--tidy", nargs=2, type=Path, metavar=("FROM", "TO"))
    asked = parser.parse_args(arguments)
    if asked.tidy:
        write(read(asked.tidy[0]), asked.tidy[1])
        return 0

    folder = asked.folder.resolve()
    notebooks = [(home, path) for home in HOMES for path in (folder / home / "notebooks").glob("*.ipynb")]
    makers: set[Maker] = {(home, path.name.split("_")[0]) for home, path in notebooks}
    if (folder / "data" / "results" / "claims.csv").exists():
        makers.add((None, None))
    found = {name: difference(root / name, folder / name) for name in names(root, makers) | names(folder, makers)}
    wrong = {name: changed for name, changed in sorted(found.items()) if changed}
    measured = sorted(name for name, changed in found.items() if changed == [])
    print(f"{len(found) - len(wrong) - len(measured)} files are as committed")
    if measured:
        print(f"{len(measured)} differ in what was measured or drawn, as they may: {', '.join(measured)}")
    if wrong:
        print(f"{len(wrong)} differ, and must not; `make accept` puts them in place of the committed ones:")
    for name, changed in wrong.items():
        print(f"  {name}", *(f"    {line[:200]}" for line in changed[:SHOWN]), sep="\n")
    if asked.accept:
        for name in [*wrong, *(measured if asked.measured else [])]:
            accept(root / name, folder / name)
    return int(bool(wrong) and not asked.accept)


if __name__ == "__main__":
    sys.exit(main())
