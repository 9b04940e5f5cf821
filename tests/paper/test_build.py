"""The paper: every number comes from a result, what is missing stops it, and it is the same file each time."""

import json
import re
import shutil
from pathlib import Path

import pytest

from paper import build
from paper.numbers import numbers
from paper.reading import Missing, Results
from specnb.notebook import findings as results

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "paper" / "paper.typ").read_text()
NUMBERS = (ROOT / "paper" / "numbers.json").read_bytes()

# What may have digits in the text: everything else comes from numbers.json.
ALLOWED = {
    "comment": r"//[^\n]*",
    "name of a number or a figure": r"#n(\.[\w-]+)+|\"\d\d_\w+\"",
    "quotation of a source": r"\"[^\"]*\"",
    "place in a source": r"(Table|Section|Appendix|Equation|Theorem|[Ss]tep) \d+|\bA\.\d",
    "name": r"\b[A-Za-z]+\d+\b",
    "level of the intervals": r"95% intervals",
}
CONSTANTS = r"(?<![\d.])[012](?![\d.])"  # in mathematics


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the results and figures, with verdicts collected anew."""
    for folder in ("data/results", "figures"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.setenv("SPECNB_OUT", str(tmp_path))
    results.main()
    return tmp_path


def typed(text: str) -> list[str]:
    """Lines of a Typst text that have a digit which is not allowed."""
    for pattern in ALLOWED.values():
        text = re.sub(pattern, "", text)
    text = re.sub(r"\$[^$]*\$", lambda maths: re.sub(CONSTANTS, "", maths.group()), text)
    return [line for line in text.splitlines() if re.search(r"\d", line)]


def test_no_number_is_typed() -> None:
    assert typed(TEXT) == []


@pytest.mark.parametrize("slip", ["a speed-up of 2.3", "in 45 cases", "$alpha = 0.76$", "$10^(-6)$", "87% of them"])
def test_a_typed_number_would_be_seen(slip: str) -> None:
    assert typed(f"It has {slip}.\n") == [f"It has {slip}."]


def test_every_number_is_used(project: Path) -> None:
    found = numbers(Results(project / "data" / "results"))
    named = {f"{part}.{name}" for part, names in found.items() for name in names}
    style = (ROOT / "paper" / "style.typ").read_text()
    assert named | {f"tables.{name}" for name in build.TABLES} == set(
        re.findall(r"\bn\.([\w-]+\.[\w-]+)", TEXT + style)
    )


def test_the_paper_is_the_same_each_time(project: Path) -> None:
    first = build.build()
    assert first == build.build()
    assert first["paper.pdf"].startswith(b"%PDF")


def test_the_committed_paper_is_made_of_the_committed_results(project: Path) -> None:
    made = build.build()
    for name in sorted(set(made) - {"paper.pdf"}):
        assert (ROOT / "paper" / name).read_bytes() == made[name], f"paper/{name} is stale; `make paper`"


@pytest.mark.parametrize(
    "name", ["data/results/06_speedup.csv", "data/results/engine_checks.csv", "figures/00_steps.pdf"]
)
def test_a_missing_result_stops_it_by_name(project: Path, name: str) -> None:
    (project / name).unlink()
    with pytest.raises(Missing, match=re.escape(name)):
        build.build()


def test_a_number_that_no_verdict_stores_stops_it(project: Path) -> None:
    path = project / "data" / "results" / "03.numbers.json"
    stored = json.loads(path.read_text())
    stored["oracle-gamma"].pop("gain_limit")
    path.write_text(json.dumps(stored))
    with pytest.raises(Missing, match="oracle-gamma stores no number 'gain_limit'"):
        numbers(Results(path.parent))


def test_no_semicolon_is_swallowed() -> None:
    """Typst takes a semicolon after an embedded expression for its end and prints none."""
    assert re.findall(r"#n(?:\.[\w-]+)+;", TEXT) == []


def test_a_figure_over_a_table_stops_it() -> None:
    """A wide figure of the page's foot is drawn over a table for which the column has no room left."""
    page = """#import "style.typ": *
#show: paper.with(title: [t], authors: "a", abstract: [b])
#records(((a: "word"),) * 20, (("a", [a]),), [a table])
#v(SPACE)
#metadata(none) <wide-top>"""
    files = {"style.typ": (ROOT / "paper" / "style.typ").read_bytes(), "numbers.json": NUMBERS}
    build.compiled(files | {"paper.typ": page.replace("SPACE", "1mm").encode()})
    with pytest.raises(RuntimeError, match="a figure is drawn over a table on page 1"):
        build.compiled(files | {"paper.typ": page.replace("SPACE", "-30mm").encode()})


def test_main_names_what_is_missing_and_writes_nothing(project: Path) -> None:
    (project / "data" / "results" / "06_speedup.csv").unlink()
    with pytest.raises(SystemExit, match=r"no paper: data/results/06_speedup\.csv is missing"):
        build.main()
    assert not (project / "paper").exists()


def test_main_writes_the_paper(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build.main()
    assert "paper/paper.pdf" in capsys.readouterr().out
    values = json.loads((project / "paper" / "numbers.json").read_text())
    assert values["claims"]["all"] == str(len(values["tables"]["claims"]))
    fragment = (project / "paper" / "tables" / "claims.tex").read_text()
    assert r"\begin{longtable}" in fragment
    assert all(row["claim"] in fragment for row in values["tables"]["claims"])


@pytest.mark.parametrize(("source", "says"), [('#set text(font: "Nope")\nHi', "nope"), ("#nothing", "nothing")])
def test_errors_and_warnings_stop_it(source: str, says: str) -> None:
    with pytest.raises(RuntimeError, match=says):
        build.compiled({"paper.typ": source.encode()})


def test_every_reference_is_cited() -> None:
    keys = set(re.findall(r"^@\w+\{(\w+),", (ROOT / "paper" / "references.bib").read_text(), flags=re.MULTILINE))
    assert keys <= set(re.findall(r"@(\w+)", TEXT))
