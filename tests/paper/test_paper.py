"""The paper: numbers come from results, what is missing or untrue stops it, and it is the same file
each time."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typst

from paper.build import assembled, build, compiled, main
from studies.files import located

ROOT = Path(__file__).parent.parent.parent
PAPER = ROOT / "paper"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """A copy of the results and figures."""
    for folder in ("data/results", "figures", "audit/data/results", "audit/figures"):
        shutil.copytree(ROOT / folder, tmp_path / "made" / folder)
    return tmp_path / "made"


def asked(folder: Path, source: str, results: Path = ROOT, modules: str = "derived numbers results remarks") -> Any:
    """The value that the Typst expression `source` has over `results`."""
    tables = assembled(folder, results)
    for home in ("data", "audit/data"):
        # Of studies, too.
        shutil.copytree(results / home / "results", folder / home / "results", dirs_exist_ok=True)
    imports = "".join(f'#import "{name}.typ": *\n' for name in modules.split())
    (folder / "asked.typ").write_text(f"{imports}#metadata({source}) <value>")
    file = folder / "asked.typ"
    return json.loads(typst.query(file, "<value>", field="value", one=True, root=folder, sys_inputs=tables))


def test_numbers_are_printed_as_python_does(tmp_path: Path) -> None:
    draws = random.Random(0)
    values = [draws.uniform(-1, 1) * 10 ** draws.randint(-3, 6) for _ in range(200)]
    values += [0.0, 0.5, 1.5, 2.5, 12345.5, 1.125, 0.375]
    small = [10 ** draws.uniform(-16, -4) for _ in range(50)]
    functions = "(fixed(x, 2), fixed(x, 0), count(calc.abs(x)), share(x, digits: 1))"
    found = asked(tmp_path / "a", f"{tuple(values)}.map(x => {functions})")
    want = [[f"{x:.2f}", f"{x:.0f}", f"{abs(x):,.0f}", f"{100 * x:.1f}%"] for x in values]
    assert [[text.replace("\N{MINUS SIGN}", "-") for text in row] for row in found] == [
        [re.sub(r"^-([0.]+%?)$", r"\1", text) for text in row] for row in want
    ]
    found = asked(tmp_path / "a", f"{tuple(small)}.map(x => power(x, digits: 2))")
    assert [float(text) for text in found] == [float(f"{x:.1e}") for x in small]
    row = "(value: -0.5, low: -1.0, high: 0.25, x: 2, x_low: 1, x_high: 3)"
    minus = "\N{MINUS SIGN}"
    assert asked(tmp_path / "a", f"interval({row}, digits: 1)") == f"{minus}0.5 [{minus}1.0, 0.2]"
    assert asked(tmp_path / "a", f'interval({row}, name: "x")') == "2.00 [1.00, 3.00]"


# Columns of which the contrary is no other sign: ratios, and counts of which none may be there.
PLANTED: list[tuple[str, str, object]] = [
    ("12_tables", "faster", 999),
    ("audit/03_anytime", "more", 99),
    ("audit/03_detection", "group", "held out"),
    ("audit/03_engines", "pit, any time", None),
    ("audit/engines", "verdict", "rejected"),
    ("06_every_tree", "different: A.4", 1),
    ("beam_speeds", "machine", "NVIDIA H200"),
    ("08_rules", "read", "abstract"),
    ("verdicts_by_seed", "refuted", 1),
]
HOLDS = "(((name, holds)) => (name, holds()))"


def test_every_remark_is_true_and_could_be_untrue(tmp_path: Path, results: Path) -> None:
    """Of results that say the opposite: what was larger is smaller, what was found was not, what
    held is open."""
    found = dict(asked(tmp_path / "a", f"remarks.pairs().map{HOLDS}", ROOT, "remarks"))
    assert found == dict.fromkeys(found, True)
    for file in results.rglob("data/results/*.csv"):
        table = pd.read_csv(file)
        for column in table:
            if table[column].dtype == bool:
                table[column] = ~table[column]
            elif pd.api.types.is_float_dtype(table[column]):
                table[column] = -table[column]
        if file.stem == "claims":
            table = table.assign(verdict="open")
        table.to_csv(file, index=False)
    for file in results.rglob("data/results/*.numbers.json"):
        stored = json.loads(file.read_text())
        for named in stored.values():
            named.update({name: _contrary(value, at) for at, (name, value) in enumerate(named.items())})
        file.write_text(json.dumps(stored))
    for name, column, value in PLANTED:
        file = results / located("data/results", f"{name}.csv")
        pd.read_csv(file).assign(**{column: value}).to_csv(file, index=False)
    contrary = asked(tmp_path / "b", f"remarks.pairs().map{HOLDS}", results, "remarks")
    assert dict(contrary) == dict.fromkeys(found, False)


def _contrary(value: Any, at: int) -> Any:
    """The other sign, different for equal numbers, and for an interval not around zero."""
    if isinstance(value, dict):
        return {"value": 1 - value["value"], "low": 1 - value["high"], "high": 1 - value["low"]}
    return not value if isinstance(value, bool) else -value - at


# Digits in the words of the paper, small: names, the sources' own numbers, and the level of all intervals.
NAMED = {"95%", "60%", "0.999", "a.5", "step 7", "figure 2", "figure 3", "table 4", "gemma 4"}
NAMED |= {"t5", "h200", "eagle-2", "eagle-3", "deepseek-v3", "smollm2", "smollm2-135m", "float32", "bfloat16"}


def test_no_number_is_typed() -> None:
    words = (PAPER / "paper.typ").read_text().lower()
    for code in (r"//.*", r"\$[^$]*\$", r'"[^"]*"', r"#[\w.]+"):
        words = re.sub(code, "", words)
    found = re.findall(r"(?:(?:step|figure|table|gemma) )?[\w.-]*\d[\w.%-]*", words)
    assert {word.strip(".-") for word in found} <= NAMED


@pytest.mark.parametrize("name", ["paper", "supplement"])
def test_no_semicolon_ends_an_expression(name: str) -> None:
    """Typst takes one that follows a number for the end of its code, and prints none."""
    assert not re.findall(r"#n[\w.-]+;.*", (PAPER / f"{name}.typ").read_text())


def test_the_committed_paper_is_made_of_the_committed_results_and_is_the_same_each_time() -> None:
    made = build(ROOT)
    assert made["paper.pdf"].startswith(b"%PDF")
    assert made == build(ROOT)
    for name in sorted(set(made) - {"paper.pdf", "supplement.pdf"}):
        assert (PAPER / name).read_bytes() == made[name], f"paper/{name} is stale; `make paper`"


@pytest.mark.parametrize(
    ("name", "old", "new", "says"),
    [
        ("data/results/06_speedup.csv", "", None, "06_speedup.csv"),
        ("data/results/04.numbers.json", "gain_limit", "lost", 'stores no number "gain_limit" for oracle-gamma'),
        ("data/results/06_every_tree.csv", ",0,0,39", ",1,0,39", "no longer true: “two plausible bugs” (bugs-of-beam"),
    ],
)
def test_what_is_missing_or_untrue_stops_it(
    results: Path, monkeypatch: pytest.MonkeyPatch, name: str, old: str, new: str | None, says: str
) -> None:
    file = results / name
    if new is None:
        file.unlink()
    else:
        assert old in file.read_text()
        file.write_text(file.read_text().replace(old, new))
    monkeypatch.setenv("SPECNB_OUT", str(results))
    with pytest.raises(SystemExit, match=r"no paper from .*: the paper does not compile") as stopped:
        main()
    assert says in str(stopped.value).replace('\\"', '"')
    assert not (results / "paper").exists()


@pytest.mark.parametrize(("source", "says"), [('#set text(font: "Nope")\nHi', "nope"), ("#nothing", "nothing")])
def test_errors_and_warnings_stop_it(tmp_path: Path, source: str, says: str) -> None:
    inputs = assembled(tmp_path, ROOT)
    (tmp_path / "paper.typ").write_text(source)
    with pytest.raises(RuntimeError, match=says):
        compiled(tmp_path, inputs)
